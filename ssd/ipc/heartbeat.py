"""Heartbeats: a counter for each process in shared memory, which moves as long as its loop does.

A pidfd tells that a process ended. A hang shows only here: ZeroMQ's threads go on in a process that does nothing."""

from __future__ import annotations

import mmap

from ssd.config.roles import FOLLOWERS, ROLES

_PLACES = {role: place for place, role in enumerate((*ROLES, *FOLLOWERS))}
SIZE_BYTES = 8 * len(_PLACES)


class Heartbeats:
    """The counters in the memory of `descriptor`; -1 allocates private memory."""

    def __init__(self, descriptor: int) -> None:
        self._turns = memoryview(mmap.mmap(descriptor, SIZE_BYTES)).cast("q")

    def beat(self, role: str) -> None:
        """Count one more turn of the loop of `role`. Only that process may call it."""
        self._turns[_PLACES[role]] += 1

    def turns(self, role: str) -> int:
        """Return the turns that `role` has counted."""
        return self._turns[_PLACES[role]]
