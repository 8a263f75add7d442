"""A line in the log every ten seconds in which something happened."""

from __future__ import annotations

import asyncio
import logging
import time

from ssd.frontend.desk import Desk, Observer, Request
from ssd.ipc.messages import Emission

log = logging.getLogger("ssd.frontend")

PERIOD_S = 10.0


class LogLine(Observer):
    """An observer of the desk, in its event loop."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._begin()
        desk.observers.append(self)

    def _begin(self) -> None:
        self._began = time.monotonic()
        self._tokens = self._ended = self._rounds = self._accepted = self._hits = self._misses = 0
        asyncio.get_running_loop().call_later(PERIOD_S, self._write)

    def _write(self) -> None:
        if self._tokens or self._ended:
            log.info("%s", self.text(time.monotonic() - self._began))
        self._begin()

    def text(self, seconds: float) -> str:
        """What has happened in so many seconds."""
        load = self._desk.load
        parts = [
            f"{self._tokens / seconds:.1f} tok/s",
            f"{load.running} running",
            f"{max(0, self._desk.open_requests - load.running)} waiting",
            f"{self._ended} ended",
            f"KV cache {load.kv_cache_usage:.0%}",
        ]
        if self._rounds:
            parts.append(f"acceptance length {1 + self._accepted / self._rounds:.2f}")
        if self._hits + self._misses:
            parts.append(f"hit rate {self._hits / (self._hits + self._misses):.0%}")
        return ", ".join(parts)

    def emitted(self, request: Request, emission: Emission) -> None:
        self._tokens += len(emission.token_ids)
        if request.completion_tokens:  # the first tokens are the prefill's, which verifies nothing
            self._rounds += 1
            self._accepted += emission.accepted
        self._hits += emission.cache == "hit"
        self._misses += emission.cache not in ("", "hit", "first_round")

    def ended(self, request: Request, reason: str) -> None:
        self._ended += 1
