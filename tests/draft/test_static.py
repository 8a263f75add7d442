"""The draft's steps in static shapes: the guesses of the same steps as they are, whatever fills the rest."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd.config import EngineConfig
from ssd.draft.arena import Branches
from ssd.draft.level import Chains, Level, Paths
from ssd.draft.runs import Run
from ssd.draft.static import StaticLevel, TreeRunner
from ssd.execution.batch import Row
from ssd.execution.rooms import Room
from ssd.execution.runner import Runner
from ssd.models.interface import Model
from ssd.params import Mode, Speculation
from ssd.speculation.noise import NoiseCache
from ssd.speculation.sampling import Law
from tests.draft.audit import GREEDY, SAMPLED, Auditor, World, plainly, play, world_in
from tests.draft.pair import VOCABULARY, Draft, Pair, ScriptedTarget, config, params
from tests.draft.steps import DEPTH, LINE, grown, trees_of
from tests.models import tiny
from tests.models.knobs import FALLBACK, FAMILIES

WARM = Law(temperature=0.8, seed=77)


class Counting(TreeRunner):
    """Knows how many steps had a static shape, and which."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.taken: list[Room] = []

    def _run(self, runs: Sequence[Run], room: Room, warm: bool) -> Any:
        self.taken.append(room)
        return super()._run(runs, room, warm)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return world_in(tmp_path_factory.mktemp("world"))


def static(model: Model, configuration: EngineConfig, attention: str = "torch") -> Counting:
    """What is read before it is written makes a NaN, but for what nobody writes."""
    runner = Counting(model, configuration, attention)
    for kind in (runner.cache.keys, runner.cache.values):
        kind[:, : -(runner.store.depth + configuration.page_size)] = torch.nan
    return runner


def levels(model: Model, configuration: EngineConfig, attention: str = "torch") -> tuple[Level, StaticLevel]:
    noise, runner = NoiseCache(VOCABULARY), static(model, configuration, attention)
    plain = Runner(model, configuration.draft_num_pages, configuration.page_size)
    return (
        Level(configuration, plain, noise, VOCABULARY),
        StaticLevel(configuration, runner, noise, VOCABULARY),
    )


def check(model: Model, configuration: EngineConfig, laws: Sequence[Law], lengths: Sequence[int], **how: Any) -> None:
    results = []
    ragged, fixed = levels(model, configuration, **how)
    for level in (ragged, fixed):
        results.append(grown(level, trees_of(level, laws, lengths, configuration.speculation)))
    assert results[0] == results[1]
    assert isinstance(fixed.runner, Counting)
    prompts = max(lengths) + LINE > 16
    assert len(fixed.runner.taken) == DEPTH + 2 - prompts


@pytest.mark.parametrize("laws", [(GREEDY,), (WARM,), (GREEDY, WARM, SAMPLED)], ids=["greedy", "warm", "filtered"])
@pytest.mark.parametrize("sequences", [1, 2, 3, 5, 8])
def test_guesses_are_those_of_the_same_steps_as_they_are(world: World, sequences: int, laws: tuple[Law, ...]) -> None:
    """And each sequence has what belongs to it, however many there are beside it."""
    lengths = [(9, 1, 13, 6, 12, 2, 5, 7)[index] for index in range(sequences)]
    wanted = [(laws * 8)[index]._replace(seed=index) for index in range(sequences)]
    check(world.draft.model, config(Speculation("ssd", 4, (3,))), wanted, lengths)


@pytest.mark.parametrize("page_size", [1, 3, 16, 48])
def test_of_pages_of_any_size(world: World, page_size: int) -> None:
    settings = config(Speculation("ssd", 4, (3,)), page_size=page_size, draft_num_pages=400)
    check(world.draft.model, settings, [GREEDY, WARM, WARM._replace(seed=3)], [30, 2, 11])


@pytest.mark.parametrize("family", ["llama", "mistral window", "qwen3", "gemma2", "gpt2"])
@pytest.mark.parametrize("length", [2, 30])
def test_of_any_family(family: str, length: int, tmp_path: Path) -> None:
    """Windows that end within a path and within a chain, shared key heads, caps."""
    kind, knobs = (FAMILIES | FALLBACK)[family]
    runner = tiny.runner(tiny.model(kind, tmp_path, **knobs), torch.float64)
    check(runner.model, config(Speculation("ssd", 4, (3,))), [GREEDY, WARM], [length, length + 3])


@pytest.mark.parametrize("family", ["llama", "mistral window"])
def test_through_the_kernels_of_gpus(family: str, tmp_path: Path) -> None:
    kind, knobs = (FAMILIES | FALLBACK)[family]
    model = tiny.runner(tiny.model(kind, tmp_path, **knobs), torch.float32).model
    check(model, config(Speculation("ssd", 4, (3,))), [GREEDY, WARM], [5, 11], attention="triton")


def test_more_chains_than_a_row_holds(world: World) -> None:
    """Twenty of a sequence, and one alone."""
    settings = config(Speculation("ssd", 4, (3,)))
    results = []
    for level in levels(world.draft.model, settings):
        trees = trees_of(level, [WARM] * 2, [5, 9], settings.speculation)
        found = grown(level, trees, copies=5)
        alone = Chains(trees[0], Branches(trees[0].table.pages, trees[0].base))
        alone.branches.add(1, 100, 0, [7])
        results.append([*found, list(level.forward([], [alone]))])
    assert results[0] == results[1]
    assert isinstance(level.runner, Counting) and len(level.runner.taken) == DEPTH + 3


def test_what_fits_no_shape_runs_as_it_is(world: World) -> None:
    settings = config(Speculation("ssd", 4, (12,)))
    results = []
    for level in levels(world.draft.model, settings):
        results.append(grown(level, trees_of(level, [WARM] * 8, [5] * 8, settings.speculation), copies=12))
    assert isinstance(level.runner, Counting)
    assert len(level.runner.taken) == 2, "the paths before and after"
    assert results[0] == results[1]


def test_what_fills_a_shape_changes_no_bit_and_lands_on_its_own_page(world: World) -> None:
    """Whatever the dummy page holds."""
    settings = config(Speculation("ssd", 4, (3,)))
    results = []
    for filler in (0.0, 1e30, torch.nan):
        _, level = levels(world.draft.model, settings)
        runner, size = level.runner, settings.page_size
        dummy = range(400 * size, 401 * size)
        for kind in (runner.cache.keys, runner.cache.values):
            kind[:, dummy.start : dummy.stop] = filler
        trees = trees_of(level, [GREEDY, WARM, GREEDY], [9, 6, 4], settings.speculation)
        paths = [Paths(tree, Row(tree.path, 0, tree.table.pages, 1)) for tree in trees]
        kept = runner.cache.keys.clone()
        level.forward(paths, [])
        written = {slot for tree, row in paths for slot in runner.cache.slots(row.pages, 0, row.stop)}
        assert touched(kept, runner.cache.keys) <= written | {dummy.start}
        branches = Branches(trees[0].table.pages, trees[0].base)
        for cell in (4, 9, 2):
            branches.add(1, cell, 0, [7])
        kept = runner.cache.keys.clone()
        runs = runner.runs([], [Chains(trees[0], branches)])
        room = runner.room(runs)
        assert room == Room(1, 4, 4)
        results.append(runner.logits(runs, room).clone())
        cells = {401 * size + 17 * cell for cell in branches.cells}
        assert cells <= touched(kept, runner.cache.keys) <= cells | {dummy.start}
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert results[0].isfinite().all()


def touched(before: torch.Tensor, after: torch.Tensor) -> set[int]:
    changed = ~torch.isclose(before, after, 0, 0, equal_nan=True).all(-1).all(-1).all(0)
    return set(changed.nonzero()[:, 0].tolist())


# -- whole runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "speculation",
    [Speculation("ssd", 4, (3,)), Speculation("ssd", 8, (1,)), Speculation("sd", 4)],
    ids=lambda s: f"{s.mode} {s.num_speculative_tokens}",
)
@pytest.mark.parametrize("levels", [1, 2], ids=["alone", "helped"])
def test_in_every_state_the_draft_is_what_a_fresh_one_would_be(
    world: World, speculation: Speculation, levels: int
) -> None:
    """Three sequences of different laws, forty rounds of random outcomes each, interrupted at random depths."""
    settings = config(speculation)
    runners = [static(world.draft.model, settings) for _ in range(levels)]
    draft = Draft(settings, *runners)
    audit = Auditor(world, draft)
    *_, targets = play(draft, speculation, random.Random(f"{speculation} {levels}"), rounds=25)
    assert len(audit.lines) > 2
    assert all(runner.taken for runner in runners)
    for target in targets:
        target.release()
    draft.assert_empty()


@pytest.mark.parametrize("mode", ["sd", "ssd"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_target_says_the_same_and_hits_as_often(world: World, mode: Mode, temperature: float) -> None:
    """Prompts in pieces and shared ones, arrivals, accepted, rejected and promoted tokens as they come."""
    settings = config(Speculation(mode, 4, (3,)))
    prompts = [tiny.token_ids(n, n) for n in (5, 150, 30, 2, 9)] + [tiny.token_ids(30, 30)[:20]]
    runner = static(world.draft.model, settings)
    numbers = []
    for each in (world.draft, runner):
        draft = Draft(settings, each)
        texts = Pair(settings, world.target, draft).run(prompts, params(len(prompts), 24, temperature))
        assert texts.ids == plainly(world, prompts, temperature, 24).ids
        numbers.append([(m.rounds, m.accepted_tokens, m.hits, m.misses) for m in texts.metrics])
        draft.assert_empty()
    assert numbers[0] == numbers[1]
    assert sum(accepted for _, accepted, _, _ in numbers[0])
    assert len(runner.taken) > draft.forwards / 2


def test_a_draft_that_is_the_target_is_always_right(world: World) -> None:
    settings = config(Speculation("ssd", 4, (3,)))
    draft = Draft(settings, static(world.target.model, settings))
    prompts = [tiny.token_ids(n, n) for n in (3, 16, 41)]
    for temperature in (0.0, 0.8):
        texts = Pair(settings, world.target, draft).run(prompts, params(3, 1 + 6 * 5, temperature))
        assert [(m.rounds, m.accepted_tokens, m.hits, m.misses) for m in texts.metrics] == [(6, 24, 5, 0)] * 3
    draft.assert_empty()


def test_a_draft_that_begins_anew_has_all_of_its_places(world: World) -> None:
    """The memory that graphs read stays; who had it is forgotten."""
    settings = config(Speculation("ssd", 4, (3,)))
    draft = Draft(settings, static(world.draft.model, settings))
    Auditor(world, draft)
    target = ScriptedTarget(draft, 0, tiny.token_ids(9, 1), WARM, settings.speculation)
    assert draft.engine.trees[0].chains and len(draft.cells) == 15 * 8
    before = draft.engine.level.arena.keys.data_ptr()
    draft.restart()
    assert len(draft.cells) == 15 * 8 and draft.engine.level.arena.keys.data_ptr() == before
    again = ScriptedTarget(draft, 0, target.tokens[:7], GREEDY, settings.speculation)
    assert again.outcome(0, draft.engine.trees[0].chains[0].tokens[0], 4)
    again.release()
    draft.assert_empty()


def test_warming_up_runs_every_shape_and_leaves_no_trace(world: World) -> None:
    settings = config(Speculation("ssd", 4, (3,)))
    ragged, fixed = levels(world.draft.model, settings)
    fixed.runner.warm_up(4)
    rankings = [ranking for step in fixed.runner._steps.values() for ranking in step.rankings]
    assert len(rankings) > 40 and all(ranking.ids.shape[-1] == 17 for ranking in rankings)
    results = [grown(level, trees_of(level, [WARM], [9], settings.speculation)) for level in (ragged, fixed)]
    assert results[0] == results[1]
