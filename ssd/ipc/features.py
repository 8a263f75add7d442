"""The arena of hidden states beside the speculation board: what a draft that is an EAGLE-3 head reads of its target.

A row for every place of the target's KV cache: what the prefix cache keeps has its features as long as its
keys and values, whoever computed them. A table says which pages every running sequence has. The target is the only
writer, the draft the only reader; never a lock.

A row has a version, 0 while it is being written (a seqlock, as on the board), and a tag, a hash of the text up to its
token. A reader asks for tags. A page that has gone to another text, the features of a token that was rejected, a table
of the slot's last owner: whatever is stale has another tag, and so is not there.

Rows on a GPU are written by the target's kernels and copied by the draft's; versions, tags and table are in memory of
the host. The target writes a version when its device is done with the rows, and the draft looks at it again when its
own is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ssd.config import EngineConfig
from ssd.ipc.arena import Arena, leading
from ssd.ipc.board import Words
from ssd.ipc.layouts import feature_layout, table_shape
from ssd.ipc.shared import settle

_MULTIPLIER, _MASK = 0x9E3779B97F4A7C15, 2**63 - 1


def extend_tags(tags: list[int], tokens: Sequence[int]) -> None:
    """`tags[p]` names the text up to its token p; go on with the tags of `tokens`."""
    tag = tags[-1] if tags else 0
    for token in tokens:
        tag = (tag ^ (token + 1)) * _MULTIPLIER & _MASK
        tag ^= tag >> 29
        tags.append(tag)


class Part(NamedTuple):
    """Tokens of the sequence in `slot`, which has these `pages`: those from position `start` on, with their tags."""

    slot: int
    pages: Sequence[int]
    start: int
    tags: Sequence[int]


class FeatureArena(Arena):
    """The view of one side; only the target's is `writable`."""

    def __init__(self, descriptor: int, config: EngineConfig, writable: bool = False) -> None:
        super().__init__(descriptor, feature_layout(config), writable)
        self._page_size, self._writable = config.page_size, writable
        cells = self.layout.shape[0]
        self._versions, self._tags = self._words[: 2 * cells].reshape(2, cells)
        self._table = self._words[2 * cells :].reshape(table_shape(config))
        self._version = 0

    def place(self, data: Tensor | None) -> None:
        super().place(data)
        if self._writable:
            self._versions[:] = 0  # what they tell of is not there

    def write(self, parts: Sequence[Part], rows: Tensor) -> None:
        """The features [n, width] of the tokens of `parts`, one part after the other."""
        for slot, pages, _, _ in parts:
            self._table[slot, : len(pages)] = pages
        where = np.concatenate([self._cells(np.asarray(p.pages), p.start, len(p.tags)) for p in parts])
        self._version += 1
        self._versions[where] = 0
        ours = self._rows
        ours.index_copy_(0, torch.from_numpy(where).to(ours.device), rows.to(ours.device, ours.dtype))
        settle(ours)
        self._tags[where] = [tag for part in parts for tag in part.tags]
        self._versions[where] = self._version

    def read(self, slot: int, start: int, tags: Sequence[int]) -> Tensor:
        """[m, width]: the features of the tokens from position `start` on, as many in a row as are there."""
        pages = self._table[slot]
        where = self._cells(pages, start, max(0, min(len(tags), len(pages) * self._page_size - start)))
        known = (where >= 0) & (where < len(self._versions))
        where = where[: leading(known)]
        versions = self._versions[where]
        where = where[: leading((versions != 0) & (self._tags[where] == tags[: len(where)]))]
        rows = self._rows[torch.from_numpy(where).to(self._rows.device)]
        finite = np.array(rows.isfinite().all(dim=1).tolist(), dtype=bool)  # waits for the rows
        sound = finite & (self._versions[where] == versions[: len(where)])
        return rows[: leading(sound)]

    def _cells(self, pages: Words, start: int, count: int) -> Words:
        positions = np.arange(start, start + count)
        found: Words = pages[positions // self._page_size] * self._page_size + positions % self._page_size
        return found
