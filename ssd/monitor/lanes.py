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
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

CAPACITY = 1 << 14
_RECORD = struct.Struct("<4q")
_COUNT = struct.Struct("<q")
_HEADER_BYTES = 64
_LANE_BYTES = _HEADER_BYTES + CAPACITY * _RECORD.size
LANES = ("target", "draft")
SIZE_BYTES = len(LANES) * _LANE_BYTES

Records = npt.NDArray[np.int64]  # [n, 4]


class State(IntEnum):
    """Target: up to SAMPLE and OTHER; the draft: from DEPTH on. `detail` is the round's tokens (VERIFY, PREFILL) or the
    depth (DEPTH)."""

    IDLE = 0
    OTHER = 1  # between the named states: scheduling, messages, bookkeeping
    PREFILL = 2
    VERIFY = 3
    SAMPLE = 4
    WAIT_FOR_DRAFT = 5
    DEPTH = 6
    PROMOTE = 7
    WAIT_FOR_TARGET = 8


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


class Lane:
    """The writer's side: one process's lane in the memory of `descriptor`; -1 is memory nobody else has."""

    def __init__(self, descriptor: int, role: str) -> None:
        self._memory = mmap.mmap(descriptor, SIZE_BYTES)
        self._start = LANES.index(role) * _LANE_BYTES
        (self._count,) = _COUNT.unpack_from(self._memory, self._start)
        self._state: int = -1

    def enter(self, state: State, detail: int = 0) -> None:
        """From now on the process is in `state`. Being in it already is no news, unless `detail` says more."""
        if state != self._state or detail:
            self._state = state
            self._write(state, detail)

    def mark(self, mark: Mark, detail: int) -> None:
        self._write(mark, detail)

    def _write(self, code: int, detail: int) -> None:
        count = self._count
        offset = self._start + _HEADER_BYTES + count % CAPACITY * _RECORD.size
        _RECORD.pack_into(self._memory, offset, count, time.monotonic_ns(), code, detail)
        self._count = count + 1
        _COUNT.pack_into(self._memory, self._start, self._count)


class Reader:
    """Anybody else's side of one lane."""

    def __init__(self, descriptor: int, role: str) -> None:
        memory = mmap.mmap(descriptor, SIZE_BYTES)
        start = LANES.index(role) * _LANE_BYTES
        self._count = np.frombuffer(memory, np.int64, 1, start)
        self._ring: Records = np.frombuffer(memory, np.int64, CAPACITY * 4, start + _HEADER_BYTES).reshape(CAPACITY, 4)
        self._read = 0

    def news(self) -> Records:
        """A copy of the records since the last call, as many as are still there, in order. Shape [n, 4]."""
        count = int(self._count[0])
        numbers = np.arange(max(self._read, count - CAPACITY), count)
        self._read = count
        records = self._ring[numbers % CAPACITY]
        return records[records[:, 0] == numbers]


def spans(records: Records, until: int) -> tuple[list[Span], list[Moment]]:
    """Records in order as states and moments; the last state lasts `until` (ns)."""
    states = records[records[:, 2] < Mark.HIT]
    ends = np.append(states[1:, 1], max(until, int(states[-1, 1]))) if len(states) else states[:, 1]
    return (
        [
            Span(State(code), begin, end, detail)
            for (_, begin, code, detail), end in zip(states.tolist(), ends.tolist(), strict=True)
        ],
        [Moment(Mark(code), at, detail) for _, at, code, detail in records.tolist() if code >= Mark.HIT],
    )
