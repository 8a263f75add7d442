"""What target and draft do at every moment, in shared memory without a lock (contract C10).

A lane is one process's sequence of states: each lasts until the next is entered, so every nanosecond has a name. A
record is four 64-bit words,

    sequence number | CLOCK_MONOTONIC in ns | state or mark | detail

in a ring of `CAPACITY` records. The process is the only writer of its lane; the count of records is written after the
record. Who reads too late loses the oldest records, and what is being overwritten is told by its sequence number.
"""

from __future__ import annotations

import mmap
import struct
import time
from enum import IntEnum
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

CAPACITY = 1 << 14
_RECORD = struct.Struct("<4q")
_COUNT = struct.Struct("<q")
_HEADER_BYTES = 64
_LANE_BYTES = _HEADER_BYTES + CAPACITY * _RECORD.size
_MOST = 1 << 62  # no writer gets there
Role = Literal["target", "draft"]
LANES: tuple[Role, ...] = ("target", "draft")
SIZE_BYTES = len(LANES) * _LANE_BYTES

Records = npt.NDArray[np.int64]  # [n, 4]


class State(IntEnum):
    """What a process can be busy with. `detail` is the tokens of the step (VERIFY, PREFILL), the depth (DEPTH) or the
    request (PROMOTE)."""

    IDLE = 0
    OTHER = 1  # between the named states: scheduling, messages, bookkeeping
    PREFILL = 2
    VERIFY = 3
    SAMPLE = 4
    WAIT_FOR_DRAFT = 5
    DEPTH = 6
    PROMOTE = 7
    WAIT_FOR_TARGET = 8
    LOADING = 9
    DOWN = 10  # in the supervisor's words: it has ended
    LOST = 11  # records were overwritten or lost before they were read


class Mark(IntEnum):
    """Moments, not states: an outcome of `detail` = the request, which the cache had or, for some reason, had not."""

    HIT = 64
    FIRST_ROUND = 65
    K_NOT_COVERED = 66
    TOKEN_NOT_COVERED = 67
    LATE = 68
    DRAFT_DOWN = 69


MARKS = {mark.name.lower(): mark for mark in Mark}
"""By the name that the cache's verdict has in emissions and metrics."""

_STATES, _CODES = frozenset(State), frozenset(Mark)


class Span(NamedTuple):
    """A state from `begin` to `end` (ns); the present one ends where its lane was read."""

    state: State
    begin: int
    end: int
    detail: int


class Moment(NamedTuple):
    mark: Mark
    at: int
    detail: int


def _start(role: str) -> int:
    """Where the lane of a role begins."""
    return LANES.index(role) * _LANE_BYTES


def _plausible(count: int) -> int:
    """The count of records in a lane, whose memory every process of the engine can write: one that cannot be is 0."""
    return count if 0 <= count < _MOST else 0


class Lane:
    """The writer's side: one process's lane in the memory of `descriptor`; -1 is memory nobody else has."""

    def __init__(self, descriptor: int, role: str) -> None:
        self._memory = mmap.mmap(descriptor, SIZE_BYTES)
        self._start = _start(role)
        self._count = _plausible(*_COUNT.unpack_from(self._memory, self._start))
        self._state: int = -1

    def enter(self, state: State, detail: int = 0) -> None:
        """From now on the process is in `state`. Being in it already is no news, unless `detail` says more."""
        if state != self._state or detail:
            self._state = state
            self._write(state, detail)

    def looked_up(self, request: int, verdict: str) -> None:
        """Mark what the cache had for an outcome of `request`, if that question arose (`Emission.cache`)."""
        if verdict:
            self._write(MARKS[verdict], request)

    def _write(self, code: int, detail: int) -> None:
        count = self._count
        offset = self._start + _HEADER_BYTES + count % CAPACITY * _RECORD.size
        _RECORD.pack_into(self._memory, offset, count, time.monotonic_ns(), code, detail)
        self._count = count + 1
        _COUNT.pack_into(self._memory, self._start, self._count)


class Silent(Lane):
    """A lane of a process that tells nothing."""

    def __init__(self) -> None:
        pass

    def enter(self, state: State, detail: int = 0) -> None:
        pass

    def looked_up(self, request: int, verdict: str) -> None:
        pass


SILENT = Silent()


class Reader:
    """Anybody else's side of one lane."""

    def __init__(self, descriptor: int, role: str) -> None:
        memory = mmap.mmap(descriptor, SIZE_BYTES)
        start = _start(role)
        self._count = np.frombuffer(memory, np.int64, 1, start)
        self._ring: Records = np.frombuffer(memory, np.int64, CAPACITY * 4, start + _HEADER_BYTES).reshape(CAPACITY, 4)
        self._read = 0

    def news(self) -> Records:
        """A copy of the records since the last call, as many as are still there, in order. Shape [n, 4]."""
        count = _plausible(int(self._count[0]))
        known = self._read if self._read <= count else 0
        numbers = np.arange(max(known, count - CAPACITY), count)
        self._read = count
        records = self._ring[numbers % CAPACITY]
        # Meanwhile the writer may have come round to the oldest of them.
        return records[(records[:, 0] == numbers) & (numbers > int(self._count[0]) - CAPACITY)]

    def rewind(self) -> None:
        """Let the next `news` begin with the oldest record there is."""
        self._read = 0


def spans(records: Records, until: int) -> tuple[list[Span], list[Moment]]:
    """Records in order as states and moments; the last state lasts `until` (ns). What lies before a missing record is
    LOST, as nobody knows when its state ended."""
    states: list[Span] = []
    moments: list[Moment] = []
    expected = None
    for number, at, code, detail in records.tolist():
        lost = expected is not None and number != expected
        expected = number + 1
        if states and (lost or code in _STATES):
            states[-1] = states[-1]._replace(end=at, state=State.LOST if lost else states[-1].state)
        if code in _STATES:
            states.append(Span(State(code), at, max(at, until), detail))
        elif code in _CODES:
            moments.append(Moment(Mark(code), at, detail))
    return states, moments
