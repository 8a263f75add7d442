"""Steps of a draft level without an engine: paths, chains depth by depth, a promotion."""

from __future__ import annotations

import random
from collections.abc import Sequence

from ssd.draft.arena import Branches
from ssd.draft.level import Chains, Level, Paths
from ssd.draft.tree import Guess, Tree
from ssd.execution.batch import Row
from ssd.execution.pages import PageTable
from ssd.ipc.messages import Admit
from ssd.params import Speculation
from ssd.speculation.sampling import Law
from tests.models import tiny

LINE, FORKS, DEPTH = 3, (0, 1, 3, 3), 4


def trees_of(level: Level, laws: Sequence[Law], lengths: Sequence[int], speculation: Speculation) -> list[Tree]:
    """Sequences with a line in flight, in scattered pages and in slots that are not in their order."""
    slots = list(range(8))
    random.Random(5).shuffle(slots)
    trees = []
    for index, (law, length) in enumerate(zip(laws, lengths, strict=True)):
        admit = Admit(index, slots[index], 0, tiny.token_ids(length, index), *law, speculation)
        trees.append(Tree(admit, 1, PageTable(level.pool)))
        trees[-1].line = tiny.token_ids(LINE, 50 + index)
    for length in range(1, max(lengths) + LINE + DEPTH + 2):  # by turns, so that no one's pages are neighbours
        for tree in trees:
            tree.table.grow(min(length, tree.base + LINE + DEPTH + 1))
    return trees


def grown(level: Level, trees: Sequence[Tree], copies: int = 1) -> list[list[Guess]]:
    """Paths; then chains, a depth per forward, two tokens of one at once, beside a row of a path; then one of each
    sequence becomes part of its path, and is gone on from."""
    found = [list(level.forward([Paths(t, Row(t.path, 0, t.table.pages, LINE + 1)) for t in trees], []))]
    forks = FORKS * copies
    chain = {(t.slot, c): tiny.token_ids(DEPTH + 1, 10 * t.slot + c) for t in trees for c in range(len(forks))}
    cells = {key: cell for cell, key in enumerate(chain)}
    for depth in range(DEPTH):
        count = 1 if depth < DEPTH - 1 else 2
        chains = [Chains(tree, Branches(tree.table.pages, tree.base)) for tree in trees]
        for tree, branches in chains:
            for c, fork in enumerate(forks):
                key = tree.slot, c
                branches.add(fork, cells[key], depth, chain[key][depth : depth + count])
        last = trees[-1]
        beside = Paths(last, Row(last.path[-2:], len(last.path) - 2, last.table.pages, 1))
        found.append(list(level.forward([beside], chains)))
    rows = []
    for tree in trees:
        start, key = tree.base + LINE, (tree.slot, len(FORKS) - 1)
        level.promote(tree.table, start, cells[key], DEPTH)
        rows.append(Paths(tree, Row(chain[key][DEPTH:], start + DEPTH, tree.table.pages)))
    return [*found, list(level.forward(rows, []))]
