"""Chains compete for cells: the ones with least to gain lose."""

from __future__ import annotations

import random

import pytest
import torch
from msgspec.structs import replace

from ssd.config.params import Speculation
from ssd.draft.chain_cache import ChainCache
from ssd.draft.chain_scheduler import ChainScheduler
from ssd.draft.tree import Chain, Guess, Tree
from ssd.speculation.fan_out import single_chain
from tests.draft.audit import GREEDY, Auditor, World, play
from tests.draft.pair import Draft, ScriptedTarget, config
from tests.draft.test_tree import tree_of
from tests.models import tiny

SPECULATION = Speculation("ssd", 3, (4,), "jit")


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
        grown = [chain.entry for chain in placed(draft, target.request) if chain.computed]
        assert 0 in grown and (len(grown) == 4) == everything
        draft.work()  # in the end they all get their turn
        grown = [chain.computed for chain in placed(draft, target.request)]
        assert grown == 4 * [SPECULATION.num_speculative_tokens + 1]


def test_a_single_chain_goes_on_through_full_acceptance(world: World) -> None:
    """As in PEARL: whatever the draft has time for, it grows the tokens after all that are in flight, and no others."""
    speculation = replace(SPECULATION, fan_out=single_chain(3))
    draft = Draft(config(speculation), world.draft)
    Auditor(world, draft)
    target = ScriptedTarget(draft, 0, tiny.token_ids(5, 1), GREEDY, speculation)
    hits = 0
    for _ in range(6):
        draft.work()
        tree = draft.engine.trees[target.request]
        assert tree.in_flight is not None
        (chain,) = tree.chains
        assert (chain.fork, chain.computed) == (tree.in_flight, 4)
        before, token = tree.trunk[: tree.in_flight], tree.guesses[tree.in_flight].token
        assert chain.tokens[0] == token
        hits += target.outcome(len(before), token, most=3)
    assert hits == 6


def listed_tree(fan_out: tuple[int, ...]) -> Tree:
    """A tree with nothing in flight, whose next token has four candidates."""
    tree = tree_of(Speculation("ssd", 3, fan_out, "jit"))
    tree.trunk, tree.in_flight, tree.computed = [], 0, tree.base
    tree.guesses = {0: guess([10, 11, 12, 13], [5.0, 2.0, 1.0, 0.5])}
    return tree


@pytest.mark.parametrize("fan_out", [(4,), (1,), single_chain(3)])
@pytest.mark.parametrize("bonus", [99, 11])
def test_candidates_that_were_never_right_are_tried_again(fan_out: tuple[int, ...], bonus: int) -> None:
    """What was learned says that they never are; unless they have a chain, nothing else can be learned."""
    scheduler, _ = scheduler_of(8)
    for _ in range(100):
        scheduler.note_bonus([10, 11][: max(fan_out)], bonus)
    chains = started(scheduler, listed_tree(fan_out))
    assert [(c.tokens[0], c.rank) for c in chains] == [(10 + n, 1 + n) for n in range(max(fan_out))]
    for _ in range(100):
        scheduler.note_bonus([10], 10)
    assert started(scheduler, listed_tree((1,)))[0].probability > 0.3


def test_where_there_is_no_room_for_new_chains_the_others_grow() -> None:
    """The new one is given up: it would be chosen again and again, and nothing would grow."""
    scheduler, _ = scheduler_of(1)
    for chains in (1, 5, 9):
        scheduler.note_step(chains, 0.010 * (1 + chains))
    first, second = listed_tree((1,)), listed_tree((1,))
    second.request += 1
    (chain,) = started(scheduler, first)
    chain.computed = 3  # the other one would bring more
    growing, new = scheduler.growing([first, second], 9)
    assert not new and [(grows.tree, grows.chains) for grows in growing] == [(first, [chain])]
    assert not second.chains.waiting


def test_a_step_without_room_for_all_grows_the_best_chains_and_the_others_later() -> None:
    scheduler, _ = scheduler_of(8)
    tree = listed_tree((4,))
    (growing,), new = scheduler.growing([tree], 2)
    assert [chain.rank for chain in growing.chains] == [1, 2] and new == [growing]
    for chain in growing.chains:
        chain.computed = tree.lookahead + 1
    (growing,), new = scheduler.growing([tree], 2)
    assert [chain.rank for chain in growing.chains] == [3, 4] and new == [growing]


def test_outcomes_that_wait_are_given_up_where_the_target_waits_itself() -> None:
    tree = listed_tree((4,))
    scheduler, _ = scheduler_of(8)
    for chains in (1, 5, 9):
        scheduler.note_step(chains, 0.010 * (1 + chains))
    assert len(started(scheduler, tree)) < 4
    tree.retune(Speculation("ssd", 2, (4,)))
    assert tree.chains.waiting
    tree.retune(Speculation("sd", 2, (1,)))
    assert not tree.chains.waiting


# -- a joint allocation ----------------------------------------------------------------------------------------------


def scheduler_of(cells: int) -> tuple[ChainScheduler, list[int]]:
    """A scheduler with so many cells, and the cells that it takes back."""
    forgotten: list[int] = []
    empty = torch.zeros(1, cells, 1, 1, 1)
    return ChainScheduler(ChainCache([(empty, empty)]), 200, forgotten.extend), forgotten


def started(scheduler: ChainScheduler, tree: Tree) -> list[Chain]:
    """The chains that the next step starts, each with the token that it then has."""
    _, new = scheduler.growing([tree], 99)
    chains = [chain for _, chains in new for chain in chains]
    for chain in chains:
        chain.computed = 1
    return chains


def joint_tree(budget: int) -> Tree:
    """A tree with the trunk 1, 2, 3 in flight, without keys and values of the trunk."""
    tree = tree_of(Speculation("ssd", 3, (), "jit", budget=budget))
    tree.trunk, tree.in_flight, tree.computed = [1, 2, 3], 3, tree.base
    return tree


def guess(candidates: list[int], scores: list[float]) -> Guess:
    return Guess(candidates[0], candidates, scores=scores)


def sure_but_for_one() -> dict[int, Guess]:
    """Guesses after 0 to 3 trunk tokens, unsure after the first only."""
    return {
        0: guess([1, 10, 11, 12], [9.0, 1.0, 1.0, 1.0]),
        1: guess([2, 20, 21, 22], [2.0, 1.9, 1.8, 1.7]),
        2: guess([3, 30, 31, 32], [9.0, 1.0, 1.0, 1.0]),
        3: guess([40, 41, 42], [5.0, 1.0, 1.0]),
    }


def test_a_budget_goes_to_the_likeliest_outcomes_of_the_whole_trunk() -> None:
    """None where the draft is sure of the token in flight, most where it is not; never for that token itself."""
    scheduler, _ = scheduler_of(8)
    tree = joint_tree(4)
    tree.computed += 3
    tree.guesses = sure_but_for_one()
    chains = started(scheduler, tree)
    assert {(c.fork, c.tokens[0]) for c in chains} == {(1, 20), (1, 21), (1, 22), (3, 40)}
    assert {(c.tokens[0], c.rank, c.fan_out) for c in chains} == {(20, 1, 3), (21, 2, 3), (22, 3, 3), (40, 1, 1)}
    assert started(scheduler, tree) == []


def test_an_outcome_behind_unsure_tokens_is_less_likely() -> None:
    """Scores are the same after every accepted length."""
    scheduler, _ = scheduler_of(8)
    tree = joint_tree(5)
    tree.computed += 3
    tree.guesses = {fork: guess([fork + 1, 10, 11, 12], [2.0, 1.9, 1.8, 1.7]) for fork in range(4)}
    chains = started(scheduler, tree)
    assert [c.fork for c in chains] == [0, 0, 0, 1, 1]


def test_a_later_fork_takes_the_cells_of_less_likely_chains() -> None:
    """The other chains keep their cells. Those that lost theirs keep their board entries."""
    scheduler, forgotten = scheduler_of(8)
    tree = joint_tree(3)
    tree.guesses = {0: guess([1, 10, 11, 12], [5.0, 2.0, 1.0, 0.5])}
    early = started(scheduler, tree)
    assert [c.tokens[0] for c in early] == [10, 11, 12]
    cells = [c.cell for c in early]
    tree.computed += 1
    tree.guesses[1] = guess([2, 20, 21], [2.0, 1.9, 1.8])
    late = started(scheduler, tree)
    assert [(c.fork, c.tokens[0]) for c in late] == [(1, 20), (1, 21)]
    assert set(forgotten) == set(cells[1:]) and early[0].cell == cells[0]
    assert [c.cell for c in early[1:]] == [None, None]
    assert [chain.entry for chain in tree.chains] == [0, 1, 2, 3, 4]


def test_an_outcome_waits_until_a_step_is_worth_it() -> None:
    """It takes no cell and no board entry before, and counts for no rank. A likelier one may take its turn."""
    scheduler, _ = scheduler_of(8)
    for chains in (1, 5, 9):
        scheduler.note_step(chains, 0.010 * (1 + chains))
    tree = joint_tree(3)
    tree.guesses = {0: guess([1, 10, 11, 12], [5.0, 2.0, 1.0, 0.5])}
    (first,) = started(scheduler, tree)
    assert (first.tokens[0], first.entry, first.rank, first.fan_out) == (10, 0, 1, 1)
    assert [(c.tokens[0], c.cell) for c in tree.chains.waiting] == [(11, None), (12, None)]
    tree.computed += 1
    tree.guesses[1] = guess([2, 20, 21], [2.0, 1.9, 1.8])
    assert {c.tokens[0] for c in started(scheduler, tree)} == {20, 21} and not tree.chains.waiting


def test_under_the_ratio_rule_entries_never_exceed_the_budget() -> None:
    """Their draft probabilities would have no place. What has a token keeps its cell."""
    scheduler, _ = scheduler_of(8)
    for chains in (1, 5, 9):
        scheduler.note_step(chains, 0.010 * (1 + chains))
    tree = joint_tree(3)
    tree.law = replace(tree.law, temperature=1.0)
    tree.speculation = replace(tree.speculation, sampler="rejection")
    tree.guesses = {0: guess([1, 10, 11, 12], [5.0, 2.0, 1.0, 0.5])}
    (early,) = started(scheduler, tree)
    for node in (1, 2, 3):
        tree.computed += 1
        tree.guesses[node] = guess([node + 1, 20, 21, 22], [9.0, 8.9, 8.8, 8.7])
        started(scheduler, tree)
        assert len([*tree.chains, *tree.chains.waiting]) == 3
        assert early in tree.chains and early.cell is not None
    assert {chain.fork for chain in (*tree.chains, *tree.chains.waiting)} != {0}


def test_what_the_text_repeats_is_an_outcome_of_its_fork() -> None:
    scheduler, _ = scheduler_of(8)
    tree = joint_tree(2)
    tree.tokens = [60, 61, 62, 63, 64, 65, 66, 60, 61, 62, 63, 64, 65]
    tree.computed = tree.base
    tree.guesses = {0: guess([1, 10, 11, 12], [3.0, 2.9, 2.8, 2.7])}
    chains = started(scheduler, tree)
    assert chains[0].tokens == [66] and chains[0].probability > 2 * chains[1].probability


def test_what_came_true_changes_the_next_allocation() -> None:
    """The draft was sure of its trunk and always wrong."""
    scheduler, _ = scheduler_of(8)
    tree = joint_tree(4)
    tree.computed += 1
    tree.guesses = {0: guess([1, 10, 11, 12], [6.0, 2.0, 1.9, 1.8]), 1: guess([2, 20, 21, 22], [3.0, 2.9, 2.8, 2.7])}
    before = started(scheduler, tree)
    for _ in range(300):
        scheduler.note_outcome(tree, 0, 10)
    again = joint_tree(4)
    again.computed, again.guesses = tree.computed, tree.guesses
    after = started(scheduler, again)
    assert sum(c.fork == 0 for c in before) < 3 == sum(c.fork == 0 for c in after)


def test_where_a_trunk_ends_is_learned_from_what_came_true() -> None:
    """The draft was sure of its trunk and always wrong."""
    scheduler, _ = scheduler_of(8)
    lengths = []
    for _ in range(2):
        tree = tree_of(Speculation("sd", 3, (1,)))
        tree.guesses, tree.trunk, tree.least = sure_but_for_one(), [], 0.2
        tree.in_flight, tree.answers = None, tree.key(0, 7)  # the target waits
        for token in (1, 2, 3):
            tree.trunk.append(token)
            scheduler.end_trunk(tree)
            if tree.ended:
                break
        lengths.append(len(tree.trunk))
        for _ in range(300):
            scheduler.note_outcome(tree, 0, 10)
    assert lengths == [3, 1]
    assert list(tree.rates) == scheduler._chances.rates(0.0, True), "for kernels, which end by the same"
