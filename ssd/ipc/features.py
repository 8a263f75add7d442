"""The arena of hidden states beside the speculation board: what a draft that is an EAGLE-3 head reads of its target.

A row of float32 for every place of the target's KV cache: what the prefix cache keeps has its features as long as its
keys and values, whoever computed them. A table says which pages every running sequence has. The target is the only
writer, the draft the only reader; never a lock.

A row has a version, 0 while it is being written (a seqlock, as on the board), and a tag, a hash of the text up to its
token. A reader asks for tags. A page that has gone to another text, the features of a token that was rejected, a table
of the slot's last owner: whatever is stale has another tag, and so is not there.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ssd.config import EngineConfig
from ssd.ipc.board import Words

Rows = npt.NDArray[np.float32]
_MULTIPLIER, _MASK = 0x9E3779B97F4A7C15, 2**63 - 1


def extend_tags(tags: list[int], tokens: Sequence[int]) -> None:
    """`tags[p]` names the text up to its token p; go on with the tags of `tokens`."""
    tag = tags[-1] if tags else 0
    for token in tokens:
        tag = (tag ^ (token + 1)) * _MULTIPLIER & _MASK
        tag ^= tag >> 29
        tags.append(tag)


class FeatureArena:
    """The view of one side; only the target's is `writable`."""

    def __init__(self, descriptor: int, config: EngineConfig, writable: bool = False) -> None:
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._memory = mmap.mmap(descriptor, self.size_bytes(config), access=access)
        self._page_size, cells, table = _layout(config)
        words: Words = np.frombuffer(self._memory, np.int64, 2 * cells + table[0] * table[1])
        self._versions, self._tags = words[: 2 * cells].reshape(2, cells)
        self._table = words[2 * cells :].reshape(table)
        rows: Rows = np.frombuffer(self._memory, np.float32, offset=words.nbytes)
        self._rows = rows.reshape(cells, -1)
        self._version = 0

    @staticmethod
    def size_bytes(config: EngineConfig) -> int:
        """Bytes of shared memory; only those that are written to take any room."""
        assert config.features is not None
        _, cells, table = _layout(config)
        return 8 * (2 * cells + table[0] * table[1]) + 4 * cells * config.features.width

    def write(self, slot: int, pages: Sequence[int], start: int, tags: Sequence[int], rows: Rows) -> None:
        """The features [n, width] of the tokens from position `start` on of the sequence in `slot`, which has these
        pages."""
        self._table[slot, : len(pages)] = pages
        where = self._cells(np.asarray(pages), np.arange(start, start + len(tags)))
        self._version += 1
        self._versions[where] = 0
        self._rows[where] = rows
        self._tags[where] = tags
        self._versions[where] = self._version

    def read(self, slot: int, start: int, tags: Sequence[int]) -> Rows:
        """[m, width]: the features of the tokens from position `start` on, as many in a row as are there."""
        pages = self._table[slot]
        positions = np.arange(start, min(start + len(tags), len(pages) * self._page_size))
        where = self._cells(pages, positions)
        known = (where >= 0) & (where < len(self._rows))
        where = where[: _leading(known)]
        versions = self._versions[where]
        where = where[: _leading((versions != 0) & (self._tags[where] == tags[: len(where)]))]
        rows: Rows = self._rows[where]
        sound = (self._versions[where] == versions[: len(where)]) & np.isfinite(rows).all(axis=1)
        return rows[: _leading(sound)]

    def _cells(self, pages: Words, positions: Words) -> Words:
        found: Words = pages[positions // self._page_size] * self._page_size + positions % self._page_size
        return found


def _layout(config: EngineConfig) -> tuple[int, int, tuple[int, int]]:
    """(page size, places, slots and pages of the table)."""
    size = config.page_size
    return size, config.num_pages * size, (config.max_num_seqs, -(-config.max_model_len // size))


def _leading(true: npt.NDArray[np.bool_]) -> int:
    """How many come before the first that is not."""
    return len(true) if true.all() else int(true.argmin())
