"""The supervisor's part of monitoring: while someone is subscribed, snapshots; else nothing is read or built."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import zmq

from ssd.config import EngineConfig
from ssd.ipc import sockets
from ssd.ipc.messages import pack
from ssd.ipc.pulse import Pulses
from ssd.ipc.supervision import Report, Seconds, Watch
from ssd.monitor.lanes import LANES, Lane, Reader, State
from ssd.monitor.messages import LaneNews, Process, ProcessState, Snapshot
from ssd.roles import roles

PERIOD_S = 0.1
# The frontend is told again and again that someone watches: neither a lost message nor a new frontend matters.
_TELL_S, _WATCH_S = 1.0, 3.0
# A watcher that reads nothing for so many snapshots, or reports that nobody fetches: the rest is dropped.
_SNAPSHOTS, _REPORTS = 50, 16
_MOST_AGE_S = 86400.0


class Running(Protocol):
    """A child as the supervisor knows it."""

    role: str
    pid: int
    ready: bool


class Publisher:
    """Made in the supervisor's thread, to which it belongs. `socket` is readable when someone comes or goes."""

    def __init__(
        self, context: zmq.Context[Any], directory: Path, config: EngineConfig, events_fd: int, pulses: Pulses
    ) -> None:
        self.watched = False
        self._config, self._events_fd, self._pulses = config, events_fd, pulses
        self._name = directory.name
        self._roles = roles(config)
        self._lanes = {role: Reader(events_fd, role) for role in LANES}
        self._reports: deque[Report] = deque(maxlen=_REPORTS)
        self._seen: dict[str, tuple[int, int, float]] = {}  # role -> pid, turns, when they last changed
        self._due = self._tell_due = 0.0
        self._whole = False
        self.socket = sockets.publisher(context, f"ipc://{directory}/{sockets.TELEMETRY}", _SNAPSHOTS)

    def let_go(self) -> None:
        """Of the processes' memory; at the end."""
        self._lanes.clear()
        self._pulses = Pulses(-1)

    def delay(self, now: float) -> float:
        """Seconds (of time.monotonic) until there is something to publish."""
        return max(0.0, self._due - now) if self.watched else _MOST_AGE_S

    def ended(self, role: str) -> None:
        """A child is gone: nobody else writes its lane."""
        if self._config.telemetry and role in LANES:
            Lane(self._events_fd, role).enter(State.DOWN)

    def reported(self, report: Report) -> None:
        if self.watched:
            self._reports.append(report)

    def turn(self, children: Iterable[Running], now: float) -> Watch | None:
        """Publish if that is due. Returns what the frontend must be told."""
        self._hear()
        if not self.watched or now < self._due:
            return None
        self._due = now + PERIOD_S
        snapshot = Snapshot(
            engine=self._name,
            at=int(now * 1e9),
            model=self._config.target_name,
            draft=self._config.draft_name if self._config.draft is not None else "",
            speculation=self._config.speculation,
            whole=self._whole,
            processes=self._processes({child.role: child for child in children}, now),
            lanes=[LaneNews(role, lane.news().tobytes()) for role, lane in self._lanes.items()],
            reports=list(self._reports),
        )
        self.socket.send_multipart(pack(snapshot), flags=zmq.NOBLOCK)  # a PUB drops, it never waits
        self._reports.clear()
        self._whole = False
        if now < self._tell_due:
            return None
        self._tell_due = now + _TELL_S
        return Watch(_WATCH_S)

    def _hear(self) -> None:
        """Who has come gets everything that is still known; what others have already, they can tell by its number."""
        while (subscription := sockets.subscription(self.socket)) is not None:
            self.watched = subscription
            if subscription:
                self._whole, self._due = True, 0.0
                for lane in self._lanes.values():
                    lane.rewind()
            else:
                self._tell_due = 0.0
                self._seen.clear()
                self._reports.clear()

    def _processes(self, children: dict[str, Running], now: float) -> list[Process]:
        found = [Process("supervisor", os.getpid(), "up", _rss_bytes(os.getpid()))]
        for role in self._roles:
            child = children.get(role)
            if child is None:
                found.append(Process(role, 0, "down"))
            else:
                state: ProcessState = "up" if child.ready else "starting"
                found.append(Process(role, child.pid, state, _rss_bytes(child.pid), self._beat_age(child, now)))
        return found

    def _beat_age(self, child: Running, now: float) -> Seconds:
        turns = self._pulses.turns(child.role)
        pid, before, since = self._seen.get(child.role, (0, 0, now))
        if (pid, before) != (child.pid, turns):
            self._seen[child.role] = child.pid, turns, now
            return 0.0
        return min(_MOST_AGE_S, now - since)


def _rss_bytes(pid: int) -> int:
    """Memory of a process that is in RAM, shared pages included; 0 of one that is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError:
        return 0
