"""Trace rings: what target and draft do at every moment, in shared memory without a lock.

A trace is one process's sequence of states. Each state lasts until the next is entered, so every nanosecond has a name.
A record is four 64-bit words,

    sequence number | CLOCK_MONOTONIC in ns | state or mark | detail

in a ring of `CAPACITY` records. The process is the only writer of its ring and increments the count of records after
each write. A slow reader loses the oldest records. It recognises overwritten ones by their sequence numbers."""

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
_RING_BYTES = _HEADER_BYTES + CAPACITY * _RECORD.size
_MOST = 1 << 62  # no writer gets that far
Role = Literal["target", "draft"]
TRACED: tuple[Role, ...] = ("target", "draft")
SIZE_BYTES = len(TRACED) * _RING_BYTES

Records = npt.NDArray[np.int64]  # [n, 4]


class _Code(IntEnum):
    @property
    def words(self) -> str:
        """Return the name in words."""
        return self.name.lower().replace("_", " ")


class State(_Code):
    """The activity of a process.

    `detail` is the tokens of the step (VERIFY, PREFILL) or those waited for (WAIT_FOR_DRAFT), the depth (DEPTH) or the
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
    DOWN = 10  # written by the supervisor: the process has ended
    LOST = 11  # records were overwritten or lost before they were read


class Mark(_Code):
    """Moments, not states: the result of a cache look-up, or why a row that missed does not wait for the draft.

    `detail` is the request."""

    HIT = 64
    FIRST_ROUND = 65
    K_NOT_COVERED = 66
    TOKEN_NOT_COVERED = 67
    LATE = 68
    DRAFT_DOWN = 69
    HOPELESS = 80  # its policy expects nothing to pay
    UNSEEN = 81  # the draft has shown nothing of it yet
    NO_GAIN = 82  # no depth pays
    STALLED = 83  # the draft has made no progress since a wait in vain
    SILENT = 84  # nothing more comes, which ends a wait

    @property
    def of_look_up(self) -> bool:
        """Return True if this is the result of a look-up."""
        return self < Mark.HOPELESS


MARKS = {mark.name.lower(): mark for mark in Mark if mark.of_look_up}
"""Marks by the name of the look-up's result in emissions and metrics."""

_STATES, _CODES = frozenset(State), frozenset(Mark)


class Span(NamedTuple):
    """A state from `begin` to `end` (ns). The current state ends at the time when its ring was read."""

    state: State
    begin: int
    end: int
    detail: int


class Moment(NamedTuple):
    mark: Mark
    at: int
    detail: int


def _start(role: str) -> int:
    """Return the offset of a role's ring."""
    return TRACED.index(role) * _RING_BYTES


def _plausible(count: int) -> int:
    """Return a ring's count of records, or 0 for an impossible one: every process can write this memory."""
    return count if 0 <= count < _MOST else 0


class TraceRing:
    """The writer's side: one process's ring in the memory of `descriptor`; -1 allocates private memory."""

    def __init__(self, descriptor: int, role: str) -> None:
        self._memory = mmap.mmap(descriptor, SIZE_BYTES)
        self._start = _start(role)
        self._count = _plausible(*_COUNT.unpack_from(self._memory, self._start))
        self._state: int = -1

    def enter(self, state: State, detail: int = 0) -> None:
        """Record that the process is now in `state`. A repeated state without `detail` is not recorded."""
        if state != self._state or detail:
            self._state = state
            self._write(state, detail)

    def looked_up(self, request: int, verdict: str) -> None:
        """Record the result of a cache look-up (`Emission.cache`) for `request`, unless it is empty."""
        if verdict:
            self._write(MARKS[verdict], request)

    def note(self, mark: Mark, request: int) -> None:
        """Record a moment of a request."""
        self._write(mark, request)

    def _write(self, code: int, detail: int) -> None:
        count = self._count
        offset = self._start + _HEADER_BYTES + count % CAPACITY * _RECORD.size
        _RECORD.pack_into(self._memory, offset, count, time.monotonic_ns(), code, detail)
        self._count = count + 1
        _COUNT.pack_into(self._memory, self._start, self._count)


class NoTrace(TraceRing):
    """The ring of a process that records nothing."""

    def __init__(self) -> None:
        pass

    def enter(self, state: State, detail: int = 0) -> None:
        pass

    def _write(self, code: int, detail: int) -> None:
        pass


NO_TRACE = NoTrace()


class TraceReader:
    """The reader's side of one ring, in any process."""

    def __init__(self, descriptor: int, role: str) -> None:
        memory = mmap.mmap(descriptor, SIZE_BYTES)
        start = _start(role)
        self._count = np.frombuffer(memory, np.int64, 1, start)
        self._ring: Records = np.frombuffer(memory, np.int64, CAPACITY * 4, start + _HEADER_BYTES).reshape(CAPACITY, 4)
        self._read = 0

    def news(self) -> Records:
        """Return a copy of the records since the last call that are still there, in order. Shape [n, 4]."""
        count = _plausible(int(self._count[0]))
        known = self._read if self._read <= count else 0
        numbers = np.arange(max(known, count - CAPACITY), count)
        self._read = count
        records = self._ring[numbers % CAPACITY]
        # Meanwhile the writer may have overwritten the oldest of them.
        return records[(records[:, 0] == numbers) & (numbers > int(self._count[0]) - CAPACITY)]

    def rewind(self) -> None:
        """Let the next `news` begin with the oldest record."""
        self._read = 0


def spans(records: Records, until: int) -> tuple[list[Span], list[Moment]]:
    """Turn records into states and moments; the last state lasts until `until` (ns).

    A state before a missing record becomes LOST, because its end is unknown."""
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
