"""Steps of a drafter without an engine: paths, chains depth by depth, a promotion."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from ssd.config.params import Speculation
from ssd.draft.drafter import ChainRows, Drafter, PathRow
from ssd.draft.tree import Guess, Tree
from ssd.draft.tree_attention import ChainTokens
from ssd.execution.batch import Row
from ssd.execution.pages import PageTable
from ssd.ipc.messages import Admit
from ssd.speculation.sampling import Law
from tests.models import tiny

TRUNK, FORKS, DEPTH = 3, (0, 1, 3, 3), 4


def assert_alike(one: Sequence[Sequence[Guess]], other: Sequence[Sequence[Guess]]) -> None:
    """The same guesses; their scores differ by rounding at most."""
    scores = []
    for steps in (one, other):
        scores.append([guess.scores for guesses in steps for guess in guesses])
    assert [[guess._replace(scores=()) for guess in guesses] for guesses in one] == [
        [guess._replace(scores=()) for guess in guesses] for guesses in other
    ]
    for row, wanted in zip(*scores, strict=True):
        assert len(row) > 1 and row == pytest.approx(wanted, rel=1e-4, abs=1e-4)


def trees_of(drafter: Drafter, laws: Sequence[Law], lengths: Sequence[int], speculation: Speculation) -> list[Tree]:
    """Sequences with a trunk, in scattered pages and in shuffled slots."""
    slots = list(range(8))
    random.Random(5).shuffle(slots)
    trees = []
    for index, (law, length) in enumerate(zip(laws, lengths, strict=True)):
        admit = Admit(index, slots[index], 0, tiny.token_ids(length, index), *law, speculation)
        trees.append(Tree(admit, 1, PageTable(drafter.pool)))
        trees[-1].trunk = tiny.token_ids(TRUNK, 50 + index)
    for length in range(1, max(lengths) + TRUNK + DEPTH + 2):  # by turns, so that no one's pages are neighbours
        for tree in trees:
            tree.table.grow(min(length, tree.base + TRUNK + DEPTH + 1))
    return trees


def grown(drafter: Drafter, trees: Sequence[Tree], copies: int = 1) -> list[list[Guess]]:
    """The guesses of a script: compute paths; grow chains one depth per forward, two tokens in the last, beside a path
    row; promote one chain of each sequence and continue from it."""
    found = [list(drafter.forward([PathRow(t, Row(t.path, 0, t.table.pages, TRUNK + 1)) for t in trees], []))]
    forks = FORKS * copies
    chain = {(t.slot, c): tiny.token_ids(DEPTH + 1, 10 * t.slot + c) for t in trees for c in range(len(forks))}
    cells = {key: cell for cell, key in enumerate(chain)}
    for depth in range(DEPTH):
        count = 1 if depth < DEPTH - 1 else 2
        chains = [ChainRows(tree, ChainTokens(tree.table.pages, tree.base)) for tree in trees]
        for tree, tokens in chains:
            for c, fork in enumerate(forks):
                key = tree.slot, c
                tokens.add(fork, cells[key], depth, chain[key][depth : depth + count])
        last = trees[-1]
        beside = PathRow(last, Row(last.path[-2:], len(last.path) - 2, last.table.pages, 1))
        found.append(list(drafter.forward([beside], chains)))
    rows = []
    for tree in trees:
        start, key = tree.base + TRUNK, (tree.slot, len(FORKS) - 1)
        drafter.promote(tree.table, start, cells[key], DEPTH)
        rows.append(PathRow(tree, Row(chain[key][DEPTH:], start + DEPTH, tree.table.pages)))
    return [*found, list(drafter.forward(rows, []))]
