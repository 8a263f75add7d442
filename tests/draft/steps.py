"""Steps of a drafter without an engine: paths, chains depth by depth or several depths at once, a promotion."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from ssd.config.params import Speculation
from ssd.draft.chain_cache import ChainTokens
from ssd.draft.drafter import ChainRows, Drafter, PathRow
from ssd.draft.static_shapes import StaticDrafter
from ssd.draft.tree import Guess, Tree
from ssd.execution.batch import Row
from ssd.execution.pages import PageTable
from ssd.ipc.messages import Admit
from ssd.law import Law
from tests.models import tiny

TRUNK, FORKS, DEPTH = 3, (0, 1, 3, 3), 4
MORE = (3, 0, 2, 1)
"""Tokens that follow the first one of each chain of a sequence; MORE[0] of them follow the trunk of the last one."""


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
        admit = Admit(index, slots[index], 0, tiny.token_ids(length, index), law, speculation)
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


def step_of(trees: Sequence[Tree], said: Sequence[list[int]]) -> tuple[list[PathRow], list[ChainRows]]:
    """The rows of the last token of each chain, sequence after sequence, and of the last one's path. `said`: their new
    tokens so far; rows that have said enough are left out."""
    *chains, path = said
    found = [ChainRows(tree, ChainTokens(tree.table.pages, tree.base)) for tree in trees]
    for cell, tokens in enumerate(chains):
        if len(tokens) <= 1 + MORE[cell % len(FORKS)]:
            own = found[cell // len(FORKS)].tokens
            own.add(FORKS[cell % len(FORKS)], cell, len(tokens) - 1, tokens[-1:])
    last = trees[-1]
    row = Row(path[-1:], last.base + TRUNK + len(path) - 2, last.table.pages, 1)
    paths = [PathRow(last, row)] if len(path) <= 1 + MORE[0] else []
    return paths, [rows for rows in found if rows.tokens.tokens]


def deepened(drafter: StaticDrafter, laws: Sequence[Law], lengths: Sequence[int], at_once: bool) -> list[list[Guess]]:
    """The guesses at each place of `step_of`, of one step or of steps of one token; then those after a step more."""
    trees = trees_of(drafter, laws, lengths, Speculation("ssd", 8, (3,), "jit"))
    drafter.forward([PathRow(tree, Row(tree.path, 0, tree.table.pages, 1)) for tree in trees], [])
    firsts = [tiny.token_ids(1, 7 * cell) for cell in range(len(FORKS) * len(trees))]
    said = [*firsts, trees[-1].path[-1:]]
    found: list[list[Guess]] = [[] for _ in said]
    if at_once:
        more = [MORE[0], *MORE * len(trees)]
        path, *chains = drafter.several(*step_of(trees, said), more) or []
        found = [*chains, path]
    else:
        for depth in range(1 + max(MORE)):
            growing = [tokens for cell, tokens in enumerate(said[:-1]) if MORE[cell % len(FORKS)] >= depth]
            path_guess, *guesses = drafter.forward(*step_of(trees, said))
            for tokens, guess in zip([*growing, said[-1]], [*guesses, path_guess], strict=True):
                found[next(index for index, own in enumerate(said) if own is tokens)].append(guess)
                tokens.append(guess.token)
    ends = [ChainRows(tree, ChainTokens(tree.table.pages, tree.base)) for tree in trees]
    for cell, guesses in enumerate(found[:-1]):
        own = ends[cell // len(FORKS)].tokens
        own.add(FORKS[cell % len(FORKS)], cell, len(guesses), [guesses[-1].token])
    return [*found, list(drafter.forward([], ends))]
