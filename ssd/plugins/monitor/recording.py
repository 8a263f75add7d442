"""A recorded engine, for `ssd top --demo`: ten seconds of an emulated pair, again and again."""

from __future__ import annotations

import gzip
import time
from importlib.resources import files
from typing import TypeVar

import msgspec
import numpy as np
from msgspec.structs import replace

from ssd.ipc.messages import EndEvent, FrontendReport, RoundEvent
from ssd.ipc.trace_ring import RECORD_BYTES, WORDS
from ssd.monitor.messages import Snapshot, TraceNews

_Event = TypeVar("_Event", RoundEvent, EndEvent)
_PAST_TURNS = 6  # so that a minute of history is there at once


class Recording:
    """Gives recorded snapshots like `ssd.plugins.monitor.subscriber.Subscriber`; `tools.record_top` writes the file.

    Each turn of the recording begins where the last one ended, and numbers trace records from there on."""

    here, address = True, "a recording"

    def __init__(self) -> None:
        packed = (files("ssd.plugins.monitor") / "recording.msgpack.gz").read_bytes()
        self._snapshots = msgspec.msgpack.decode(gzip.decompress(packed), type=list[Snapshot])
        self._length = self._snapshots[-1].at
        self._records = {trace.role: 0 for trace in self._snapshots[0].traces}
        for trace in (trace for snapshot in self._snapshots for trace in snapshot.traces):
            self._records[trace.role] += len(trace.records) // RECORD_BYTES
        self._began = time.monotonic_ns() - _PAST_TURNS * self._length
        self._given = 0

    def receive(self, timeout: float) -> Snapshot | None:
        turn, place = divmod(self._given, len(self._snapshots))
        snapshot, later = self._snapshots[place], self._began + turn * self._length
        wait = (snapshot.at + later - time.monotonic_ns()) / 1e9
        time.sleep(max(0.0, min(timeout, wait)))
        if wait > timeout:
            return None
        self._given += 1
        return replace(
            snapshot,
            at=snapshot.at + later,
            traces=[self._moved(trace, turn, later) for trace in snapshot.traces],
            reports=[_moved(report, later) for report in snapshot.reports],
        )

    def close(self) -> None:
        """Do nothing: there is no connection."""

    def _moved(self, trace: TraceNews, turn: int, later: int) -> TraceNews:
        records = np.frombuffer(trace.records, np.int64).reshape(-1, WORDS).copy()
        records[:, :2] += turn * self._records[trace.role], later
        return replace(trace, records=records.tobytes())


def _moved(report: FrontendReport, later: int) -> FrontendReport:
    def moved(event: _Event) -> _Event:
        return replace(event, at=event.at + later)

    return replace(report, rounds=[*map(moved, report.rounds)], ended=[*map(moved, report.ended)])
