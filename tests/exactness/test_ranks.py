"""A target over two ranks against a plain forward of the whole model (RELIABILITY 5, level 3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd.config.params import Mode, SamplingParams, Speculation
from ssd.execution.runner import Runner
from tests.draft.pair import Draft, Pair, config
from tests.exactness.plain import Plain
from tests.exactness.test_against_plain import ADJUSTED, LAWS, MODES, law, requests
from tests.models import tiny
from tests.ranks import split_runner

PAGES = 1024


@dataclass(frozen=True)
class World:
    """A target in two parts, whole, and plain, and a draft that agrees with it about every other time."""

    plain: Plain
    split: Runner
    whole: Runner
    draft: Runner

    def pair(self, mode: Mode, target: Runner | None = None, sampler: Any = "coupled", **fields: Any) -> Pair:
        speculation = Speculation(mode, 4, (3,), "jit", sampler=sampler)
        settings = config(speculation, **{"num_pages": PAGES, "draft_num_pages": PAGES} | fields)
        return Pair(settings, target or self.split, None if mode == "ar" else Draft(settings, self.draft))

    def check(self, ids: list[list[int]], prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> None:
        """100 % of the ids."""
        assert ids == [self.plain.generate(p, law(q), q) for p, q in zip(prompts, params, strict=True)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("world")
    target = tiny.llama(folder / "target", seed=3)
    draft = tiny.noisy_copy(target, folder / "draft", noise=0.03)
    whole, small = (tiny.runner(model, torch.float64, pages=PAGES) for model in (target, draft))
    with split_runner(target, 2, torch.float64, pages=PAGES) as split:
        yield World(Plain(target), split, whole, small)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [*LAWS, *ADJUSTED])
def test_ids_are_those_of_the_plain_forward(world: World, mode: Mode, name: str) -> None:
    """Under laws that the parts sample by themselves, and under those that need all the logits."""
    prompts, params = requests((1, 4, 5, 40), 16, **(LAWS | ADJUSTED)[name])
    texts = world.pair(mode).run(prompts, params)
    world.check(texts.ids, prompts, params)
    assert mode == "ar" or sum(m.accepted_tokens for m in texts.metrics) > 0


@pytest.mark.parametrize("name", ["greedy", "T .8", "top-p"])
def test_in_graph_shapes_too(world: World, tmp_path: Path, name: str) -> None:
    """As on a GPU: collectives and draws are part of the shapes that are captured. Prompts fit none of them."""
    prompts, params = requests((1, 4, 5, 40), 16, **(LAWS | ADJUSTED)[name])
    with split_runner(tiny.llama(tmp_path / "target", seed=3), 2, torch.float64, pages=PAGES, static=True) as split:
        for mode in MODES:
            texts = world.pair(mode, split).run(prompts, params)
            world.check(texts.ids, prompts, params)
            assert mode == "ar" or sum(m.accepted_tokens for m in texts.metrics) > 0


@pytest.mark.parametrize("mode", MODES)
def test_pages_that_are_shared_or_lost_are_the_same_everywhere(world: World, mode: Mode) -> None:
    """Prompts in pieces, beginnings found in the cache, sequences that lose their pages and come back to others."""
    prompts, params = requests((25, 9, 34, 3, 8, 11, 2, 6), 24, temperature=0.8)
    prompts[3] = [*prompts[0][:20], 7]
    pair = world.pair(mode, num_pages=34, max_model_len=100, max_num_batched_tokens=16)
    texts = pair.run(prompts, params)
    assert texts.preemptions > 2
    world.check(texts.ids, prompts, params)
    again = pair.run(prompts[:4], params[:4])
    world.check(again.ids, prompts[:4], params[:4])
    assert sum(m.cached_tokens for m in again.metrics) > 0


@pytest.mark.parametrize("asked", [{"logprobs": 3}, {"prompt_logprobs": 2}])
def test_log_probabilities_are_those_of_one_rank(world: World, asked: dict[str, int]) -> None:
    """Beside a request that wants none."""
    prompts, params = requests((15, 5), 10, temperature=0.8)
    params[0] = SamplingParams(0.8, seed=0, max_tokens=10, **asked)  # type: ignore[arg-type]
    found = []
    for target in (world.split, world.whole):
        pair = world.pair("sd", target)
        entries: list[Any] = []
        step = pair.engine.step

        def noting(step: Any = step, entries: list[Any] = entries) -> Any:
            emissions = step()
            for emission in emissions:
                entries.extend(emission.logprobs or [])
                entries.extend(emission.prompt_logprobs or [])
            return emissions

        pair.engine.step = noting  # type: ignore[method-assign]
        world.check(pair.run(prompts, params).ids, prompts, params)
        found.append(entries)
    assert len(found[0]) == len(found[1]) >= 10
    for ours, theirs in zip(*found, strict=True):
        assert ours.token_id == theirs.token_id
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-6)
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]


def test_the_ratio_rule_gives_what_it_gives_on_one_rank(world: World) -> None:
    """In `sd`: what this rule gives depends on what was proposed, and that in `ssd` on how long steps take."""
    prompts, params = requests((5, 12, 30), 20, temperature=0.8)
    ours, theirs = (world.pair("sd", target, "rejection").run(prompts, params).ids for target in (None, world.whole))
    assert ours == theirs


@pytest.mark.parametrize("name", ["greedy", "T .8"])
def test_in_single_precision_every_mode_says_the_same(world: World, tmp_path: Path, name: str) -> None:
    """Whatever rounding does to the sum of the parts, it does to a row in any company."""
    target = tiny.llama(tmp_path / "target", seed=3)
    draft = tiny.runner(tiny.noisy_copy(target, tmp_path / "draft", noise=0.03), pages=PAGES)
    prompts, params = requests((1, 3, 17, 40), 40, **LAWS[name])
    with split_runner(target, 2, pages=PAGES, deterministic=True) as split:
        single = World(world.plain, split, world.whole, draft)
        expected, *others = (single.pair(mode).run(prompts, params).ids for mode in MODES)
    assert all(ids == expected for ids in others)
