"""Log-probabilities of the prompt: of every token but the first, once, however the prompt went through the engine."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ssd.models.interface import Model
from ssd.verifier import scheduler
from tests.verifier.scripted import (
    LONGEST,
    SCRIPTS,
    VOCAB,
    Answer,
    Poisoned,
    ScriptedProposer,
    Wrapped,
    continuation,
    make_engine,
    plain_logits,
    play,
    submit,
    tiny_llama,
)

_RANDOM = torch.randint(VOCAB, (60,), generator=torch.Generator().manual_seed(1)).tolist()
TEXTS = [_RANDOM[:20], _RANDOM[:9] + _RANDOM[20:31], _RANDOM[40:60]]  # two begin alike


def check(prompt: list[int], answer: Answer, count: int) -> None:
    """Against one forward over the whole prompt."""
    assert answer.prompt_logprobs is not None
    assert [entry.token_id for entry in answer.prompt_logprobs] == prompt[1:]
    table = torch.log_softmax(plain_logits(prompt, len(prompt)), dim=-1)
    for row, entry in zip(table, answer.prompt_logprobs, strict=False):
        assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-4)
        best = row.topk(count)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("budget", [1, 3, 8, 64])
@pytest.mark.parametrize("count", [0, 5])
def test_they_are_those_of_one_forward(budget: int, count: int) -> None:
    """Prompts in chunks of any size; whoever did not ask gets none, and the same tokens as ever. What the request does
    to its logits does not show."""
    prompts = [TEXTS[0], TEXTS[2], TEXTS[1][:1], TEXTS[1][:2], TEXTS[1]]
    asks = [count, None, count, count, None]
    submits = [
        submit(i, prompt, max_tokens=6, prompt_logprobs=ask, repetition_penalty=1.0 if ask is None else 2.0)
        for i, (prompt, ask) in enumerate(zip(prompts, asks, strict=True))
    ]
    answers = play(make_engine(budget=budget), submits)
    for i, (prompt, ask) in enumerate(zip(prompts, asks, strict=True)):
        if ask is None:
            assert answers[i].prompt_logprobs is None
            assert answers[i].ids == continuation(tuple(prompt), ())[:6]
        else:
            check(prompt, answers[i], ask)


class Counting(Wrapped):
    """A model that notes how many rows of logits each forward makes."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.rows: list[int] = []

    def logits(self, hidden: Tensor) -> Tensor:
        self.rows.append(len(hidden))
        return super().logits(hidden)


def test_the_logits_of_a_long_prompt_are_never_there_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However large the budget is; a prompt that nothing is asked about is read in one chunk all the same."""
    monkeypatch.setattr(scheduler, "_PROMPT_OUTPUTS", 6)
    model = Counting(tiny_llama())
    answers = play(make_engine(model=model), [submit(0, TEXTS[0], max_tokens=2, prompt_logprobs=2)])
    check(TEXTS[0], answers[0], 2)
    assert model.rows == [6, 6, 6, 2, 1]
    model.rows.clear()
    play(make_engine(model=model), [submit(0, TEXTS[0], max_tokens=2)])
    assert model.rows == [1, 1]


@pytest.mark.parametrize(("asks", "cached"), [((None, 3, None), (0, 0, 16)), ((3, None), (0, 16))])
def test_a_cached_prefix_is_computed_again_and_shared_all_the_same(
    asks: tuple[int | None, ...], cached: tuple[int, ...]
) -> None:
    engine = make_engine()
    for i, ask in enumerate(asks):
        answer = play(engine, [submit(i, TEXTS[0], max_tokens=4, prompt_logprobs=ask)])[i]
        assert answer.metrics.cached_tokens == cached[i]
        assert answer.ids == continuation(tuple(TEXTS[0]), ())[:4]
        if ask is not None:
            check(TEXTS[0], answer, ask)


def test_others_wait_for_its_pages_and_it_waits_for_nobodys() -> None:
    submits = [submit(i, TEXTS[0], max_tokens=3, prompt_logprobs=ask) for i, ask in enumerate((None, 1, None, 1))]
    answers = play(make_engine(budget=8), submits)
    assert [answers[i].metrics.cached_tokens for i in range(4)] == [0, 0, 16, 0]
    for i in (1, 3):
        check(TEXTS[0], answers[i], 1)


def test_preemption_in_the_middle_of_the_prompt_loses_and_doubles_nothing() -> None:
    """The older one decodes, and its pages run out as the other has read two thirds, a token a step."""
    proposer = ScriptedProposer({i: TEXTS[i] for i in (0, 2)}, dict.fromkeys((0, 2), "absent"))
    engine = make_engine(proposer, budget=2, pages=LONGEST // 4)
    asked = [submit(0, TEXTS[0], max_tokens=28), submit(2, TEXTS[2], max_tokens=5, prompt_logprobs=2)]
    answers = play(engine, asked)
    assert proposer.admissions[2] > 1
    check(TEXTS[2], answers[2], 2)
    assert answers[2].ids == continuation(tuple(TEXTS[2]), ())[:5]


def test_a_prompt_that_breaks_the_model_has_none() -> None:
    poison = next(token for token in range(VOCAB) if token not in TEXTS[0])
    prompt = [*TEXTS[0][:6], poison, *TEXTS[0][6:]]
    engine = make_engine(model=Poisoned(tiny_llama(), poison), budget=7)
    answer = play(engine, [submit(0, prompt, prompt_logprobs=1)])[0]
    assert (answer.ids, answer.reason, answer.prompt_logprobs) == ([], "error", None)


class Ask(NamedTuple):
    text: int
    length: int
    count: int | None
    arrival: int
    script: str
    patience: int | None


asks = st.builds(
    Ask,
    text=st.integers(0, 2),
    length=st.integers(1, 20),
    count=st.sampled_from([None, 0, 2]),
    arrival=st.integers(0, 6),
    script=st.sampled_from(sorted(SCRIPTS)),
    patience=st.one_of(st.none(), st.none(), st.integers(0, 8)),
)


@settings(max_examples=400)
@given(
    st.lists(asks, min_size=1, max_size=6),
    st.integers(1, 5),
    st.integers(0, 6),
    st.sampled_from([1, 2, 3, 5, 8, 40]),
    st.integers(1, 6),
)
def test_in_any_company(scenario: list[Ask], page_size: int, spare: int, budget: int, places: int) -> None:
    """Chunks, prefix hits, preemptions, aborts: whoever asked gets all, and everybody gets the tokens of `ar`."""
    prompts = [TEXTS[ask.text][: ask.length] for ask in scenario]
    texts = [continuation(tuple(prompt), ()) for prompt in prompts]
    proposer = ScriptedProposer(
        {i: prompt + text for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True))},
        {i: ask.script for i, ask in enumerate(scenario)},
    )
    engine = make_engine(
        proposer, page_size=page_size, pages=-(-LONGEST // page_size) + spare, budget=budget, sequences=places
    )
    answers = play(
        engine,
        [submit(i, prompts[i], max_tokens=6, prompt_logprobs=ask.count) for i, ask in enumerate(scenario)],
        {i: ask.arrival for i, ask in enumerate(scenario)},
        {i: ask.arrival + ask.patience for i, ask in enumerate(scenario) if ask.patience is not None},
    )
    for i, ask in enumerate(scenario):
        if answers[i].reason == "aborted":
            continue
        assert answers[i].ids == texts[i][:6]
        if ask.count is None:
            assert answers[i].prompt_logprobs is None
        else:
            check(prompts[i], answers[i], ask.count)
