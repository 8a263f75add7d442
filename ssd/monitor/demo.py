"""A simulated engine for `ssd top --demo`: random but plausible figures of a pair on two devices."""

from __future__ import annotations

import random
import time
from collections import deque
from itertools import count
from typing import TypeVar

import numpy as np

from ssd.config.params import Speculation
from ssd.ipc.messages import EndEvent, FrontendReport, Load, RoundEvent
from ssd.ipc.public import Metrics
from ssd.ipc.trace_ring import MARKS, State
from ssd.monitor.messages import Process, Snapshot, TraceNews

_Event = TypeVar("_Event", RoundEvent, EndEvent)

_PERIOD_S, _PAST_S = 0.1, 65.0
_MS = 1_000_000
_K, _ROWS = 5, 3
_PLAN = "ssd, K 5, 24 chains: predicted for the next rounds 228 tok/s, 141 with sd, K 3"
_MISSES = ("token_not_covered", "token_not_covered", "k_not_covered", "late")


class Demo:
    """Produces snapshots like `ssd.monitor.subscriber.Subscriber`; the first holds a minute of history."""

    here, address = True, "demo"

    def __init__(self, seed: int = 7) -> None:
        self._random = random.Random(seed)
        self._next = time.monotonic()
        self._time = int((self._next - _PAST_S) * 1e9)
        self._numbers, self._requests = {"target": count(), "draft": count()}, count(1)
        self._begun = {next(self._requests): self._time for _ in range(_ROWS)}
        self._tokens = dict.fromkeys(self._begun, 0)
        self._records: dict[str, deque[tuple[int, int, int, int]]] = {"target": deque(), "draft": deque()}
        self._rounds: deque[RoundEvent] = deque()
        self._ended: deque[EndEvent] = deque()
        self._first = True

    def receive(self, timeout: float) -> Snapshot | None:
        """Return the next snapshot, or None after `timeout` seconds."""
        wait = self._next - time.monotonic()
        time.sleep(max(0.0, min(timeout, wait)))
        if wait > timeout:
            return None
        self._next += _PERIOD_S
        now = time.monotonic_ns()
        while self._time < now:
            self._step()
        first, self._first = self._first, False
        processes = [("supervisor", 180), ("target", 760), ("frontend", 210), ("draft", 330)]
        load = Load(running=_ROWS, kv_cache_usage=0.31, plan=_PLAN)
        return Snapshot(
            engine="demo",
            at=now,
            model="smollm2",
            draft="smollm2-draft",
            speculation=Speculation("auto"),
            whole=first,
            processes=[Process(role, 4000 + mib, "up", mib * 2**20, 0.0) for role, mib in processes],
            traces=[TraceNews("target", self._taken("target", now)), TraceNews("draft", self._taken("draft", now))],
            reports=[FrontendReport(load, _ROWS + 1, "ready", _until(self._rounds, now), _until(self._ended, now))],
        )

    def close(self) -> None:
        pass

    def _taken(self, role: str, now: int) -> bytes:
        records, taken = self._records[role], []
        while records and records[0][1] <= now:
            taken.append(records.popleft())
        return np.array(taken, np.int64).tobytes()

    def _note(self, role: str, at: int, code: int, detail: int = 0) -> None:
        self._records[role].append((next(self._numbers[role]), at, code, detail))

    # -- one simulated round ----------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Simulate one verification of every row, and the draft's tree meanwhile."""
        draw, begin = self._random, self._time
        prefill = 0 if draw.random() > 0.03 else 60 * _MS
        missed = sum(draw.random() < 0.17 for _ in self._begun)
        wait = int(draw.uniform(6, 15) * _MS) if missed and draw.random() < 0.5 else 0
        verify = begin + wait + prefill
        end = verify + int(draw.uniform(38, 43) * _MS)
        if wait:
            self._note("target", begin, State.WAIT_FOR_DRAFT)
        if prefill:
            self._note("target", begin + wait, State.PREFILL, 192)
        self._note("target", verify, State.VERIFY, _ROWS * (_K + 1))
        self._note("target", end, State.SAMPLE)
        self._note("target", end + _MS, State.OTHER)
        self._grow(begin, end + 2 * _MS)
        for index, request in enumerate(list(self._begun)):
            self._outcome(request, end + 2 * _MS - 1000 * (_ROWS - index), index < missed)
        self._time = end + 2 * _MS

    def _grow(self, begin: int, end: int) -> None:
        at = begin + _MS // 2
        self._note("draft", at, State.PROMOTE, next(iter(self._begun)))
        at += _MS
        for depth in range(1, _K + 2):
            if at >= end - _MS:
                return
            self._note("draft", at, State.DEPTH, depth)
            at += int(self._random.uniform(5.2, 6.4) * _MS)
        if at < end - _MS:
            self._note("draft", at, State.WAIT_FOR_TARGET)

    def _outcome(self, request: int, at: int, missed: bool) -> None:
        draw, first = self._random, self._tokens[request] == 0
        accepted = 0
        while not first and accepted < (2 if missed else _K) and draw.random() < 0.78 - 0.04 * accepted:
            accepted += 1
        cache = "" if first else draw.choice(_MISSES) if missed else "hit"
        if cache:
            self._note("target", at, MARKS[cache], request)
        drafted = 0 if first else 2 if missed else _K
        self._rounds.append(RoundEvent(at, request, 1 + accepted, drafted, accepted, cache, first))
        self._tokens[request] += 1 + accepted
        if draw.random() < 0.012:
            self._end(request, at)

    def _end(self, request: int, at: int) -> None:
        tokens, first = self._tokens.pop(request), self._random.uniform(55, 170)
        lasted = max(1.0, (at - self._begun.pop(request)) / _MS)
        metrics = Metrics(
            mode="ssd",
            mean_acceptance_length=self._random.uniform(2.9, 3.8),
            hit_rate=self._random.uniform(0.74, 0.9),
            tokens_per_second=1e3 * tokens / lasted,
            time_to_first_token_ms=first,
            generation_time_ms=lasted,
        )
        self._ended.append(EndEvent(at, request, self._random.randint(20, 400), tokens, "stop", metrics))
        new = next(self._requests)
        self._begun[new], self._tokens[new] = at, 0


def _until(happened: deque[_Event], now: int) -> list[_Event]:
    """Remove and return the events that have happened by `now`."""
    return [happened.popleft() for _ in range(sum(event.at <= now for event in happened))]
