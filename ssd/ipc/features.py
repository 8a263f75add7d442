"""The target's hidden states in shared memory, for a draft that reads them; without a lock, as in draft_probs.py.

Each slot of the target's KV cache has a row, so tokens in the prefix cache have features too. A row has a version (a
seqlock) and a tag: a hash of the text up to its token. By the tag the reader refuses stale rows: of a rejected token,
of a page that now holds another text, or found through the page table of the slot's last owner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ssd.config.engine import EngineConfig
from ssd.ipc.arenas import Arena, leading, settle
from ssd.ipc.board import Words
from ssd.ipc.layouts import feature_layout, table_shape
from ssd.ipc.process import Start

_MULTIPLIER, _MASK = 0x9E3779B97F4A7C15, 2**63 - 1


def extend_tags(tags: list[int], tokens: Sequence[int]) -> None:
    """Append the tags of `tokens`: `tags[p]` names the text up to its token p."""
    tag = tags[-1] if tags else 0
    for token in tokens:
        tag = (tag ^ (token + 1)) * _MULTIPLIER & _MASK
        tag ^= tag >> 29
        tags.append(tag)


class FeaturePart(NamedTuple):
    """Tokens of the sequence in `slot` from position `start` on: their tags, and all its pages."""

    slot: int
    pages: Sequence[int]
    start: int
    tags: Sequence[int]


class FeatureArena(Arena):
    """One side's view of the arena; only the target's is `writable`."""

    name = "features"

    def __init__(self, descriptor: int, config: EngineConfig, writable: bool = False) -> None:
        super().__init__(descriptor, feature_layout(config), writable)
        self._page_size, self._writable = config.page_size, writable
        count = self.layout.shape[0]
        self._versions, self._tags = self._words[: 2 * count].reshape(2, count)
        self._table = self._words[2 * count :].reshape(table_shape(config))
        self._version = 0

    @classmethod
    def of(cls, start: Start, writable: bool = False) -> FeatureArena | None:
        return None if start.features_fd < 0 else cls(start.features_fd, start.config, writable)

    def place(self, data: Tensor | None) -> None:
        super().place(data)
        if self._writable:
            self._versions[:] = 0  # their rows were in the other memory

    def write(self, parts: Sequence[FeaturePart], rows: Tensor) -> None:
        """Write the features [n, width] of the tokens of `parts`, one part after the other."""
        for slot, pages, _, _ in parts:
            self._table[slot, : len(pages)] = pages
        where = np.concatenate([self._places(np.asarray(p.pages), p.start, len(p.tags)) for p in parts])
        self._version += 1
        self._versions[where] = 0
        ours = self._rows
        ours.index_copy_(0, torch.from_numpy(where).to(ours.device), rows.to(ours.device, ours.dtype))
        settle(ours)
        self._tags[where] = [tag for part in parts for tag in part.tags]
        self._versions[where] = self._version

    def read(self, slot: int, start: int, tags: Sequence[int]) -> Tensor:
        """Return the features [m, width] of the first m tokens from position `start` on.

        m counts the leading rows that are whole, finite and have the right one of `tags`."""
        pages = self._table[slot]
        where = self._places(pages, start, max(0, min(len(tags), len(pages) * self._page_size - start)))
        known = (where >= 0) & (where < len(self._versions))
        where = where[: leading(known)]
        versions = self._versions[where]
        where = where[: leading((versions != 0) & (self._tags[where] == tags[: len(where)]))]
        rows = self._rows[torch.from_numpy(where).to(self._rows.device)]
        finite = np.array(rows.isfinite().all(dim=1).tolist(), dtype=bool)  # waits for the copy
        sound = finite & (self._versions[where] == versions[: len(where)])
        return rows[: leading(sound)]

    def _places(self, pages: Words, start: int, count: int) -> Words:
        positions = np.arange(start, start + count)
        found: Words = pages[positions // self._page_size] * self._page_size + positions % self._page_size
        return found
