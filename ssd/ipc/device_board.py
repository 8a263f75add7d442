"""Board look-ups on the target's device: a GPU finds its next draft tokens without the host.

The target page-locks its view of the board. So the device copies the entries itself, after its earlier work. An entry
torn by the copy fails its checksum."""

from __future__ import annotations

import logging
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from ssd.ipc import board
from ssd.ipc.board import BoardReader

log = logging.getLogger("ssd.ipc")


class DeviceBoard:
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


def page_locked(reader: BoardReader) -> bool:
    """Page-lock the reader's memory so that GPUs can copy it; return False if the driver refuses."""
    words = reader.slots
    error = int(torch.cuda.cudart().cudaHostRegister(words.ctypes.data, words.nbytes, 0))
    if error:
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")  # clears the error, which the next launch would raise
        log.warning("verifications do not overlap: CUDA cannot lock the board's memory (error %d)", error)
    return not error
