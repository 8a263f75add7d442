"""Reports of the frontend about its requests: to `ssd top` and `ssd trace`, and in its log."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from ssd.frontend.request import Observer, Request
from ssd.frontend.request_manager import RequestManager
from ssd.ipc.messages import MAX_ENDED, MAX_ROUNDS, Emission, EndEvent, FrontendReport, RoundEvent

log = logging.getLogger("ssd.frontend")

_PERIOD_S = 0.25
LOG_PERIOD_S = 10.0


class Reporting(Observer):
    """Observes the request manager while someone watches, and gives each report to `send`."""

    def __init__(self, manager: RequestManager, send: Callable[[FrontendReport], None]) -> None:
        self._manager, self._send = manager, send
        self._until = 0.0
        self._clear()

    def watch(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        if self not in self._manager.observers:
            self._manager.observers.append(self)
            self._turn()

    def _turn(self) -> None:
        manager = self._manager
        if time.monotonic() < self._until:
            about = manager.load, manager.open_requests, manager.state
            self._send(FrontendReport(*about, self._rounds, self._ended, self._dropped))
            asyncio.get_running_loop().call_later(_PERIOD_S, self._turn)
        else:
            manager.observers.remove(self)
        self._clear()

    def _clear(self) -> None:
        self._rounds: list[RoundEvent] = []
        self._ended: list[EndEvent] = []
        self._dropped = 0

    # -- called by the request manager --------------------------------------------------------------------------------

    def emitted(self, request: Request, emission: Emission) -> None:
        if len(self._rounds) == MAX_ROUNDS:
            self._dropped += 1
            return
        tokens, first = len(emission.token_ids), request.completion_tokens == 0
        about = emission.drafted, emission.accepted, emission.cache, first, emission.source
        self._rounds.append(RoundEvent(time.monotonic_ns(), emission.request, tokens, *about))

    def ended(self, request: Request, reason: str) -> None:
        if len(self._ended) == MAX_ENDED:
            self._dropped += 1
            return
        counts = len(request.prompt), request.completion_tokens
        self._ended.append(EndEvent(time.monotonic_ns(), request.number, *counts, reason, request.metrics))


class LogLine(Observer):
    """Observes the request manager and writes a line every ten seconds in which something happened."""

    def __init__(self, manager: RequestManager) -> None:
        self._manager = manager
        self._begin()
        manager.observers.append(self)

    def _begin(self) -> None:
        self._began = time.monotonic()
        self._tokens = self._ended = self._rounds = self._accepted = self._hits = self._misses = 0
        asyncio.get_running_loop().call_later(LOG_PERIOD_S, self._write)

    def _write(self) -> None:
        if self._tokens or self._ended:
            log.info("%s", self.text(time.monotonic() - self._began))
        self._begin()

    def text(self, seconds: float) -> str:
        load = self._manager.load
        parts = [
            f"{self._tokens / seconds:.1f} tok/s",
            f"{load.running} running",
            f"{max(0, self._manager.open_requests - load.running)} waiting",
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
