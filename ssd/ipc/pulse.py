"""A counter for each process in shared memory, which moves as long as its loop does (RELIABILITY 1).

Unlike the exit of a process, which its pidfd tells, a hang shows in nothing else: the threads of ZeroMQ answer
heartbeats for a process that does nothing.
"""

from __future__ import annotations

import mmap

import numpy as np

from ssd.roles import FOLLOWERS, ROLES

_PLACES = (*ROLES, *FOLLOWERS)
SIZE_BYTES = 8 * len(_PLACES)


class Pulses:
    """The counters in the memory of a descriptor; those of -1 are nobody else's."""

    def __init__(self, descriptor: int) -> None:
        self._turns = np.frombuffer(mmap.mmap(descriptor, SIZE_BYTES), dtype=np.int64)

    def beat(self, role: str) -> None:
        """One more turn of the loop of `role`, which alone may say so."""
        self._turns[_PLACES.index(role)] += 1

    def turns(self, role: str) -> int:
        return int(self._turns[_PLACES.index(role)])
