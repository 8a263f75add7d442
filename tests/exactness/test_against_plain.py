"""Every mode against a plain forward without a cache and its own sampling loop (RELIABILITY 5, level 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd.config.params import FanOut, Mode, SamplingParams, Speculation
from ssd.execution.runner import Runner
from ssd.law import Law
from tests.draft.pair import Draft, Pair, Texts, config
from tests.exactness.plain import Plain, adjust_by
from tests.models import tiny
from tests.pairs import pairwise

MODES: tuple[Mode, ...] = ("ar", "sd", "ssd")
LAWS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "T .8": {"temperature": 0.8},
    "top-k": {"temperature": 0.8, "top_k": 20},
    "top-p": {"temperature": 0.8, "top_p": 0.7},
    "min-p": {"temperature": 0.8, "min_p": 0.05},
    "all filters": {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
}
ADJUSTED: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "presence and frequency": {"presence_penalty": 0.7, "frequency_penalty": 0.4, "temperature": 0.8},
    "bias": {"logit_bias": {5: 3.0, 77: 2.0, 130: -100.0}, "temperature": 0.8, "top_p": 0.9},
    "allowed": {"allowed_token_ids": tuple(range(0, 131, 7)), "temperature": 0.8, "top_k": 20},
    "allowed, greedy": {"allowed_token_ids": tuple(n for n in range(131) if n % 4), "repetition_penalty": 1.3},
    "minimum": {"min_tokens": 9, "stop_token_ids": tuple(range(0, 131, 3))},
    "all adjustments": {
        "temperature": 0.8,
        "top_k": 40,
        "repetition_penalty": 0.9,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.3,
        "logit_bias": {5: 1.0},
        "min_tokens": 12,
        "stop_token_ids": tuple(range(0, 131, 5)),
    },
}
PAGES = 1024


@dataclass(frozen=True)
class World:
    """A target, a draft that agrees with it about every other time, and the plain forward of the target."""

    plain: Plain
    runners: dict[torch.dtype, tuple[Runner, Runner]]

    def pair(self, speculation: Speculation, dtype: torch.dtype = torch.float64, **fields: Any) -> Pair:
        target, draft = self.runners[dtype]
        settings = config(speculation, **{"num_pages": PAGES, "draft_num_pages": PAGES} | fields)
        return Pair(settings, target, None if speculation.mode == "ar" else Draft(settings, draft))

    def check(self, texts: Texts, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> None:
        """100 % of the ids."""
        expected = [self.plain.generate(p, law(q), q) for p, q in zip(prompts, params, strict=True)]
        assert texts.ids == expected


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    target = tiny.llama(folder / "target", seed=3)
    draft = tiny.noisy_copy(target, folder / "draft", noise=0.03)
    runners = {
        dtype: (tiny.runner(target, dtype, pages=PAGES), tiny.runner(draft, dtype, pages=PAGES))
        for dtype in (torch.float64, torch.float32)
    }
    return World(Plain(target), runners)


def law(params: SamplingParams) -> Law:
    assert params.seed is not None
    return Law(params.temperature, params.top_k, params.top_p, params.min_p, params.seed)


def requests(lengths: Sequence[int], tokens: int, **fields: Any) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of these lengths, each with a seed of its own."""
    prompts = [tiny.token_ids(length, seed=7 * index) for index, length in enumerate(lengths)]
    return prompts, [SamplingParams(seed=index, max_tokens=tokens, **fields) for index in range(len(lengths))]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [*LAWS, *ADJUSTED])
def test_ids_are_those_of_the_plain_forward(world: World, mode: Mode, name: str) -> None:
    prompts, params = requests((1, 3, 4, 5, 17, 40), 24, **(LAWS | ADJUSTED)[name])
    texts = world.pair(Speculation(mode, 4, (3,), "jit")).run(prompts, params)
    world.check(texts, prompts, params)
    accepted = sum(m.accepted_tokens for m in texts.metrics)
    assert 0 < accepted < sum(m.drafted_tokens for m in texts.metrics) or mode == "ar"


@pytest.mark.parametrize(
    ("mode", "drafted", "temperature"),
    pairwise(
        ["sd", "ssd"],
        [(1, (1,)), (1, (2, 3)), (4, (1,)), (8, (3,)), (4, (4, 3, 2, 2, 4)), (16, (2,)), (4, ())],
        [0.0, 0.8],
    ),
    ids=str,
)
def test_ids_do_not_depend_on_how_one_speculates(
    world: World, mode: Mode, drafted: tuple[int, FanOut], temperature: float
) -> None:
    prompts, params = requests((2, 9, 30), 24, temperature=temperature)
    texts = world.pair(Speculation(mode, *drafted, "jit")).run(prompts, params)
    world.check(texts, prompts, params)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_without_a_backup(world: World, temperature: float) -> None:
    prompts, params = requests((2, 9, 30), 24, temperature=temperature)
    texts = world.pair(Speculation("ssd", 4, (3,), backup="none")).run(prompts, params)
    world.check(texts, prompts, params)
    assert any(metrics.hits and metrics.misses for metrics in texts.metrics)


@pytest.mark.parametrize("mode", MODES)
def test_batches_of_1_to_32(world: World, mode: Mode) -> None:
    """Rows of every law in one batch, each row as if it were alone."""
    prompts, params = requests([1 + 5 * index % 23 for index in range(32)], 6)
    kinds = [*LAWS.values(), *ADJUSTED.values()]
    params = [SamplingParams(seed=i, max_tokens=6, **kinds[i % len(kinds)]) for i in range(32)]
    pair = world.pair(Speculation(mode, 4, (3,), "jit"), max_num_seqs=32)
    for size in (1, 2, 3, 5, 8, 13, 21, 32):
        world.check(pair.run(prompts[:size], params[:size]), prompts[:size], params[:size])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_that_speculate_differently_in_one_batch(world: World, temperature: float) -> None:
    kinds = (
        Speculation("ar"),
        Speculation("sd", 2, (3,), "jit"),
        Speculation("ssd", 6, (1,), "jit"),
        Speculation("ssd", 3, (1, 2, 1, 4), "none"),
    )
    prompts, params = requests((6,) * 8, 20, temperature=temperature)
    mixed = [
        SamplingParams(p.temperature, seed=p.seed, max_tokens=20, speculation=kinds[index % 4])
        for index, p in enumerate(params)
    ]
    texts = world.pair(Speculation("ssd", 4, (3,), "jit")).run(prompts, mixed)
    world.check(texts, prompts, mixed)
    assert [m.mode for m in texts.metrics] == ["ar", "sd", "ssd", "ssd"] * 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("budget", [1, 7, 16])
def test_chunked_prefill(world: World, mode: Mode, budget: int) -> None:
    """Prompts longer than what one step may carry, computed piece by piece beside others that decode already; with a
    budget that leaves some rows no place for all their draft tokens."""
    prompts, params = requests((50, 3, 33, 20), 16, temperature=0.8)
    texts = world.pair(Speculation(mode, 4, (3,), "jit"), max_num_batched_tokens=budget).run(prompts, params)
    world.check(texts, prompts, params)


@pytest.mark.parametrize(
    ("mode", "name"),
    [("ar", "presence and frequency"), ("sd", "T .8"), ("ssd", "greedy"), ("ssd", "presence and frequency")],
)
def test_preemption(world: World, mode: Mode, name: str) -> None:
    """Pages for about three of eight sequences: the newest lose theirs and are computed again, tokens and all."""
    prompts, params = requests((5, 9, 14, 3, 8, 11, 2, 6), 30, **(LAWS | ADJUSTED)[name])
    pair = world.pair(Speculation(mode, 4, (3,), "jit"), num_pages=30, max_model_len=100)
    texts = pair.run(prompts, params)
    assert texts.preemptions > 2
    world.check(texts, prompts, params)


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_a_draft_without_room(world: World, mode: Mode) -> None:
    """The draft's pages do not suffice for all: some sequences go on without it."""
    prompts, params = requests((5, 9, 14, 3, 8, 11, 2, 6), 10)
    pair = world.pair(Speculation(mode, 4, (3,), "jit"), draft_num_pages=25, max_model_len=100)
    texts = pair.run(prompts, params)
    world.check(texts, prompts, params)
    assert pair.draft is not None
    pair.draft.assert_empty()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_prefix_hits(world: World, mode: Mode, temperature: float) -> None:
    """The same prompt again, one that goes on from an answer, and one that shares a beginning. The answer ends where
    its page does, but the keys of its last token were never computed: that page is nobody's prefix."""
    prompts, params = requests((22,), 14, temperature=temperature)
    pair = world.pair(Speculation(mode, 4, (3,), "jit"))
    first = pair.run(prompts, params)
    world.check(first, prompts, params)
    assert first.metrics[0].cached_tokens == 0
    others = [prompts[0], [*prompts[0], *first.ids[0], 5], [*prompts[0][:12], 1, 2, 3], [1, *prompts[0]]]
    params = [SamplingParams(temperature, seed=seed, max_tokens=14) for seed in (0, 8, 9, 10)]
    again = pair.run(others, params)
    world.check(again, others, params)
    assert [m.cached_tokens for m in again.metrics] == [20, 32, 12, 0]


@pytest.mark.parametrize(
    ("mode", "name"), [("ar", "greedy"), ("sd", "T .8"), *(("ssd", name) for name in LAWS if name != "T .8")]
)
def test_float32_differs_at_near_ties_only(world: World, mode: Mode, name: str) -> None:
    """Given the engine's own text up to a token, that token is the plain double-precision forward's wherever the gap
    of the two best scores exceeds 1e-4."""
    prompts, params = requests((1, 3, 4, 5, 17, 40), 24, **LAWS[name])
    texts = world.pair(Speculation(mode, 4, (3,), "jit"), torch.float32).run(prompts, params)
    clear = 0
    for prompt, settings, ids in zip(prompts, params, texts.ids, strict=True):
        assert len(ids) == settings.max_tokens
        for index, token in enumerate(ids):
            adjust = adjust_by(settings, len(prompt))
            best = world.plain.scores(prompt + ids[:index], law(settings), adjust).topk(2)
            if best.values[0] - best.values[1] > 1e-4:
                clear += 1
                assert token == best.indices[0]
    assert clear >= 0.98 * sum(map(len, texts.ids))


def test_the_plain_forward_is_that_of_transformers(tmp_path: Path) -> None:
    """The reference has a reference: to what transformers' norm, which computes in float32, leaves of double."""
    directory = tiny.llama(tmp_path, tie_word_embeddings=True, num_key_value_heads=1, rms_norm_eps=0.1)
    ids = tiny.token_ids(60, 0)
    expected = tiny.oracle_logits(tiny.oracle(directory, torch.float64), ids)
    assert (Plain(directory).logits(ids) - expected).abs().max() <= 1e-5
