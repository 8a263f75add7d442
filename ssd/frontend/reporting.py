"""What the frontend tells a watcher: every round and every end, as they were. What follows from them, the watcher works
out (`ssd.monitor.statistics`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ssd.frontend.desk import Desk, Observer, Request
from ssd.ipc.messages import Emission
from ssd.ipc.supervision import MAX_ENDED, MAX_ROUNDS, Ended, Report, Round

_PERIOD_S = 0.25


class Reporting(Observer):
    """An observer of the desk for as long as someone watches, in the desk's event loop; `send` takes the reports."""

    def __init__(self, desk: Desk, send: Callable[[Report], None]) -> None:
        self._desk, self._send = desk, send
        self._until = 0.0
        self._clear()

    def watch(self, seconds: float) -> None:
        """Report for so long, from now on."""
        if self not in self._desk.observers:
            self._desk.observers.append(self)
            self._turn()
        self._until = time.monotonic() + seconds

    def _turn(self) -> None:
        desk = self._desk
        self._send(Report(desk.load, desk.open_requests, desk.state, self._rounds, self._ended, self._dropped))
        self._clear()
        asyncio.get_running_loop().call_later(_PERIOD_S, self._again)

    def _again(self) -> None:
        if time.monotonic() < self._until:
            self._turn()
        else:
            self._desk.observers.remove(self)
            self._clear()

    def _clear(self) -> None:
        self._rounds: list[Round] = []
        self._ended: list[Ended] = []
        self._dropped = 0

    # -- what the desk tells ----------------------------------------------------------------------------------------

    def emitted(self, request: Request, emission: Emission) -> None:
        if len(self._rounds) == MAX_ROUNDS:
            self._dropped += 1
            return
        tokens, first = len(emission.token_ids), request.completion_tokens == 0
        about = emission.drafted, emission.accepted, emission.cache
        self._rounds.append(Round(time.monotonic_ns(), emission.request, tokens, *about, first))

    def ended(self, request: Request, reason: str) -> None:
        if len(self._ended) == MAX_ENDED:
            self._dropped += 1
            return
        counts = len(request.prompt), request.completion_tokens
        self._ended.append(Ended(time.monotonic_ns(), request.number, *counts, reason, request.metrics))
