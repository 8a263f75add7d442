"""Trace rings: the state of target and draft at every moment, in shared memory without a lock.

Each state lasts until the next is entered. A record is twelve 64-bit words,

    sequence number | CLOCK_MONOTONIC in ns | state or mark | detail | figures[8]

in a ring of `CAPACITY` records. Figures are doubles, and only marks have them: the numbers that decided. The process
is the only writer of its ring and increments the count of records after each write. A slow reader loses the oldest
records, and recognises overwritten ones by their sequence numbers."""

from __future__ import annotations

import logging
import mmap
import re
import struct
import time
from collections.abc import Sequence
from enum import IntEnum
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from ssd.config.params import Mode

log = logging.getLogger("ssd.target")

CAPACITY = 1 << 14
WORDS, _FIGURES_AT = 12, 4
RECORD_BYTES = 8 * WORDS
_RECORD, _FIGURES = struct.Struct("<4q"), struct.Struct(f"<{WORDS - _FIGURES_AT}d")
_NONE = (0.0,) * (WORDS - _FIGURES_AT)
_COUNT = struct.Struct("<q")
_HEADER_BYTES = 64
_RING_BYTES = _HEADER_BYTES + CAPACITY * RECORD_BYTES
_MOST = 1 << 62  # no writer gets that far
Role = Literal["target", "draft"]
TRACED: tuple[Role, ...] = ("target", "draft")
SIZE_BYTES = len(TRACED) * _RING_BYTES

Records = npt.NDArray[np.int64]  # [n, WORDS]


class _Code(IntEnum):
    @property
    def words(self) -> str:
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
    """A moment: the result of a cache look-up, why a row that missed does not wait for the draft, a choice.

    `detail` is the request; of a wait that has ended, the rows that waited, and of a plan, those of the batch."""

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
    WAITED = 96
    PLAN = 97

    @property
    def of_look_up(self) -> bool:
        return self < Mark.HOPELESS

    @property
    def of_rows(self) -> bool:
        return self >= Mark.WAITED


MARKS = {mark.name.lower(): mark for mark in Mark if mark.of_look_up}
"""Marks by the name of the look-up's result in emissions and metrics."""

_MODES: tuple[Mode, ...] = get_args(Mode)
_STILL = "the target has seen no progress of the draft for {still_ms} ms"
_PAYS = "{gain} tokens in {ms} ms, {rate} tok/s; without it the batch brings {speed} tok/s"
_WOULD = "{depth} draft tokens, {token_ms} ms each, for {rows} rows would bring"
_FEWER = f"{_WOULD} {{gain}} tokens fewer than the guess at hand"
_CAME = (
    "the target waited {took_ms} ms for {detail} rows: {came} of {depth} tokens came, expected every {token_ms} ms; "
)
# For each mark: the names of its figures, its sentence, and its sentence where the first figure is 0.
_SAID: dict[Mark, tuple[str, ...]] = {
    Mark.HIT: ("", "draft tokens were prepared"),
    Mark.FIRST_ROUND: ("", "nothing can be prepared for it"),
    Mark.K_NOT_COVERED: (
        "outcomes accepted",
        "the draft prepared {outcomes} outcomes, none with {accepted} accepted tokens",
    ),
    Mark.TOKEN_NOT_COVERED: (
        "prepared accepted",
        "the draft prepared {prepared} tokens after {accepted} accepted tokens, not the one that came",
    ),
    Mark.LATE: (
        "prepared still_ms",
        f"its outcome is prepared, but has no token yet; {_STILL}",
        f"nothing of its round is prepared yet; {_STILL}",
    ),
    Mark.DRAFT_DOWN: ("", "the draft is down, has given it up, or is not told of it yet"),
    Mark.HOPELESS: (
        "price worth",
        "a proposal would bring {worth} tokens, and costs the time of {price} tokens",
        "its policy expects nothing of it",
    ),
    Mark.UNSEEN: ("known ms", "the draft has shown nothing of it for {ms} ms", "the draft does not know it"),
    Mark.NO_GAIN: (
        "depth gain ms rate speed rows token_ms",
        f"{_WOULD} {_PAYS}",
        "its policy wants no draft tokens",
    ),
    Mark.STALLED: (
        "ms depth",
        "{depth} tokens would pay, but the draft has stood still since a wait in vain {ms} ms ago",
    ),
    Mark.SILENT: (
        "patience_ms came depth limit",
        "{came} of {depth} draft tokens came, and nothing for {patience_ms} ms, {limit}",
    ),
    Mark.WAITED: (
        "rate came depth took_ms gain ms speed token_ms",
        f"{_CAME}waiting was to bring {_PAYS}",
        f"{_CAME}its policy always waits",
    ),
    Mark.PLAN: (
        "speed mode lookahead chains other_speed other_mode other_lookahead other_chains",
        "plan for {detail} rows: {plan}, {speed} tok/s expected{other}",
        "plan for {detail} rows: {plan}; nothing is measured yet",
    ),
}
_LIMITS = ("as long as one verification", "four times the expected wait", "the longest that a wait may be silent")
_ONE = re.compile(r"((?<![\d.])1 (?:draft )?(?:token|outcome|row|chain))s\b")
FIGURES = {mark: tuple(names.split()) for mark, (names, *_) in _SAID.items()}
"""The names of each mark's figures."""

_STATES, _CODES = frozenset(State), frozenset(Mark)


def said(mark: Mark, detail: int, figures: Sequence[float]) -> str:
    figures = (*figures, *_NONE)[: len(_NONE)]
    sentence = _SAID[mark][1 if figures[0] else -1]
    words = {
        name: f"{each:.0f}" if abs(each) >= 100 else f"{each:.3g}"
        for name, each in zip(FIGURES[mark], figures, strict=False)
    }
    if mark is Mark.PLAN:
        other = f"; best of another mode: {_plan(*figures[5:])}, {words['other_speed']} tok/s" if figures[4] else ""
        words |= {"plan": _plan(*figures[1:4]), "other": other}
    elif not mark.of_rows:
        if mark is Mark.NO_GAIN and figures[0] and figures[1] < 0:
            sentence, words["gain"] = _FEWER, words["gain"][1:]
        elif mark is Mark.SILENT:
            words["limit"] = _LIMITS[int(figures[3]) % len(_LIMITS)]
        gate = "stops waiting, " if mark is Mark.SILENT else "does not wait, "
        what = "" if mark is Mark.HIT else "missed, " if mark.of_look_up else gate
        sentence = f"request {{detail}} {what}{mark.words}: {sentence}"
    return _ONE.sub(r"\1", sentence.format(detail=detail, **words))


def plan_figures(speed: float, mode: Mode, lookahead: int, chains: int) -> tuple[float, ...]:
    """Return the figures of one plan for the mark PLAN, which has those of the chosen plan, then of another one."""
    return speed, _MODES.index(mode), lookahead, chains


def _plan(mode: float, lookahead: float, chains: float) -> str:
    name = _MODES[int(mode) % len(_MODES)]
    numbers = f", K {lookahead:.0f}" + f", {chains:.0f} chains" * (name == "ssd") if lookahead else ""
    return name + numbers


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
    figures: tuple[float, ...] = ()

    @property
    def line(self) -> str:
        return said(self.mark, self.detail, self.figures)


def _start(role: str) -> int:
    return TRACED.index(role) * _RING_BYTES


def _plausible(count: int) -> int:
    # Every process can write this memory.
    return count if 0 <= count < _MOST else 0


class TraceRing:
    """One process's ring for its writer, in the memory of `descriptor`; -1 allocates private memory."""

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

    def looked_up(self, request: int, verdict: str, *figures: float) -> None:
        """Record the result of a cache look-up (`Emission.cache`) for `request`, unless it is empty."""
        if verdict == "hit":
            self._write(Mark.HIT, request)
        elif verdict:
            self.note(MARKS[verdict], request, *figures)

    def note(self, mark: Mark, detail: int, *figures: float, level: int = logging.DEBUG) -> None:
        self._write(mark, detail, figures or _NONE)
        if log.isEnabledFor(level):
            log.log(level, "%s", said(mark, detail, figures))

    def _write(self, code: int, detail: int, figures: Sequence[float] = ()) -> None:
        count = self._count
        offset = self._start + _HEADER_BYTES + count % CAPACITY * RECORD_BYTES
        _RECORD.pack_into(self._memory, offset, count, time.monotonic_ns(), code, detail)
        if figures:
            _FIGURES.pack_into(self._memory, offset + _RECORD.size, *figures, *_NONE[len(figures) :])
        self._count = count + 1
        _COUNT.pack_into(self._memory, self._start, self._count)


NO_TRACE = TraceRing(-1, "target")
"""A ring that nobody reads."""


class TraceReader:
    def __init__(self, descriptor: int, role: str) -> None:
        memory = mmap.mmap(descriptor, SIZE_BYTES)
        start = _start(role)
        self._count = np.frombuffer(memory, np.int64, 1, start)
        words = np.frombuffer(memory, np.int64, CAPACITY * WORDS, start + _HEADER_BYTES)
        self._ring: Records = words.reshape(CAPACITY, WORDS)
        self._read = 0

    def news(self) -> Records:
        count = _plausible(int(self._count[0]))
        known = self._read if self._read <= count else 0
        numbers = np.arange(max(known, count - CAPACITY), count)
        self._read = count
        records = self._ring[numbers % CAPACITY]
        # Meanwhile the writer may have overwritten the oldest of them.
        return records[(records[:, 0] == numbers) & (numbers > int(self._count[0]) - CAPACITY)]

    def rewind(self) -> None:
        self._read = 0


def spans(records: Records, until: int) -> tuple[list[Span], list[Moment]]:
    """Turn records into states and moments; the last state lasts until `until` (ns).

    A state before a missing record becomes LOST, because its end is unknown."""
    states: list[Span] = []
    moments: list[Moment] = []
    expected = None
    figures = np.nan_to_num(records[:, _FIGURES_AT:].view(np.float64))
    for index, (number, at, code, detail) in enumerate(records[:, :_FIGURES_AT].tolist()):
        lost = expected is not None and number != expected
        expected = number + 1
        if states and (lost or code in _STATES):
            states[-1] = states[-1]._replace(end=at, state=State.LOST if lost else states[-1].state)
        if code in _STATES:
            states.append(Span(State(code), at, max(at, until), detail))
        elif code in _CODES:
            moments.append(Moment(Mark(code), at, detail, tuple(figures[index, : len(FIGURES[code])].tolist())))
    return states, moments
