"""Whatever is proposed, whenever, in whatever batch, the tokens are those of `ar`."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.law import Law
from ssd.speculation.noise import NoiseCache
from ssd.speculation.sampling import argmax, perturbed
from tests.verifier.scripted import (
    ADJUSTED,
    LAWS,
    LONGEST,
    SAMPLED,
    SCRIPTS,
    TEXTS,
    TIMINGS,
    VOCAB,
    Answer,
    ScriptedProposer,
    make_engine,
    plain_logits,
    play,
    submit,
    truth,
)


class Ask(NamedTuple):
    """One request of a scenario: when it comes, what it wants, how it is helped, how long its client stays."""

    text: int
    length: int
    law: dict[str, Any]
    max_tokens: int
    k: int
    script: str
    arrival: int
    patience: int | None

    @property
    def prompt(self) -> list[int]:
        return TEXTS[self.text][: self.length]


asks = st.builds(
    Ask,
    text=st.integers(0, len(TEXTS) - 1),
    length=st.integers(1, 20),
    law=st.sampled_from([*LAWS, *ADJUSTED]),
    max_tokens=st.integers(1, 11),
    k=st.integers(1, 6),
    script=st.sampled_from(sorted(SCRIPTS)),
    arrival=st.integers(0, 6),
    patience=st.one_of(st.none(), st.none(), st.integers(0, 8)),
)


def ending(ids: list[int], most: int, stops: frozenset[int]) -> tuple[list[int], str]:
    """Where plain decoding ends: with the first stop token, or as `most` tokens are reached."""
    stopped = next((i for i, token in enumerate(ids[:most]) if token in stops), None)
    return (ids[:most], "length") if stopped is None else (ids[: stopped + 1], "stop")


@pytest.mark.timeout(1200)  # 15 s on a quiet machine
@settings(max_examples=1_500)
@given(
    st.lists(asks, min_size=1, max_size=6),
    st.sampled_from(TIMINGS),
    st.integers(1, 5),
    st.integers(0, 10),
    st.sampled_from([1, 2, 3, 5, 8, 13, 40, 200]),
    st.integers(1, 8),
    st.sampled_from([26, LONGEST]),
    st.sampled_from([frozenset[int](), frozenset({6, 28})]),
    st.integers(0, 2**32),
)
def test_no_proposal_and_no_neighbour_changes_a_token(
    scenario: list[Ask],
    timing: str,
    page_size: int,
    spare_pages: int,
    budget: int,
    sequences: int,
    longest: int,
    stops: frozenset[int],
    seed: int,
) -> None:
    """Prompts in chunks, few pages and so preemptions, prefix hits, arrivals and aborts at any step: every request
    gets what plain decoding alone gives it."""
    submits, truths = [], {}
    for request, ask in enumerate(scenario):
        submits.append(submit(request, ask.prompt, k=ask.k, max_tokens=ask.max_tokens, **ask.law))
        truths[request] = truth(ask.prompt, ask.law)
    proposer = ScriptedProposer(
        {request: ask.prompt + truths[request] for request, ask in enumerate(scenario)},
        {request: ask.script for request, ask in enumerate(scenario)},
        timing,
        seed,
    )
    engine = make_engine(
        proposer,
        page_size=page_size,
        pages=-(-longest // page_size) + spare_pages,
        budget=budget,
        sequences=sequences,
        longest=longest,
        stops=stops,
    )
    arrivals = {request: ask.arrival for request, ask in enumerate(scenario)}
    aborts = {r: ask.arrival + ask.patience for r, ask in enumerate(scenario) if ask.patience is not None}
    for request, answer in play(engine, submits, arrivals, aborts).items():
        ask = scenario[request]
        ids, reason = ending(truths[request], min(ask.max_tokens, longest - ask.length), stops)
        if answer.reason == "aborted":
            assert answer.ids == ids[: len(answer.ids)]
        else:
            assert (answer.ids, answer.reason) == (ids, reason)


# -- that it speculates at all ----------------------------------------------------------------------------------------


def one(script: str, law: dict[str, Any], k: int = 4, timing: str = "at once", **params: Any) -> Answer:
    """TEXTS[0] alone, with a proposer of one kind."""
    prompt, law = TEXTS[0], law | params
    plain = {key: value for key, value in law.items() if key not in ("max_tokens", "logprobs")}
    proposer = ScriptedProposer({0: prompt + truth(prompt, plain)}, {0: script}, timing)
    return play(make_engine(proposer), [submit(0, prompt, k=k, **law)])[0]


@pytest.mark.parametrize("law", [*LAWS, *ADJUSTED])
@pytest.mark.parametrize("timing", ["at once", "late"])
def test_what_is_right_is_accepted(law: dict[str, Any], timing: str) -> None:
    """K + 1 tokens a round, and the last round no longer than it need be."""
    answer = one("right", law, timing=timing, max_tokens=24)
    metrics = answer.metrics
    assert (metrics.rounds, metrics.drafted_tokens, metrics.accepted_tokens) == (5, 18, 18)
    assert metrics.mean_acceptance_length == pytest.approx(1 + 18 / 5)
    assert metrics.acceptance_histogram == [0, 0, 1, 0, 4]
    assert answer.rounds == [(0, 0, "")] + [(4, 4, "")] * 4 + [(2, 2, "")]
    assert len(answer.steps) == 6


@pytest.mark.parametrize("law", [*LAWS, *ADJUSTED])
def test_what_is_wrong_is_not(law: dict[str, Any]) -> None:
    metrics = one("wrong", law, max_tokens=12).metrics
    assert (metrics.rounds, metrics.accepted_tokens) == (11, 0) and metrics.drafted_tokens > 30
    assert metrics.acceptance_histogram == [11] and metrics.accepted_by_source == {}


@pytest.mark.parametrize("law", ADJUSTED)
def test_adjustments_make_another_text(law: dict[str, Any]) -> None:
    """Else the tests above would show nothing: greedy at temperature 0, the same noise above."""
    assert any(truth(prompt, law) != truth(prompt, unadjusted(law)) for prompt in TEXTS)


def unadjusted(law: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in law.items() if not key.endswith(("penalty", "bias"))}


def test_nothing_is_accepted_after_a_difference() -> None:
    """The adversarial proposer is right again behind its one mistake."""
    answer = one("adversarial", SAMPLED, k=6, max_tokens=24)
    assert 0 < answer.metrics.accepted_tokens < answer.metrics.drafted_tokens
    assert answer.ids == truth(TEXTS[0], SAMPLED)[:24]


def test_the_first_token_is_told_by_the_step_that_ends_the_prefill() -> None:
    answer = play(make_engine(budget=8), [submit(0, TEXTS[0], max_tokens=3)])[0]
    assert answer.steps == [2, 3, 4]


# -- where a run ends -------------------------------------------------------------------------------------------------

ENDS = ["eos", "stop_token_ids", "max_tokens", "max_model_len"]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("law", [LAWS[0], SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("script", ["right", "partial", "absent"])
def test_the_end_at_each_position_of_an_accepted_run(end: str, law: dict[str, Any], script: str) -> None:
    """K = 4: the first token of all, then each place in the first two runs of five."""
    prompt, by_token = TEXTS[1], end in ("eos", "stop_token_ids")
    ids = truth(prompt, law)
    for last in (i for i in range(11) if not by_token or ids.index(ids[i]) == i):
        stops = frozenset({ids[last]}) if end == "eos" else frozenset[int]()
        longest = len(prompt) + last + 1 if end == "max_model_len" else LONGEST
        wanted: dict[str, Any] = {"max_tokens": last + 1 if end == "max_tokens" else 30}
        if end == "stop_token_ids":
            wanted["stop_token_ids"] = (VOCAB - 1, ids[last])
        proposer = ScriptedProposer({0: prompt + ids}, {0: script})
        answer = play(make_engine(proposer, stops=stops, longest=longest), [submit(0, prompt, **law | wanted)])[0]
        assert (answer.ids, answer.reason) == (ids[: last + 1], "stop" if by_token else "length")


@pytest.mark.parametrize("script", ["right", "absent"])
def test_ignored_eos(script: str) -> None:
    """The model's own end is ignored, the request's is not."""
    ids = truth(TEXTS[0], SAMPLED)
    last = next(i for i in range(4, 20) if ids.index(ids[i]) == i)
    proposer = ScriptedProposer({0: TEXTS[0] + ids}, {0: script})
    engine = make_engine(proposer, stops=frozenset({ids[2]}))
    asked = submit(0, TEXTS[0], max_tokens=20, ignore_eos=True, stop_token_ids=(ids[last],), **SAMPLED)
    answer = play(engine, [asked])[0]
    assert (answer.ids, answer.reason) == (ids[: last + 1], "stop")


@pytest.mark.parametrize("law", [LAWS[0], SAMPLED, *ADJUSTED])
@pytest.mark.parametrize("script", ["right", "changing", "stale"])
@pytest.mark.parametrize("least", [1, 4, 9])
def test_no_end_before_the_minimum(law: dict[str, Any], script: str, least: int) -> None:
    """Every token that plain decoding would end with is an end, one of them the request's own: it writes others until
    it has its minimum. In whatever way it is helped, as in plain decoding."""
    ends = sorted(set(truth(TEXTS[0], law)[:12]))
    wanted = {**law, "max_tokens": 20, "min_tokens": least, "stop_token_ids": tuple(ends[:1])}
    stops = frozenset(ends[1:])
    plain = play(make_engine(stops=stops), [submit(0, TEXTS[0], **wanted)])[0]
    proposer = ScriptedProposer({0: TEXTS[0] + plain.ids, 1: TEXTS[0] + ends}, {0: script}, seed=least)
    helped = play(make_engine(proposer, stops=stops), [submit(0, TEXTS[0], **wanted)])[0]
    assert (helped.ids, helped.reason) == (plain.ids, plain.reason)
    assert len(plain.ids) > least and not set(plain.ids[:least]) & set(ends)
    assert plain.reason == ("stop" if plain.ids[-1] in ends else "length")


# -- log-probabilities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", [LAWS[0], SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("script", ["right", "wrong", "adversarial", "changing"])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_logprobs_are_those_of_plain_decoding(law: dict[str, Any], script: str, count: int) -> None:
    """One entry a token, of the distribution before temperature and filters, `count` alternatives in order."""
    plain, helped = (one(kind, law, max_tokens=15, logprobs=count) for kind in ("absent", script))
    assert helped.ids == plain.ids == [entry.token_id for entry in helped.logprobs]
    for mine, theirs in zip(helped.logprobs, plain.logprobs, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
        assert [value for _, value in mine.top] == pytest.approx([value for _, value in theirs.top], abs=1e-4)
        assert len(mine.top) == count and mine.top == sorted(mine.top, key=lambda pair: -pair[1])
        assert law or not count or mine.top[0] == (mine.token_id, mine.logprob)


@pytest.mark.parametrize("law", [SAMPLED, *ADJUSTED])
def test_logprobs_are_the_models_own(law: dict[str, Any]) -> None:
    """Whatever the request does to the logits before it samples."""
    answer = one("right", law, max_tokens=15, logprobs=20)
    table = torch.log_softmax(plain_logits(TEXTS[0] + answer.ids[:-1], 15), dim=-1)
    for row, entry in zip(table, answer.logprobs, strict=True):
        assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-4)
        assert [value for _, value in entry.top] == pytest.approx(row.topk(20).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("law", LAWS)
def test_ids_are_the_samples_of_a_plain_forward(law: dict[str, Any]) -> None:
    """The noise of a token is that of its own position: where the draft expects it."""
    ids = one("changing", law, max_tokens=20).ids
    logits = plain_logits(TEXTS[0] + ids[:-1], 20)
    assert ids == argmax(perturbed(logits, Law(**law), range(len(TEXTS[0]), len(TEXTS[0]) + 20), NoiseCache(VOCAB)))


def test_no_logprobs_unless_asked() -> None:
    assert one("right", SAMPLED, max_tokens=5).logprobs == []
