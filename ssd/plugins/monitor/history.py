"""A watcher's memory of an engine: traces, rounds and ends of the last minutes. Times are monotonic ns."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from ssd.ipc.messages import EndEvent, FrontendReport, Load, RoundEvent
from ssd.ipc.trace_ring import TRACED, WORDS, Mark, Moment, Records, Span, spans
from ssd.monitor.messages import Snapshot

KEPT_S = 300.0
RECORDS = 1 << 17
_NONE: Records = np.empty((0, WORDS), np.int64)
_ROUNDS, _ENDED = 1 << 17, 1 << 14


class TraceHistory:
    """Owns about the `most` newest records of one trace ring. A record that arrives again is kept once."""

    def __init__(self, most: int) -> None:
        self._most, self._count = most, 0
        self._chunks: deque[Records] = deque()

    def add(self, told: bytes) -> None:
        news = np.frombuffer(told, np.int64).reshape(-1, WORDS)
        if self._chunks:
            news = news[news[:, 0] > self._chunks[-1][-1, 0]]
        if len(news):
            self._chunks.append(news)
            self._count += len(news)
        while self._count - len(self._chunks[0] if self._chunks else ()) >= self._most:
            self._count -= len(self._chunks.popleft())

    def since(self, begin: int, until: int) -> tuple[list[Span], list[Moment]]:
        """Return states and moments from `begin` to `until`. The state at `begin` is cut there."""
        wanted: deque[Records] = deque([_NONE])
        for chunk in reversed(self._chunks):
            wanted.appendleft(chunk)
            if len(_states_before(chunk, begin)):
                break
        records = np.concatenate(wanted)
        before = _states_before(records, begin)
        first = before[-1] if len(before) else 0
        states, moments = spans(records[first : np.searchsorted(records[:, 1], until, "right")], until)
        cut = [span._replace(begin=max(span.begin, begin)) for span in states if span.end > begin]
        return cut, [moment for moment in moments if moment.at > begin]


def _states_before(records: Records, moment: int) -> npt.NDArray[np.intp]:
    return np.flatnonzero((records[:, 1] <= moment) & (records[:, 2] < Mark.HIT))


class History:
    """The snapshots of one engine, with about `records` records of each trace; one of another engine clears it.

    `began` is the time since which the frontend has reported."""

    def __init__(self, records: int = RECORDS) -> None:
        self._most = records
        self._clear()

    def _clear(self) -> None:
        self.last: Snapshot | None = None
        self.load, self.open_requests, self.state = Load(), 0, ""
        self.began = self.dropped = 0
        self.traces: dict[str, TraceHistory] = {role: TraceHistory(self._most) for role in TRACED}
        self.rounds: deque[RoundEvent] = deque(maxlen=_ROUNDS)
        self.ended: deque[EndEvent] = deque(maxlen=_ENDED)

    @property
    def now(self) -> int:
        """Return the time of the last snapshot; 0 before the first one."""
        return self.last.at if self.last is not None else 0

    def add(self, snapshot: Snapshot) -> None:
        if self.last is not None and self.last.engine != snapshot.engine:
            self._clear()
        self.last = snapshot
        for trace in snapshot.traces:
            self.traces[trace.role].add(trace.records)
        for report in snapshot.reports:
            self._report(report)
        oldest = snapshot.at - int(KEPT_S * 1e9)
        while self.rounds and self.rounds[0].at < oldest:
            self.rounds.popleft()
        while self.ended and self.ended[0].at < oldest:
            self.ended.popleft()

    def _report(self, report: FrontendReport) -> None:
        self.load, self.open_requests, self.state = report.load, report.open_requests, report.state
        self.rounds.extend(report.rounds)
        self.ended.extend(report.ended)
        first = report.rounds[0].at if report.rounds else self.now
        self.began = self.began or min(self.now, first)
        self.dropped += report.dropped
