"""Drives a load over a transport, and counts what comes of it."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass, field

from tools.load.checking import Checker, Request, Transport

_PATIENCE_S = 30.0  # without a sign of life, what is still open is lost
_BURST = 1024  # requests sent before answers are looked at again
_REFUSALS = {"overloaded", "rate_limit_exceeded"}


@dataclass
class Tally:
    """What happened in `seconds`; requests were sent during the first `sending` of them.

    `right` requests had the oracle's answer; ends after `seconds` are checked (`right_later`) but count for no
    throughput. `refused` ones were turned away as too many, `unsent` ones found no room on the way. `errors` counts all
    other ends by code ("wrong": not the oracle's answer). Latencies are those of right requests, in seconds."""

    sending: float = 0.0
    seconds: float = 0.0
    sent: int = 0
    right: int = 0
    right_later: int = 0
    refused: int = 0
    unsent: int = 0
    tokens: int = 0
    most_open: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    first_token_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    refusal_s: list[float] = field(default_factory=list)


class Driver:
    """Sends requests of `prompt_tokens` and `tokens` over `transport`. A run begins and ends with none open."""

    def __init__(self, transport: Transport, checker: Checker, prompt_tokens: int, tokens: int) -> None:
        self._transport, self._checker = transport, checker
        self._sizes = (prompt_tokens, tokens)
        self._open: dict[int, Request] = {}

    def keep_open(self, concurrency: int, seconds: float) -> Tally:
        """Keep `concurrency` requests open for `seconds`: each end begins the next. Counts what ends in that time."""
        self._begin(seconds)
        while time.perf_counter() < self._until:
            for _ in range(min(_BURST, concurrency - len(self._open))):
                if not self._send():
                    break
            self._transport.receive(0.01, self)
        return self._drain()

    def arrive(self, rate: float, seconds: float) -> Tally:
        """Send `rate` requests a second, evenly. Counts everything up to the last end.

        What arrives above capacity takes long."""
        self._begin(seconds)
        began, until, self._until = time.perf_counter(), self._until, math.inf
        while (now := time.perf_counter()) < until:
            due = int((now - began) * rate)
            for _ in range(min(_BURST, due - self._tally.sent - self._tally.unsent)):
                self._send()
            self._transport.receive(0.0, self)
        tally = self._drain()
        tally.seconds = self._heard - began
        return tally

    def _begin(self, seconds: float) -> None:
        self._tally = Tally(seconds, seconds)
        self._until = time.perf_counter() + seconds

    def _send(self) -> bool:
        request = self._checker.request(*self._sizes)
        if not self._transport.send(request):
            self._tally.unsent += 1
            return False
        self._open[request.name] = request
        self._tally.sent += 1
        self._tally.most_open = max(self._tally.most_open, len(self._open))
        return True

    def _drain(self) -> Tally:
        """Wait for what is still open."""
        self._heard = time.perf_counter()
        while self._open and time.perf_counter() < self._heard + _PATIENCE_S:
            self._transport.receive(0.1, self)
        self._tally.errors["lost"] += len(self._open)
        self._open.clear()
        return self._tally

    # -- the transport's sink ---------------------------------------------------------------------------------------

    def piece(self, name: int, ids: list[int], text: str) -> None:
        request = self._open.get(name)
        if request is None:
            return  # it was lost in an earlier run
        now = time.perf_counter()
        self._heard = now
        request.first = request.first or now
        request.ids += ids
        request.texts.append(text)
        if now < self._until:
            self._tally.tokens += len(ids)

    def end(self, name: int, reason: str, text: str) -> None:
        request = self._open.pop(name, None)
        if request is None:
            return
        now = time.perf_counter()
        self._heard = now
        request.texts.append(text)
        if not self._checker.right(request, reason):
            self._tally.errors["wrong"] += 1
            return
        self._tally.first_token_s.append(request.first - request.sent)
        self._tally.whole_s.append(now - request.sent)
        if now < self._until:
            self._tally.right += 1
        else:
            self._tally.right_later += 1

    def fail(self, name: int, code: str) -> None:
        request = self._open.pop(name, None)
        if request is None:
            return
        self._heard = time.perf_counter()
        if code in _REFUSALS:
            self._tally.refused += 1
            self._tally.refusal_s.append(self._heard - request.sent)
        else:
            self._tally.errors[code] += 1
