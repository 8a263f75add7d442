"""Embeddings: the pooled last hidden states of a prompt, however it went through the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ssd.execution.batch import FINAL, Row
from ssd.execution.runner import Runner
from ssd.execution.static import StaticRunner
from ssd.ipc.messages import Emission, Submit
from ssd.verifier.engine import TargetEngine
from tests.verifier.scripted import LONGEST, TEXTS, VOCAB, Poisoned, continuation, make_engine, submit, tiny_llama

POOLINGS = ("mean", "last")


def asked(request: int, prompt: list[int], pooling: str | None, **params: Any) -> Submit:
    return submit(request, prompt, pooling=pooling, max_tokens=6 if pooling is None else 1, **params)


def ends(engine: TargetEngine, submits: list[Submit]) -> tuple[dict[int, Emission], dict[int, list[int]]]:
    """The last emission of each request, and all its tokens."""
    for each in submits:
        engine.submit(each)
    last: dict[int, Emission] = {}
    tokens: dict[int, list[int]] = {each.request: [] for each in submits}
    while engine.busy:
        for emission in engine.step():
            assert emission.request not in last or last[emission.request].finish_reason is None
            last[emission.request] = emission
            tokens[emission.request] += emission.token_ids
    assert engine.pool.live == 0
    return last, tokens


def alone(prompt: list[int], pooling: str) -> bytes:
    last, tokens = ends(make_engine(), [asked(0, prompt, pooling)])
    assert (last[0].finish_reason, tokens[0]) == ("stop", [])
    assert last[0].embedding is not None
    return last[0].embedding


def expected(prompt: list[int], pooling: str) -> Tensor:
    runner = Runner(tiny_llama(), 16, 4, deterministic=True)
    rows = [Row(prompt, 0, range(16), 1)]
    context = runner.prepare(rows, [FINAL])
    runner.forward(rows, context)
    states = context.hidden[FINAL].double()
    return states.mean(dim=0) if pooling == "mean" else states[-1]


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("budget", [1, 3, 8, 64])
def test_it_is_that_of_one_forward_bit_for_bit(pooling: str, budget: int) -> None:
    """In chunks of any size, beside others that decode, and beside the other pooling."""
    prompts = [TEXTS[0], TEXTS[2], TEXTS[1][:1], TEXTS[1], TEXTS[0]]
    others = "last" if pooling == "mean" else "mean"
    poolings = [pooling, None, pooling, others, pooling]
    submits = [asked(i, *pair) for i, pair in enumerate(zip(prompts, poolings, strict=True))]
    last, tokens = ends(make_engine(budget=budget), submits)
    for i, (prompt, each) in enumerate(zip(prompts, poolings, strict=True)):
        if each is None:
            assert tokens[i] == continuation(tuple(prompt), ())[:6]
            assert last[i].embedding is None
            continue
        found = last[i].embedding
        assert found == alone(prompt, each)
        vector = torch.frombuffer(bytearray(found), dtype=torch.float32)
        torch.testing.assert_close(vector.double(), expected(prompt, each), rtol=1e-5, atol=1e-6)


def test_only_the_mean_needs_every_token_computed() -> None:
    engine = make_engine()
    for i, (pooling, cached) in enumerate([("mean", 0), ("mean", 0), ("last", 16), (None, 16)]):
        last, _ = ends(engine, [asked(i, TEXTS[0], pooling)])
        assert last[i].metrics is not None and last[i].metrics.cached_tokens == cached
        if pooling is not None:
            assert last[i].embedding == alone(TEXTS[0], pooling)


def test_preemption_in_the_middle_of_the_prompt_loses_and_doubles_nothing() -> None:
    engine = make_engine(budget=2, pages=LONGEST // 4)
    decoding, _ = submit(0, TEXTS[0], max_tokens=28), engine.submit
    last, tokens = ends(engine, [decoding, asked(1, TEXTS[2], "mean")])
    assert engine.load().preemptions > 0
    assert last[1].embedding == alone(TEXTS[2], "mean")
    assert tokens[0] == continuation(tuple(TEXTS[0]), ())[:28]


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_prompt_that_breaks_the_model_has_none(pooling: str) -> None:
    poison = next(token for token in range(VOCAB) if token not in TEXTS[0])
    engine = make_engine(model=Poisoned(tiny_llama(), poison), budget=7)
    last, _ = ends(engine, [asked(0, [*TEXTS[0], poison], pooling)])
    assert (last[0].finish_reason, last[0].embedding) == ("error", None)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_graph_shapes_keep_the_states(pooling: str, deterministic: bool) -> None:
    """A prompt that fits one shape, and one in several parts."""
    runner = StaticRunner(tiny_llama(), 64, 4, deterministic, most_rows=8, longest=5)
    runner.warm_up(8)
    submits = [asked(0, TEXTS[0][:3], pooling), asked(1, TEXTS[2], pooling), asked(2, TEXTS[1], None)]
    last, _ = ends(make_engine(runner=runner), submits)
    for i, prompt in enumerate((TEXTS[0][:3], TEXTS[2])):
        found = torch.frombuffer(bytearray(last[i].embedding or b""), dtype=torch.float32)
        torch.testing.assert_close(found.double(), expected(prompt, pooling), rtol=1e-5, atol=1e-6)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 20), st.sampled_from(["mean", "last", None])),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 5),
    st.integers(0, 6),
    st.sampled_from([1, 2, 5, 40]),
)
def test_in_any_company(asks: list[tuple[int, int, str | None]], page_size: int, spare: int, budget: int) -> None:
    """Chunks, prefix hits, preemptions: no bit changes."""
    engine = make_engine(page_size=page_size, pages=-(-LONGEST // page_size) + spare, budget=budget)
    prompts = [TEXTS[text][:length] for text, length, _ in asks]
    last, tokens = ends(engine, [asked(i, prompts[i], pooling) for i, (_, _, pooling) in enumerate(asks)])
    for i, (_, _, pooling) in enumerate(asks):
        if pooling is None:
            assert tokens[i] == continuation(tuple(prompts[i]), ())[:6]
        else:
            assert last[i].embedding == alone(prompts[i], pooling)
