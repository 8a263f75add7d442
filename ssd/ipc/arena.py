"""What the arenas have in common: rows of numbers on some carrier, and words of the host that say what they are."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ssd.ipc.board import Words
from ssd.ipc.layouts import Layout
from ssd.ipc.shared import HostTensor


class Arena:
    """One side's view of the memory file that both have inherited, the rows being in there or on a GPU."""

    def __init__(self, descriptor: int, layout: Layout, writable: bool = True) -> None:
        self.layout = layout
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._memory = mmap.mmap(descriptor, layout.word_bytes, access=access)
        self._words: Words = np.frombuffer(self._memory, np.int64)
        self._host = HostTensor(descriptor, layout.row_bytes, layout.word_bytes, writable)
        self._rows = self._shaped(self._host.data)

    def place(self, data: Tensor | None) -> None:
        """From now on the rows are in `data`, uint8 [layout.row_bytes], or, None, in the memory file. Both sides have
        to do it; nothing is copied."""
        self._rows = self._shaped(self._host.data if data is None else data)

    def _shaped(self, data: Tensor) -> Tensor:
        dtype: torch.dtype = getattr(torch, self.layout.dtype)
        return data.view(dtype).view(self.layout.shape)


def leading(true: npt.NDArray[np.bool_]) -> int:
    """How many come before the first that is not."""
    return len(true) if true.all() else int(true.argmin())
