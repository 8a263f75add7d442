"""Hear the traces of an engine that a part of the report measures."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from ssd.ipc.trace_ring import Moment, Span
from ssd.plugins.monitor.history import History
from ssd.plugins.monitor.subscriber import Subscriber
from ssd.plugins.monitor.trace_events import trace


class Listener:
    """Hears an engine's traces in a thread of its own. `last`: what was kept, from the time `begin` on."""

    def __init__(self, address: str) -> None:
        self._subscriber, self._history, self._over = Subscriber(address), History(), threading.Event()
        self.begin, self.last = 0, dict[str, tuple[list[Span], list[Moment]]]()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        while not self._over.is_set():
            snapshot = self._subscriber.receive(0.1)
            if snapshot is not None:
                self._history.add(snapshot)
        self._subscriber.close()

    def keep(self, begin: int, end: int) -> None:
        self.begin = begin
        self.last = {role: kept.since(begin, end) for role, kept in self._history.traces.items()}

    def write(self, file: Path, mode: str) -> None:
        """Write what was kept, for Perfetto."""
        file.write_text(json.dumps(trace(self.last, (), self.begin, {"mode": mode})))

    def close(self) -> None:
        self._over.set()
        self._thread.join()
