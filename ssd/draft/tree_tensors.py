"""The input tensors of a draft's step in a static shape (`ssd.draft.static_shapes`).

Every token sees tokens of its sequence's pages and of one cell (a path token: none). Cells lie after the pages in the
same cache, as pages of another size: all tokens are stored at once, and one backend reads both parts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ssd.draft.chain_cache import ChainCache, ChainTokens
from ssd.draft.tree import Tree
from ssd.execution.batch import Row
from ssd.execution.kv_cache import KVCache
from ssd.execution.tables import BatchTensors, Draw, TableContext, Tables, Upload
from ssd.layers.attention import PLAIN, Scores
from ssd.layers.paged import PagedAttention, PagedKeys, PagedRows
from ssd.models.interface import Model
from ssd.speculation.noise import halves


class TreeRow(NamedTuple):
    """Tokens of one sequence in a row of a batch, with numbers for each token.

    A token's keys and values go to its slot. It sees `seen` tokens of `pages` and `own` tokens of its cell. `more`
    tokens follow it in the same step, each the likeliest after the one before."""

    tree: Tree
    pages: Sequence[int]
    token_ids: Sequence[int]
    positions: Sequence[int]
    slots: Sequence[int]
    seen: Sequence[int]
    cells: Sequence[int]
    own: Sequence[int]
    more: Sequence[int]


class TreeCache:
    """The layout of a drafter's `cache`: pages, a dummy page, cells, a dummy cell never written."""

    def __init__(self, cache: KVCache, num_pages: int, cells: int, depth: int) -> None:
        self.cache, self.dummy_page, self.dummy_cell, self.depth = cache, num_pages, cells, depth
        self._first = (num_pages + 1) * cache.page_size
        self._stop = self._first + (cells + 1) * depth
        for kind in chain.from_iterable(cache.blocks):
            kind[:, self._first : self._stop] = 0.0
        self.cells = torch.arange(cells + 1, dtype=torch.int32, device=cache.keys.device)[:, None]

    @staticmethod
    def pages(num_pages: int, page_size: int, cells: int, depth: int) -> int:
        return num_pages + 1 + -(-(cells + 1) * depth // page_size)

    def chain_cache(self) -> ChainCache:
        blocks = [
            [kind[:, self._first : self._stop].unflatten(1, (-1, self.depth))[:, : self.dummy_cell] for kind in block]
            for block in self.cache.blocks
        ]
        return ChainCache([(keys, values) for keys, values in blocks])

    def own(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of all cells in a layer, each [slots, kv_heads, head_dim]."""
        where = slice(self._first, self._stop)
        keys, values = self.cache.layers[layer]
        return keys[where], values[where]

    def path(self, tree: Tree, row: Row, longest: int, more: int = 0) -> list[TreeRow]:
        """Return rows of at most `longest` path tokens; `more` tokens follow the last one."""
        count = len(row.token_ids)
        slots = self.cache.slots(row.pages, row.start, row.stop)
        pages = row.pages[: -(-(row.stop + more) // self.cache.page_size)]
        positions, seen = range(row.start, row.stop), range(row.start + 1, row.stop + 1)
        own = [self.dummy_cell] * count, [0] * count
        return _cut(tree, pages, longest, row.token_ids, positions, slots, seen, *own, [0] * (count - 1) + [more])

    def chains(self, tree: Tree, tokens: ChainTokens, longest: int, more: Sequence[int] = ()) -> list[TreeRow]:
        """Return rows of at most `longest` chain tokens; `more` has how many tokens follow each token."""
        pages = tokens.pages[: -(-(tokens.base + max(tokens.forks)) // self.cache.page_size)]
        seen = [tokens.base + fork for fork in tokens.forks]
        own = [depth + 1 for depth in tokens.depths]
        places = zip(tokens.cells, tokens.depths, strict=True)
        slots = [self._first + cell * self.depth + depth for cell, depth in places]
        columns = tokens.tokens, tokens.positions, slots, seen, tokens.cells, own, more or [0] * len(seen)
        return _cut(tree, pages, longest, *columns)

    def next_slots(self, row: TreeRow, index: int) -> list[int]:
        """Return the slots of the tokens that follow a token of a row."""
        slot, position, count = row.slots[index], row.positions[index] + 1, row.more[index]
        if row.own[index]:
            return list(range(slot + 1, slot + 1 + count))
        return self.cache.slots(row.pages, position, position + count)


def _cut(tree: Tree, pages: Sequence[int], longest: int, *columns: Sequence[int]) -> list[TreeRow]:
    starts = range(0, len(columns[0]), longest)
    return [TreeRow(tree, pages, *(column[start : start + longest] for column in columns)) for start in starts]


class TreeTensors(BatchTensors):
    """The tensors of a step's rows in one shape.

    `features` [tokens, width], where the draft reads any, are of the tokens before; rows lie one position earlier."""

    columns = (*BatchTensors.columns, "seen", "cells", "own")

    def __init__(self, tokens: int, rows: int, longest: int, model: Model) -> None:
        super().__init__(tokens, rows, longest, model.device)
        self.features: Tensor | None = None
        width = model.shape.features
        self._ahead = 2 if width else 1  # from a token's row to the position that it predicts
        if width:
            self.features = torch.zeros(tokens, width, dtype=model.dtype, device=model.device)

    def fill_rows(self, rows: Sequence[TreeRow], tables: Tables, cache: TreeCache, warm: bool) -> None:
        """Write and send the rows and, if `warm`, the noise keys for the token after each token.

        Padding is stored on the dummy page and sees its first token."""
        tables.tell((row.tree.slot, row.pages) for row in rows)
        dummy_slot = cache.dummy_page * cache.cache.page_size
        self.send(
            [len(row.token_ids) for row in rows],
            [row.tree.slot for row in rows],
            tables.dummy,
            _draws(rows, self._ahead) if warm else (),
            ids=([token for row in rows for token in row.token_ids], 0),
            positions=([position for row in rows for position in row.positions], 0),
            slots=([slot for row in rows for slot in row.slots], dummy_slot),
            seen=([count for row in rows for count in row.seen], 1),
            cells=([cell for row in rows for cell in row.cells], cache.dummy_cell),
            own=([count for row in rows for count in row.own], 0),
        )

    def fill_next(self, rows: Sequence[TreeRow], numbers: Upload, cache: TreeCache, warm: bool) -> int:
        """Write the inputs of the later forwards to `numbers` and send them; return the number of forwards.

        Forward i has, for each token of `fill_rows`, all columns but `ids` of the i-th token that follows it. A token
        with fewer followers is stored on the dummy page."""
        more = np.array([count for row in rows for count in row.more])
        forwards, used, columns = int(more.max()), len(more), len(self.columns) - 1
        numbers.wait()
        host = numbers.host[: forwards * columns * self.tokens].reshape(forwards, columns, self.tokens)
        host[:] = self._upload.host[self.tokens :][: columns * self.tokens].reshape(columns, self.tokens)
        column = {name: host[:, index] for index, name in enumerate(self.columns[1:])}
        further = np.arange(1, forwards + 1)[:, None]
        further, chain = np.where(further <= more, further, 0), self._host["own"][:used] > 0
        column["positions"][:, :used] += further
        column["seen"][:, :used] += np.where(chain, 0, further)
        column["own"][:, :used] += np.where(chain, further, 0)
        column["slots"][:] = cache.dummy_page * cache.cache.page_size
        places = [(row, index) for row in rows for index in range(len(row.token_ids))]
        for at, (row, index) in enumerate(places):
            if count := row.more[index]:
                column["slots"][:count, at] = cache.next_slots(row, index)
                if warm:
                    first = row.positions[index] + 1 + self._ahead
                    keys = [halves((row.tree.law.seed, position)) for position in range(first, first + count)]
                    column["low"][:count, at], column["high"][:count, at] = zip(*keys, strict=True)
        numbers.send(slice(host.size))
        return forwards

    def go_on(self, tokens: Tensor, numbers: Tensor, features: Tensor) -> None:
        """Copy `tokens` int64 [tokens], `numbers` of `fill_next` and `features` [tokens, width] to the inputs."""
        if self.features is not None:
            self.features.copy_(features)
        self.ids.copy_(tokens)
        self._upload.device[self.tokens :][: len(numbers)].copy_(numbers)

    def tree_context(self, table: Tensor, cache: TreeCache, attention: PagedAttention) -> StaticTreeContext:
        column, device = self._device, self.ids.device
        shared = self._rows(table, cache.cache, column["seen"], causal=False)
        own = PagedRows(
            cache.cells,
            column["cells"].int(),
            torch.arange(self.tokens + 1, dtype=torch.int32, device=device),
            column["own"],
            column["own"] - 1,
            cache.depth,
            1,
            causal=False,
        )
        return StaticTreeContext(column["positions"], column["slots"], shared, own, cache, attention, self.features)


def _draws(rows: Sequence[TreeRow], ahead: int) -> list[Draw]:
    """Return the draw of the token after each token; chains of a sequence share it."""
    found: dict[tuple[int, int], Draw] = {}
    for row in rows:
        for position in row.positions:
            place = row.tree.slot, position
            if place not in found:
                found[place] = Draw.of(row.tree.law, position + ahead)
    return [found[row.tree.slot, position] for row in rows for position in row.positions]


class StaticTreeContext(TableContext):
    """The forward context of a static step; a ragged one has `TreeContext`."""

    def __init__(
        self,
        positions: Tensor,
        slots: Tensor,
        shared: PagedRows,
        own: PagedRows,
        cache: TreeCache,
        attention: PagedAttention,
        features: Tensor | None = None,
    ) -> None:
        super().__init__(positions, slots, shared, cache.cache, attention)
        self._own, self._tree_cache, self.features = own, cache, features

    def attend_stored(self, layer: int, q: Tensor, rule: Scores = PLAIN) -> Tensor:
        scale, paths = rule.scale_of(self._cache.head_dim), PagedKeys(*self._cache.layers[layer], self._rows)
        return self._attention.attend_both(q, paths, PagedKeys(*self._tree_cache.own(layer), self._own), scale, rule)
