"""Publishes snapshots while someone is subscribed; used by the supervisor's thread."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import zmq

from ssd.config.engine import EngineConfig
from ssd.config.roles import roles
from ssd.ipc import sockets
from ssd.ipc.messages import FrontendReport, Seconds, Watch
from ssd.ipc.process import Heartbeats
from ssd.ipc.public import pack
from ssd.ipc.trace_ring import TRACED, State, TraceReader, TraceRing
from ssd.monitor.messages import Process, ProcessState, Snapshot, TraceNews

PERIOD_S = 0.1
# The frontend is told repeatedly that someone watches: a message may be lost, and a new frontend does not know it.
_TELL_S, _WATCH_S = 1.0, 3.0
# Snapshots that wait for one watcher, and reports that wait for a snapshot; more are dropped.
_SNAPSHOTS, _REPORTS = 50, 16
_MOST_AGE_S = 86400.0


class PublishedEngine(Protocol):
    role: str
    pid: int
    ready: bool


class SnapshotPublisher:
    """Publishes snapshots. `socket` is readable when a watcher comes or goes."""

    def __init__(
        self,
        context: zmq.Context[Any],
        directory: Path,
        config: EngineConfig,
        trace_fd: int,
        heartbeats: Heartbeats,
        kernels: bool,
    ) -> None:
        self.watched, self._kernels = False, kernels
        self._config, self._trace_fd, self._heartbeats = config, trace_fd, heartbeats
        self._name = directory.name
        self._roles = roles(config)
        self._traces = {role: TraceReader(trace_fd, role) for role in TRACED}
        self._reports: deque[FrontendReport] = deque(maxlen=_REPORTS)
        self._seen: dict[str, tuple[int, int, float]] = {}  # role -> pid, turns, when they last changed
        self._ends: dict[str, ProcessState] = {}  # how a role's last process ended
        self._due = self._tell_due = 0.0
        self._whole = False
        self.socket = sockets.publisher(context, f"ipc://{directory}/{sockets.TELEMETRY}", _SNAPSHOTS)

    def let_go(self) -> None:
        self._traces.clear()
        self._heartbeats = Heartbeats(-1)

    def delay(self, now: float) -> float:
        return max(0.0, self._due - now) if self.watched else _MOST_AGE_S

    def ended(self, role: str, parked: bool = False) -> None:
        """Mark an ended child, which writes its trace no more, as down there, or as idle if it is `parked`."""
        self._ends[role] = "parked" if parked else "down"
        if role in TRACED:
            TraceRing(self._trace_fd, role).enter(State.IDLE if parked else State.DOWN)

    def reported(self, report: FrontendReport) -> None:
        if self.watched:
            self._reports.append(report)

    def turn(self, children: Iterable[PublishedEngine], now: float) -> Watch | None:
        """Publish a snapshot if one is due; return the message that the frontend must get, or None."""
        self._hear()
        if not self.watched or now < self._due:
            return None
        self._due = now + PERIOD_S
        snapshot = Snapshot(
            engine=self._name,
            at=int(now * 1e9),
            model=self._config.target_name,
            draft=self._config.draft_name if self._config.has_draft else "",
            speculation=self._config.speculation,
            whole=self._whole,
            processes=self._processes({child.role: child for child in children}, now),
            traces=[TraceNews(role, trace.news().tobytes()) for role, trace in self._traces.items()],
            reports=list(self._reports),
            kernels=self._kernels,
        )
        self.socket.send_multipart(pack(snapshot), flags=zmq.NOBLOCK)  # a PUB drops, it never waits
        self._reports.clear()
        self._whole = False
        if now < self._tell_due:
            return None
        self._tell_due = now + _TELL_S
        return Watch(_WATCH_S)

    def _hear(self) -> None:
        # The next snapshot holds all known records if a watcher came.
        while (subscription := sockets.subscription(self.socket)) is not None:
            self.watched = subscription
            if subscription:
                self._whole, self._due = True, 0.0
                for trace in self._traces.values():
                    trace.rewind()
            else:
                self._tell_due = 0.0
                self._seen.clear()
                self._reports.clear()

    def _processes(self, children: dict[str, PublishedEngine], now: float) -> list[Process]:
        found = [Process("supervisor", os.getpid(), "up", _rss_bytes(os.getpid()))]
        for role in self._roles:
            child = children.get(role)
            if child is None:
                found.append(Process(role, 0, self._ends.get(role, "down")))
            else:
                state: ProcessState = "up" if child.ready else "starting"
                found.append(Process(role, child.pid, state, _rss_bytes(child.pid), self._beat_age(child, now)))
        return found

    def _beat_age(self, child: PublishedEngine, now: float) -> Seconds:
        turns = self._heartbeats.turns(child.role)
        pid, before, since = self._seen.get(child.role, (0, 0, now))
        if (pid, before) != (child.pid, turns):
            self._seen[child.role] = child.pid, turns, now
            return 0.0
        return min(_MOST_AGE_S, now - since)


def _rss_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError:
        return 0
