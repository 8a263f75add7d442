"""Board look-ups on the target's device: a GPU finds its next draft tokens without the host.

The draft writes into shared memory (`ssd.ipc.board`), on any device. The target page-locks its view of that memory. So
the device copies the entries itself, after its earlier work, and sees all that is published by then. An entry that is
torn by the copy fails its checksum, as on the host."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ssd.config.params import MAX_LOOKAHEAD
from ssd.ipc import board
from ssd.ipc.board import BoardReader

log = logging.getLogger("ssd.ipc")


class Found(NamedTuple):
    """The result of a look-up, int64 [rows]: the `entry`'s number (-1 on a miss) and its `depth` in ids.

    `unsound` counts the damaged entries for the outcome. `ids` is int64 [rows, MAX_LOOKAHEAD]; ids beyond `depth` mean
    nothing."""

    entry: Tensor
    depth: Tensor
    unsound: Tensor
    ids: Tensor


class DeviceBoard:
    """A copy of the entries of `reader` on `device`. It finds what `BoardReader.find` finds."""

    def __init__(self, reader: BoardReader, device: torch.device) -> None:
        self.reader = reader
        self._host = torch.from_numpy(reader.slots)
        self._words = torch.zeros_like(self._host, device=device)
        self._weights = torch.from_numpy(board.WEIGHTS.view(np.int64)).to(device)

    @property
    def words(self) -> tuple[Tensor, Tensor, int]:
        """Return the fetched entries, int64 [slots, entries, words], the checksum's weights and the vocabulary size."""
        return self._words, self._weights, self.reader.vocab_size

    def fetch(self, slots: int) -> None:
        """Copy the entries of the first `slots` slots, in the order of the device's work."""
        self._words[:slots].copy_(self._host[:slots], non_blocking=True)

    def find(self, slots: Tensor, keys: Tensor) -> Found:
        """Look up outcomes `keys` [rows, 6] (`ssd.ipc.board.Key`) at `slots` [rows] in the fetched entries."""
        rows = self._words[slots]
        versions, depths = rows[..., board.VERSION], rows[..., board.DEPTH]
        ids = rows[..., board.IDS :]
        places = torch.arange(MAX_LOOKAHEAD, device=rows.device)
        valid = (ids >= 0) & (ids < self.reader.vocab_size) | (places >= depths[..., None])
        sound = (depths >= 0) & (depths <= MAX_LOOKAHEAD) & valid.all(-1)
        sound &= self._checksum(rows) == rows[..., board.CHECKSUM]
        answers = (versions != 0) & (rows[..., board.KEY] == keys[:, None]).all(-1)
        count = rows.shape[1]
        entry = torch.where(answers & sound, torch.arange(count, device=rows.device), count).amin(-1)
        taken = entry.clamp(max=count - 1)[:, None]
        missed = entry == count
        depth = depths.gather(1, taken)[:, 0].masked_fill(missed, 0)
        ids = ids.gather(1, taken[..., None].expand(-1, -1, MAX_LOOKAHEAD))[:, 0]
        return Found(entry.masked_fill(missed, -1), depth, (answers & ~sound).sum(-1), ids)

    def _checksum(self, rows: Tensor) -> Tensor:
        """Return the checksum of `ssd.ipc.board`, in signed words, which wrap as unsigned ones do."""
        shifted = (rows >> 29) & (2**35 - 1)
        mixed = (rows ^ shifted) * self._weights
        total = mixed.sum(-1) - mixed[..., board.VERSION] - mixed[..., board.CHECKSUM]
        return total ^ board.SALT


def page_locked(reader: BoardReader) -> bool:
    """Page-lock the reader's memory so that GPUs can copy it; return False if the driver refuses."""
    words = reader.slots
    error = int(torch.cuda.cudart().cudaHostRegister(words.ctypes.data, words.nbytes, 0))
    if error:
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")  # clears the error, which the next launch would raise
        log.warning("verifications do not overlap: CUDA cannot lock the board's memory (error %d)", error)
    return not error
