"""Verification in CUDA graphs against the same forwards launched one kernel after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from ssd.config.params import Speculation
from ssd.draft.chain_cache import ChainTokens
from ssd.draft.drafter import ChainRows, PathRow
from ssd.draft.static_shapes import StaticDrafter, TreeRunner
from ssd.execution.batch import Row
from ssd.execution.runner import Runner
from ssd.execution.static import StaticRunner
from ssd.law import Law
from ssd.models.families.llama import Llama
from ssd.models.weights import Weights, dummy
from ssd.speculation.noise import NoiseCache
from ssd.speculation.sampling import argmax, perturbed
from tests.draft.pair import config
from tests.draft.steps import trees_of

GPU = torch.device("cuda:0")
PAGE, PAGES, LONGEST, VOCAB = 16, 400, 1024, 4096
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


@lru_cache
def llama(dtype: torch.dtype) -> Llama:
    small = dummy(torch.float32, torch.device("cpu"))

    def read(name: str, shape: tuple[int, ...]) -> Tensor:
        return (small(name, *shape) * (1 if name.endswith("norm.weight") else 3)).to(GPU, dtype)

    return Llama(CONFIG, Weights(read), dtype, GPU, LONGEST)


@lru_cache
def runner(dtype: torch.dtype, deterministic: bool = False, capture: bool = True) -> StaticRunner:
    """Its cache held NaN before the graphs were made."""
    made = StaticRunner(
        llama(dtype), PAGES, PAGE, deterministic, most_rows=6, longest=8, layers=(1, 3), capture=capture
    )
    made.cache.keys.fill_(torch.nan)
    made.cache.values.fill_(torch.nan)
    made.warm_up(8)
    return made


def batch(lengths: Sequence[int], starts: Sequence[int], seed: int = 0) -> tuple[list[Row], list[Row]]:
    """What must have been computed before, and rows upon it."""
    dice, free = Random(seed), list(range(PAGES))
    dice.shuffle(free)
    slots = dice.sample(range(6), len(lengths))
    first, then = [], []
    for length, start, slot in zip(lengths, starts, slots, strict=True):
        text = [dice.randrange(VOCAB) for _ in range(length)]
        pages = [free.pop() for _ in range(-(-length // PAGE))]
        if start:
            first.append(Row(text[:start], 0, pages, 0, slot))
        then.append(Row(text[start:], start, pages, length - start, slot))
    return first, then


BATCHES = (
    ((9,), (8,)),
    ((300,), (292,)),
    ((20, 700, 33), (15, 699, 25)),
    ((8, 7, 90, 300, 5, 60), (0, 6, 85, 296, 0, 59)),
)


def error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(("lengths", "starts"), BATCHES, ids=str)
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)], ids=str)
def test_graphs_give_the_logits_of_plain_launches(
    lengths: tuple[int, ...], starts: tuple[int, ...], dtype: torch.dtype, most: float
) -> None:
    """Of this model in double precision on the CPU too, if in 32 bits."""
    static, (first, rows) = runner(dtype), batch(lengths, starts)
    for _ in range(3):  # the same graph again, and after others
        if first:
            static.forward(first)
        got = static.forward(rows).clone()
        plain = Runner(llama(dtype), PAGES, PAGE, attention="torch")
        if first:
            plain.forward(first)
        assert error(got, plain.forward(rows)) <= most
        static.forward(batch((40, 41), (35, 33), seed=5)[1])


def test_dependent_launches_give_the_same_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit; again and again, as a missing wait shows now and then."""
    usual, (first, rows) = runner(torch.bfloat16), batch(*BATCHES[3])
    usual.forward(first)
    expected = usual.forward(rows).clone()
    llama.cache_clear()
    monkeypatch.setenv("SSD_PDL", "1")
    tried = runner.__wrapped__(torch.bfloat16)
    llama.cache_clear()
    tried.forward(first)
    for _ in range(30):
        assert torch.equal(tried.forward(rows), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_cache_in_8_bits_is_read_as_it_was_written(dtype: torch.dtype) -> None:
    """By the kernels, captured, and by torch, which may round a number next to a tie the other way."""
    first, rows = batch(*BATCHES[3])
    found = []
    for attention, capture in (("auto", True), ("auto", False), ("torch", False)):
        sizes = {"most_rows": 6, "longest": 8, "capture": capture, "cache_dtype": "fp8"}
        static = StaticRunner(llama(dtype), PAGES, PAGE, attention=attention, **sizes)
        static.cache.keys.fill_(0x7F)  # a NaN
        static.cache.values.fill_(0x7F)
        static.warm_up(8)
        static.forward(first)
        found.append(static.forward(rows).clone())
    assert error(found[0], found[1]) <= 1e-3
    assert error(found[0], found[2]) <= 5e-2


def test_what_is_drawn_on_the_device_is_what_the_logits_say() -> None:
    static, (first, rows) = runner(torch.bfloat16), batch(*BATCHES[2])
    static.forward(first)
    laws = [Law(0.7, seed=5), Law(), Law(1.3, seed=2**63 - 1)]
    logits, noise = static.forward(rows).clone(), NoiseCache(VOCAB, GPU)
    scores = [
        perturbed(chunk, law, row.predicted, noise)
        for chunk, law, row in zip(logits.split([row.outputs for row in rows]), laws, rows, strict=True)
    ]
    assert static.sample(rows, laws) == argmax(torch.cat(scores))
    assert static.sample(rows, [Law()] * 3) == argmax(logits)


def test_hidden_states_are_those_of_plain_launches() -> None:
    first, rows = batch(*BATCHES[2])
    hidden = []
    for capture in (True, False):
        static = runner(torch.float32, capture=capture)
        static.forward(first)
        context = static.prepare(rows, (1, 3))
        static.forward(rows, context)
        assert context.hidden.keys() == {1, 3}
        hidden.append(context.hidden)
    assert all(error(hidden[0][layer], hidden[1][layer]) <= 1e-5 for layer in (1, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_deterministic_logits_are_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    """Decoded token by token, verified in rows, alone and beside others, read as a prompt."""
    static = runner(dtype, deterministic=True)
    _, rows = batch((120, 77), (0, 0))
    whole = static.forward(rows).clone()
    text, other = rows
    for step in (1, 5, 8, 16, 37):
        for start in range(0, 120, step):
            tokens = text.token_ids[start : start + step]
            row = Row(tokens, start, text.pages, len(tokens), text.slot)
            beside = [other] if start % 3 == 0 else []
            got = static.forward([row, *beside])[: len(tokens)]
            assert torch.equal(got, whole[start : start + len(tokens)]), (step, start)


def test_a_verification_is_one_upload_one_graph_and_one_download() -> None:
    static, (first, rows) = runner(torch.bfloat16), batch(*BATCHES[1])
    static.forward(first)
    assert_one_launch(lambda: static.sample(rows, [Law()]))


@pytest.mark.parametrize("law", [Law(), Law(0.8, seed=3)], ids=str)
def test_a_tree_step_is_one_upload_one_graph_and_one_download(law: Law) -> None:
    """Noise and candidates included."""
    settings = config(
        Speculation("ssd", 4, (3,), "jit"), page_size=PAGE, vocab_size=VOCAB
    )  # with all slots of `trees_of`
    static = TreeRunner(llama(torch.bfloat16), settings)
    static.warm_up(16)
    drafter = StaticDrafter(settings, static, NoiseCache(VOCAB, GPU), VOCAB)
    (tree,) = trees_of(drafter, [law], [9], settings.speculation)
    drafter.forward([PathRow(tree, Row(tree.path, 0, tree.table.pages))], [])
    chains = ChainRows(tree, ChainTokens(tree.table.pages, tree.base))
    for cell in range(15):
        chains.tokens.add(cell % 4, cell, 0, [cell])
    assert_one_launch(lambda: list(drafter.forward([], [chains])))


def assert_one_launch(step: Callable[[], object]) -> None:
    step()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls.get("cudaGraphLaunch", 0) == 1, calls
    assert calls.get("cudaLaunchKernel", 0) <= 4, calls
    assert calls.get("cudaMemcpyAsync", 0) <= 3, calls
