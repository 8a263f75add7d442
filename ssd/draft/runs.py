"""A draft step in tensors of fixed shapes: tokens of paths and of chains alike see some pages and a place of the arena.

Those of paths see nothing of the arena. The arena's places are as pages of another size, behind the pages of the same
cache, so that all tokens are stored at once and one backend reads both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ssd.draft.arena import Arena, Branches
from ssd.draft.tree import Tree
from ssd.execution.batch import Row
from ssd.execution.kv_cache import KVCache
from ssd.execution.tables import BatchTensors, Draw, TablePlan, Tables
from ssd.layers.attention import PLAIN, Scores, merge
from ssd.layers.paged import PagedAttention, PagedRows


class Run(NamedTuple):
    """Tokens of one sequence in a row of a batch: where each stands, the slot of its keys and values, how many tokens
    it sees in `pages`, and how many in which place of the arena."""

    tree: Tree
    pages: Sequence[int]
    token_ids: Sequence[int]
    positions: Sequence[int]
    slots: Sequence[int]
    seen: Sequence[int]
    cells: Sequence[int]
    own: Sequence[int]


class Store:
    """Where a draft's keys and values lie in `cache`: `num_pages` pages, a dummy page, and `cells` places of `depth`
    tokens with another behind them that nobody writes."""

    def __init__(self, cache: KVCache, num_pages: int, cells: int, depth: int) -> None:
        self.cache, self.dummy_page, self.dummy_cell, self.depth = cache, num_pages, cells, depth
        self._first = (num_pages + 1) * cache.page_size
        self._stop = self._first + (cells + 1) * depth
        for kind in (cache.keys, cache.values):
            kind[:, self._first : self._stop] = 0.0
        self.cells = torch.arange(cells + 1, dtype=torch.int32, device=cache.keys.device)[:, None]

    @staticmethod
    def pages(num_pages: int, page_size: int, cells: int, depth: int) -> int:
        """How many the cache must have."""
        return num_pages + 1 + -(-(cells + 1) * depth // page_size)

    def arena(self) -> Arena:
        """All places, all free."""
        keys, values = (
            kind[:, self._first : self._stop].unflatten(1, (-1, self.depth))[:, : self.dummy_cell]
            for kind in (self.cache.keys, self.cache.values)
        )
        return Arena(keys, values)

    def own(self, layer: int) -> tuple[Tensor, Tensor]:
        """The keys and values of all places, of a layer: [slots, kv_heads, head_dim]."""
        where = slice(self._first, self._stop)
        return self.cache.keys[layer, where], self.cache.values[layer, where]

    def path(self, tree: Tree, row: Row) -> Run:
        """A row of a path."""
        count, positions = len(row.token_ids), range(row.start, row.stop)
        slots = self.cache.slots(row.pages, row.start, row.stop)
        seen = range(row.start + 1, row.stop + 1)
        pages = row.pages[: -(-row.stop // self.cache.page_size)]
        return Run(tree, pages, row.token_ids, positions, slots, seen, [self.dummy_cell] * count, [0] * count)

    def chains(self, tree: Tree, branches: Branches, longest: int) -> list[Run]:
        """Rows of chains, of at most `longest` tokens each."""
        pages = branches.pages[: -(-(branches.base + max(branches.forks)) // self.cache.page_size)]
        seen = [branches.base + fork for fork in branches.forks]
        own = [depth + 1 for depth in branches.depths]
        places = zip(branches.cells, branches.depths, strict=True)
        slots = [self._first + cell * self.depth + depth for cell, depth in places]
        columns = branches.tokens, branches.positions, slots, seen, branches.cells, own
        starts = range(0, len(seen), longest)
        return [Run(tree, pages, *(column[start : start + longest] for column in columns)) for start in starts]


class TreeTensors(BatchTensors):
    """What a step reads of runs."""

    columns = (*BatchTensors.columns, "seen", "cells", "own")

    def fill_runs(self, runs: Sequence[Run], tables: Tables, store: Store, warm: bool) -> None:
        """Write and send the runs, and, if `warm`, what decides the token after each. What fills the rest is stored on
        the dummy page and sees the first token of it."""
        tables.tell((run.tree.slot, run.pages) for run in runs)
        dummy_slot = store.dummy_page * store.cache.page_size
        self.send(
            [len(run.token_ids) for run in runs],
            [run.tree.slot for run in runs],
            tables.dummy,
            _draws(runs) if warm else (),
            ids=([token for run in runs for token in run.token_ids], 0),
            positions=([position for run in runs for position in run.positions], 0),
            slots=([slot for run in runs for slot in run.slots], dummy_slot),
            seen=([count for run in runs for count in run.seen], 1),
            cells=([cell for run in runs for cell in run.cells], store.dummy_cell),
            own=([count for run in runs for count in run.own], 0),
        )

    def tree_plan(self, table: Tensor, store: Store, attention: PagedAttention) -> RunPlan:
        """A new plan that reads these tensors."""
        column, device = self._device, self.ids.device
        shared = self._rows(table, store.cache, column["seen"], causal=False)
        own = PagedRows(
            store.cells,
            column["cells"].int(),
            torch.arange(self.tokens + 1, dtype=torch.int32, device=device),
            column["own"],
            column["own"] - 1,
            store.depth,
            1,
            causal=False,
        )
        return RunPlan(column["positions"], column["slots"], shared, own, store, attention)


def _draws(runs: Sequence[Run]) -> list[Draw]:
    """What decides the token after each token; chains share it where they share the position."""
    found: dict[tuple[int, int], Draw] = {}
    for run in runs:
        for position in run.positions:
            place = run.tree.slot, position
            if place not in found:
                found[place] = Draw.of(run.tree.law, position + 1)
    return [found[run.tree.slot, position] for run in runs for position in run.positions]


class RunPlan(TablePlan):
    """The plan of runs: every token attends to its path and to its place of the arena separately; the parts are merged
    by log-sum-exp, as in `ssd.draft.arena.TreePlan`."""

    def __init__(
        self,
        positions: Tensor,
        slots: Tensor,
        shared: PagedRows,
        own: PagedRows,
        store: Store,
        attention: PagedAttention,
    ) -> None:
        super().__init__(positions, slots, shared, store.cache, attention)
        self._own, self._store = own, store

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: Scores = PLAIN) -> Tensor:
        self._cache.write(layer, self._slots, k, v)
        scale = self._scale if rule.scale is None else rule.scale
        paths = self._cache.keys[layer], self._cache.values[layer]
        shared = self._attention.part(q, *paths, self._rows, scale, rule)
        return merge(shared, self._attention.part(q, *self._store.own(layer), self._own, scale, rule)).flatten(1)
