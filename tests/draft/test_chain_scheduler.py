"""Chains compete for cells: the ones with least to gain lose."""

from __future__ import annotations

import random

import pytest

from ssd.config.params import Speculation
from ssd.draft.tree import Chain
from tests.draft.audit import GREEDY, Auditor, World, play, world_in
from tests.draft.pair import Draft, ScriptedTarget, config
from tests.models import tiny

SPECULATION = Speculation("ssd", 3, (4,))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return world_in(tmp_path_factory.mktemp("choice"))


def crowded(world: World, cells: int, steps: int | None = None) -> Draft:
    """A draft with only `cells` cells."""
    draft = Draft(config(SPECULATION), world.draft, steps=steps)
    for _ in draft.cells[cells:]:
        assert draft.engine.drafter.chain_cache.take() is not None
    return draft


def placed(draft: Draft, request: int) -> list[Chain]:
    return [chain for chain in draft.engine.trees[request].chains if chain.cell is not None]


def test_a_new_outcome_takes_the_place_of_a_less_likely_one(world: World) -> None:
    """The first sequence fills all cells; the draft of the second is right more often."""
    draft = crowded(world, 4, steps=1)
    first = ScriptedTarget(draft, 0, tiny.token_ids(5, 1), GREEDY, SPECULATION)
    draft.work(1)
    assert len(placed(draft, first.request)) == 4
    for _ in range(9):
        draft.engine.trees[first.request].acceptance.note(0.0)
    shorter = {c.entry: list(c.tokens) for c in placed(draft, first.request)}
    second = ScriptedTarget(draft, 1, tiny.token_ids(9, 2), GREEDY, SPECULATION)
    draft.work(2)
    assert len(placed(draft, first.request)) + len(placed(draft, second.request)) == 4
    assert placed(draft, second.request)
    # What has lost its place is still good for what it says.
    for chain in draft.engine.trees[first.request].chains:
        assert chain.tokens[: len(shorter[chain.entry])] == shorter[chain.entry]


def test_an_unlikely_outcome_gets_no_place_of_a_likely_one(world: World) -> None:
    draft = crowded(world, 3, steps=1)
    target = ScriptedTarget(draft, 0, tiny.token_ids(5, 1), GREEDY, SPECULATION)
    draft.work(1)
    assert [chain.entry for chain in placed(draft, target.request)] == [0, 1, 2]


@pytest.mark.parametrize("steps", [None, 1, 2])
@pytest.mark.parametrize("cells", [1, 7])
def test_with_few_places_every_state_is_still_sound(world: World, cells: int, steps: int | None) -> None:
    """Random rounds of three competing sequences: the draft keeps and publishes what a draft alone would say, and hits
    on chains that have lost their cell are as good as others."""
    draft = crowded(world, cells, steps)
    Auditor(world, draft, retuned=True)
    for targets in play(draft, SPECULATION, random.Random(f"{cells} {steps}"), rounds=20):
        assert sum(len(placed(draft, t.request)) for t in targets) <= cells
    assert steps or sum(target.hits for target in targets)
    for target in targets:
        target.release()
    assert len([None for _ in range(cells) if draft.engine.drafter.chain_cache.take() is not None]) == cells


def test_a_step_leaves_out_what_would_slow_it_more_than_it_brings(world: World) -> None:
    """If each chain costs as much as all others, only the best ones grow; if chains cost nothing, all of them."""
    for each, everything in ((0.010, False), (0.0, True)):
        draft = crowded(world, 96, steps=0)
        for chains in (1, 5, 9):
            draft.engine._scheduler.note_step(chains, 0.010 + each * chains)
        target = ScriptedTarget(draft, 0, tiny.token_ids(5, 1), GREEDY, SPECULATION)
        draft.work(2)
        chains = placed(draft, target.request)
        grown = [chain.entry for chain in chains if chain.computed]
        assert len(chains) == 4 and 0 in grown
        assert (len(grown) == 4) == everything
        draft.work()  # in the end they all get their turn
        assert {chain.computed for chain in chains} == {SPECULATION.num_speculative_tokens + 1}
