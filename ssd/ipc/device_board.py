"""Looks up board entries where the target computes: a GPU finds its next draft tokens without the host.

The draft writes into shared memory (`ssd.ipc.board`), wherever it runs. The target page-locks its view of that memory.
So the device copies the entries when its own work has come so far, and sees what is published by then. What was torn on
the way fails its checksum, as on the host."""

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
    """What was found, int64 [rows]: the `entry`'s number (-1 on a miss), its `depth` in ids, `unsound` entries.

    `unsound` counts the entries that answered the outcome and were damaged. `ids` is int64 [rows, MAX_LOOKAHEAD]; those
    beyond `depth` mean nothing."""

    entry: Tensor
    depth: Tensor
    unsound: Tensor
    ids: Tensor


class DeviceBoard:
    """What `reader` sees, on `device`. It finds what `BoardReader.find` finds."""

    def __init__(self, reader: BoardReader, device: torch.device) -> None:
        self.reader = reader
        self._host = torch.from_numpy(reader.slots)
        self._words = torch.zeros_like(self._host, device=device)
        self._weights = torch.from_numpy(board.WEIGHTS.view(np.int64)).to(device)

    @property
    def words(self) -> tuple[Tensor, Tensor, int]:
        """What was fetched, int64 [slots, entries, words]; the weights of the checksum; the vocabulary's size."""
        return self._words, self._weights, self.reader.vocab_size

    def fetch(self, slots: int) -> None:
        """Copy the entries of the first `slots` slots, in the order of the device's work."""
        self._words[:slots].copy_(self._host[:slots], non_blocking=True)

    def find(self, slots: Tensor, keys: Tensor) -> Found:
        """Looks up outcomes `keys` [rows, 6] (`ssd.ipc.board.Key`) at `slots` [rows], in what was fetched."""
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
        """The checksum of `ssd.ipc.board`, in signed words, which wrap as unsigned ones do."""
        shifted = (rows >> 29) & (2**35 - 1)
        mixed = (rows ^ shifted) * self._weights
        total = mixed.sum(-1) - mixed[..., board.VERSION] - mixed[..., board.CHECKSUM]
        return total ^ board.SALT


def page_locked(reader: BoardReader) -> bool:
    """Let GPUs copy the reader's memory by themselves; False where the driver refuses."""
    words = reader.slots
    error = int(torch.cuda.cudart().cudaHostRegister(words.ctypes.data, words.nbytes, 0))
    if error:
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")  # or whoever launches next is told of it
        log.warning("verifications do not overlap: CUDA cannot lock the board's memory (error %d)", error)
    return not error
