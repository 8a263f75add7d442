"""RELIABILITY 5, levels 2 and 7: whatever is proposed, whenever, in whatever batch, the tokens are those of `ar`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.ipc.messages import Load
from ssd.speculation.noise import NoiseCache
from ssd.speculation.sampling import Law, argmax, perturbed
from tests.target.scripted import (
    LONGEST,
    SCRIPTS,
    TIMINGS,
    VOCAB,
    Answer,
    BrokenOnce,
    Poisoned,
    ScriptedProposer,
    continuation,
    make_engine,
    plain_logits,
    play,
    submit,
    tiny_llama,
)

LAWS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "seed": 1},
    {"temperature": 1.0, "seed": 2, "top_k": 8},
    {"temperature": 1.3, "seed": 3, "top_p": 0.8},
    {"temperature": 0.9, "seed": 2**63 - 1, "min_p": 0.1},
    {"temperature": 1.1, "seed": 5, "top_k": 20, "top_p": 0.95, "min_p": 0.02},
]
SAMPLED = LAWS[5]
# What depends on the text so far, and differs along a verification.
ADJUSTED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"presence_penalty": 0.9, "frequency_penalty": 0.6, "temperature": 0.7, "seed": 1},
    {"repetition_penalty": 0.8, "frequency_penalty": -0.5, "logit_bias": ((3, 2.0), (41, -100.0), (17, 1.5))},
    {"repetition_penalty": 1.2, "presence_penalty": -1.0, "logit_bias": ((9, 1.0),), "temperature": 1.1, "top_p": 0.9},
]
_RANDOM = torch.randint(VOCAB, (60,), generator=torch.Generator().manual_seed(0)).tolist()
TEXTS = [_RANDOM[:20], _RANDOM[:8] + _RANDOM[20:32], _RANDOM[40:60]]  # two begin alike


def truth(prompt: Sequence[int], law: dict[str, Any], longest: int = LONGEST) -> list[int]:
    return continuation(tuple(prompt), tuple(law.items()), longest)


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


@pytest.mark.timeout(1200)  # two minutes on a quiet machine
@settings(deadline=None, max_examples=10_000)
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
    """Level 4's target side: K + 1 tokens a round, and the last round no longer than it need be."""
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
    assert metrics.acceptance_histogram == [11]


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


# -- rows that fail ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", [LAWS[0], SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("script", sorted(SCRIPTS))
def test_logits_that_are_not_numbers_fail_their_request_alone(law: dict[str, Any], script: str) -> None:
    """The model breaks after a token that the second request alone emits: it ends there as in plain decoding, with
    what it had; the others do not notice."""
    texts = [truth(prompt, law)[:14] for prompt in TEXTS]
    poison = next(token for token in texts[1] if token not in {*_RANDOM, *texts[0], *texts[2]})
    healthy = texts[1].index(poison) + 1
    proposer = ScriptedProposer(
        {i: TEXTS[i] + truth(TEXTS[i], law) for i in range(3)}, {i: script for i in range(3)}, "at once"
    )
    engine = make_engine(proposer, model=Poisoned(tiny_llama(), poison))
    answers = play(engine, [submit(i, TEXTS[i], max_tokens=14, **law) for i in range(3)])
    assert (answers[1].ids, answers[1].reason) == (texts[1][:healthy], "error")
    for i in (0, 2):
        assert (answers[i].ids, answers[i].reason) == (texts[i], "length")


def test_a_draft_token_that_the_model_cannot_compute_changes_nothing() -> None:
    """Its keys and values are not numbers, and a masked product with them is none either."""
    texts = {i: truth(TEXTS[i], SAMPLED) for i in range(2)}
    broken = next(token for token in range(VOCAB) if token not in {*_RANDOM, *texts[0], *texts[1]})
    expected = {i: [*texts[i][:2], broken, *texts[i][3:]] for i in range(2)}
    proposer = ScriptedProposer({i: TEXTS[i] + expected[i] for i in range(2)}, dict.fromkeys(range(2), "right"))
    engine = make_engine(proposer, model=tiny_llama(broken=broken))
    answers = play(engine, [submit(i, TEXTS[i], max_tokens=9, **SAMPLED) for i in range(2)])
    for i in range(2):
        assert (answers[i].ids, answers[i].reason) == (texts[i][:9], "length")
        assert answers[i].metrics.accepted_tokens > 0


def test_a_prompt_that_breaks_the_model_fails_at_once() -> None:
    poison = next(token for token in range(VOCAB) if token not in {*_RANDOM, *truth(TEXTS[0], {})})
    engine = make_engine(model=Poisoned(tiny_llama(), poison))
    asked = [submit(0, TEXTS[0], max_tokens=9), submit(1, [*TEXTS[2], poison], max_tokens=9, logprobs=2)]
    answers = play(engine, asked)
    assert answers[0].ids == truth(TEXTS[0], {})[:9]
    assert (answers[1].ids, answers[1].reason, answers[1].logprobs) == ([], "error", [])


@pytest.mark.parametrize("budget", [64, 8])
def test_a_failed_request_leaves_nothing_for_others_to_find(budget: int) -> None:
    """The same prompt again, after a forward that filled its pages with NaN; a piece of a prompt is found out too."""
    engine = make_engine(model=BrokenOnce(tiny_llama()), budget=budget)
    failed, again = (play(engine, [submit(i, TEXTS[0], max_tokens=9)])[i] for i in range(2))
    assert (failed.ids, failed.reason) == ([], "error")
    assert (again.ids, again.metrics.cached_tokens) == (truth(TEXTS[0], {})[:9], 0)


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", [LAWS[0], SAMPLED], ids=["greedy", "sampled"])
def test_a_cached_prefix_gives_the_same_ids(law: dict[str, Any]) -> None:
    """The same prompt again, then one that goes on from the first answer."""
    engine = make_engine()
    ids = truth(TEXTS[0], law)
    first, again = (play(engine, [submit(i, TEXTS[0], max_tokens=12, **law)])[i] for i in range(2))
    assert first.ids == again.ids == ids[:12]
    assert (first.metrics.cached_tokens, again.metrics.cached_tokens) == (0, 16)
    longer = play(engine, [submit(2, TEXTS[0] + ids[:12], max_tokens=9, **law)])[2]
    assert longer.ids == ids[12:21] and longer.metrics.cached_tokens == 28


@pytest.mark.parametrize("law", [LAWS[0], SAMPLED], ids=["greedy", "sampled"])
def test_a_salt_hides_a_prefix_and_changes_no_id(law: dict[str, Any]) -> None:
    engine = make_engine()
    salts = ["", "a", "a", "b", ""]
    asked = [submit(i, TEXTS[0], max_tokens=12, cache_salt=salt, **law) for i, salt in enumerate(salts)]
    answers = [play(engine, [each])[i] for i, each in enumerate(asked)]
    assert all(answer.ids == truth(TEXTS[0], law)[:12] for answer in answers)
    assert [answer.metrics.cached_tokens for answer in answers] == [0, 0, 16, 0, 16]


def test_prompts_of_different_salts_do_not_wait_for_each_other() -> None:
    engine = make_engine()
    answers = play(engine, [submit(i, TEXTS[0], max_tokens=2, cache_salt=str(i)) for i in range(3)])
    assert [answer.steps[0] for answer in answers.values()] == [0, 0, 0]
    assert [answer.metrics.cached_tokens for answer in answers.values()] == [0, 0, 0]


def test_what_was_cached_need_not_be_told() -> None:
    engine = make_engine(cache_report=False)
    assert [play(engine, [submit(i, TEXTS[0], max_tokens=2)])[i].metrics.cached_tokens for i in range(2)] == [0, 0]


def test_rejected_drafts_are_in_nobodys_prefix() -> None:
    """Pages that held wrong drafts are shared with the right keys and values only."""
    ids = truth(TEXTS[0], SAMPLED)
    engine = make_engine(ScriptedProposer({i: TEXTS[0] + ids for i in range(3)}, dict.fromkeys(range(3), "wrong")))
    play(engine, [submit(0, TEXTS[0], max_tokens=16, **SAMPLED)])
    longer = play(engine, [submit(1, TEXTS[0] + ids[:16], max_tokens=9, **SAMPLED)])[1]
    assert longer.ids == ids[16:25] and longer.metrics.cached_tokens == 32


def test_preempted_sequences_go_on_where_they_were() -> None:
    """Four sequences in pages for two: they take turns, and nobody is told a token twice or another one."""
    prompts = [[*TEXTS[i % 3][:9], i] for i in range(4)]
    texts = {i: prompt + truth(prompt, SAMPLED) for i, prompt in enumerate(prompts)}
    proposer = ScriptedProposer(texts, dict.fromkeys(texts, "changing"))
    engine = make_engine(proposer, pages=12, page_size=4)
    answers = play(engine, [submit(i, prompt, max_tokens=20, **SAMPLED) for i, prompt in enumerate(prompts)])
    assert {i: answer.ids for i, answer in answers.items()} == {i: text[10:30] for i, text in texts.items()}
    assert proposer.admissions.total() > 4


def test_a_prompt_longer_than_the_budget_leaves_the_queue() -> None:
    """While another one decodes; it is read in pieces that leave the other its tokens."""
    engine = make_engine(budget=3)
    answers = play(engine, [submit(0, TEXTS[0][:2], max_tokens=20), submit(1, TEXTS[2], max_tokens=4)], {1: 2})
    assert answers[0].ids == truth(TEXTS[0][:2], {})[:20] and answers[1].ids == truth(TEXTS[2], {})[:4]
    assert answers[0].steps == list(range(20)) and answers[1].steps[0] == 2 + 9  # 20 tokens, 2 a step


def test_the_context_may_be_filled_to_its_last_token() -> None:
    """No live-lock and no page too many at the limit: a cache of exactly one sequence."""
    prompt = TEXTS[0]
    proposer = ScriptedProposer({0: prompt + truth(prompt, {})}, {0: "right"})
    answer = play(make_engine(proposer, pages=LONGEST // 4), [submit(0, prompt, k=6, max_tokens=1000)])[0]
    assert answer.ids == truth(prompt, {}) and len(prompt) + len(answer.ids) == LONGEST


def test_prompts_that_are_alike_are_computed_once() -> None:
    """Four choices of one prompt: whole pages are taken from the first, and each has a text of its own."""
    engine = make_engine(budget=12)
    laws = [SAMPLED | {"seed": seed} for seed in range(4)]
    answers = play(engine, [submit(i, TEXTS[0], max_tokens=9, **law) for i, law in enumerate(laws)])
    assert [answers[i].ids for i in range(4)] == [truth(TEXTS[0], law)[:9] for law in laws]
    assert [answers[i].metrics.cached_tokens for i in range(4)] == [0, 16, 16, 16]


# -- figures ----------------------------------------------------------------------------------------------------------


def test_the_load_says_how_busy_the_engine_is() -> None:
    engine = make_engine(budget=24, sequences=2, pages=20)
    assert engine.load() == Load(kv_cache_usage=0.0)
    for i in (0, 2, 1):
        engine.submit(submit(i, TEXTS[i], max_tokens=5))
    engine.step()
    load = engine.load()
    assert (load.running, load.waiting, load.batched_tokens) == (2, 1, 24)
    assert load.kv_cache_usage == (5 + 1) / 20 and load.verify_seconds > 0 and load.draft_state == "down"
    for i in range(3):
        engine.abort(i)
    assert (engine.load().running, engine.load().waiting, engine.load().kv_cache_usage) == (0, 0, 0.0)
    assert engine.step() == [] and engine.load() == Load()


def test_the_time_in_the_queue_ends_with_the_first_place() -> None:
    """Two requests for one place; then one that loses its place after it had it."""
    answers = play(make_engine(sequences=1), [submit(i, TEXTS[i], max_tokens=6) for i in range(2)])
    first, second = answers[0].metrics, answers[1].metrics
    assert 0 <= first.queue_time_ms < first.time_to_first_token_ms
    assert first.generation_time_ms < second.queue_time_ms < second.time_to_first_token_ms
    proposer = ScriptedProposer({i: TEXTS[i] for i in range(2)}, dict.fromkeys(range(2), "absent"))
    answers = play(make_engine(proposer, pages=12), [submit(i, TEXTS[i], max_tokens=26) for i in range(2)])
    assert proposer.admissions[1] > 1
    assert answers[1].metrics.queue_time_ms < answers[0].metrics.generation_time_ms


def test_more_requests_than_places_wait_their_turn() -> None:
    engine = make_engine(sequences=2)
    answers = play(engine, [submit(i, TEXTS[i % 3], max_tokens=5) for i in range(7)])
    assert [answers[i].ids for i in range(7)] == [truth(TEXTS[i % 3], {})[:5] for i in range(7)]
    assert [answers[i].steps[0] for i in range(7)] == sorted(answers[i].steps[0] for i in range(7))
