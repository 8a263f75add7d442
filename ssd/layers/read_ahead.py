"""The beginning of the next product's weight comes to the L2 cache while small kernels run between two products."""

from __future__ import annotations

from functools import cache
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ssd.layers.triton_kernels import ask_kernel

# Bytes of a weight: a third of the L2 cache of an H100 or H200. A thread asks for so many of them.
_MOST_BYTES, _THREAD_BYTES, _THREADS = 16 << 20, 4096, 32


class ReadAhead:
    """Asks for weights on a side stream, in the order in which products ran before: runs before a capture show it.

    It keeps no weight alive. Who captures calls `join` before and at the end."""

    def __init__(self) -> None:
        self._next = WeakValueDictionary[int, Tensor]()  # of a weight's address
        self._last: int | None = None
        self._stream: torch.cuda.Stream | None = None
        self._forked = False

    def ran(self, weight: Tensor) -> None:
        """Ask for the weight whose product followed that of `weight`, which was launched now, the last time."""
        if self._last is not None:
            self._next[self._last] = weight
        self._last = weight.data_ptr()
        following = self._next.get(self._last)
        if following is None:
            return
        programs = min(following.nbytes, _MOST_BYTES) // (_THREADS * _THREAD_BYTES)
        if not programs:
            return
        self._stream = self._stream or torch.cuda.Stream(weight.device)
        self._stream.wait_stream(torch.cuda.current_stream(weight.device))
        with torch.cuda.stream(self._stream):
            ask_kernel[(programs,)](following, BYTES=_THREAD_BYTES, THREADS=_THREADS, num_warps=1)
        self._forked = True

    def join(self) -> None:
        """Let the current stream wait for what was asked for."""
        if self._stream is not None and self._forked:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._forked = False


@cache
def read_ahead() -> ReadAhead:
    """Return that of this process, which has one GPU."""
    return ReadAhead()
