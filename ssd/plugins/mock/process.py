"""The mock's process: the target's socket and protocol around `ssd.plugins.mock.oracle`.

It obeys no grammar. A round takes SSD_MOCK_ROUND_MS milliseconds, by default none."""

from __future__ import annotations

import hashlib
import os
import time
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from ssd.errors import UsageError
from ssd.ipc import sockets
from ssd.ipc.messages import PEER_TO_TARGET, Abort, Emission, Hello, Load, Step, Submit
from ssd.ipc.process import IDLE_MS, Child
from ssd.ipc.public import Metrics
from ssd.ipc.trace_ring import State
from ssd.models.checkpoint import inspect, stop_token_ids
from ssd.plugins.mock.oracle import LOOKAHEAD, MockRound, ScriptedAnswer

ROUND_VARIABLE = "SSD_MOCK_ROUND_MS"
_LONGEST_ROUND_MS = 60_000.0


def main(child: Child) -> None:
    socket = sockets.router(child.context, child.address(sockets.ENGINE))
    ends = stop_token_ids(inspect(Path(child.config.target), weights=False))
    _Mock(child, socket, ends, round_seconds(os.environ.get(ROUND_VARIABLE, "0"))).serve()


def round_seconds(text: str) -> float:
    """Return SSD_MOCK_ROUND_MS in seconds. Raises UsageError for any other text."""
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = -1.0
    if not 0 <= milliseconds <= _LONGEST_ROUND_MS:
        raise UsageError(f"{ROUND_VARIABLE} is {text!r}; give milliseconds from 0 to {_LONGEST_ROUND_MS:.0f}")
    return milliseconds / 1e3


@dataclass(slots=True)
class _MockRequest:
    """One request, its position and the totals of its rounds. Times in seconds."""

    submit: Submit
    answer: ScriptedAnswer
    arrived: float
    started: float = 0.0
    first_token: float = 0.0
    position: int = 0
    rounds: int = 0
    accepted: int = 0
    hits: int = 0
    misses: int = 0
    histogram: list[int] = field(default_factory=lambda: [0] * (LOOKAHEAD + 1))

    def advance(self, round_s: float) -> Emission:
        """Compute the next round. An embedding is eight numbers that depend on the prompt."""
        params, position = self.submit.params, self.position
        if params.pooling is not None:
            digest = hashlib.blake2b(repr((params.pooling, self.submit.token_ids)).encode(), digest_size=8).digest()
            vector = array("f", [byte - 127.5 for byte in digest])
            return Emission(self.submit.request, [], finish_reason="stop", embedding=vector.tobytes())
        now = self.answer.round(position)
        if position == 0:
            self.first_token = time.perf_counter()
        else:
            self._count(now)
        self.position += len(now.token_ids)
        wanted, of_prompt = params.logprobs, params.prompt_logprobs if position == 0 else None
        return Emission(
            self.submit.request,
            now.token_ids,
            logprobs=None if wanted is None else self.answer.logprobs(position, len(now.token_ids), wanted),
            prompt_logprobs=None if of_prompt is None else self.answer.prompt_logprobs(of_prompt),
            finish_reason=now.reason,
            # A stop string ends a request in the frontend, which then uses the last figures it has.
            metrics=self._metrics(round_s) if now.reason is not None or params.stop else None,
            drafted=now.drafted,
            accepted=now.accepted,
            cache=now.cache,
            source="draft" if now.drafted else "",
        )

    def _count(self, now: MockRound) -> None:
        self.rounds += 1
        self.accepted += now.accepted
        self.histogram[now.accepted] += 1
        self.hits += now.cache == "hit"
        self.misses += now.cache == "token_not_covered"

    def _metrics(self, round_s: float) -> Metrics:
        generation = time.perf_counter() - self.first_token
        assert self.submit.params.speculation is not None, "admission fills it in"
        return Metrics(
            mode=self.submit.params.speculation.mode,
            rounds=self.rounds,
            drafted_tokens=self.rounds * LOOKAHEAD,
            accepted_tokens=self.accepted,
            hits=self.hits,
            misses=self.misses,
            mean_acceptance_length=1 + self.accepted / max(1, self.rounds),
            hit_rate=self.hits / max(1, self.hits + self.misses),
            tokens_per_second=(self.position - 1) / generation if generation > 0 else 0.0,
            acceptance_histogram=self.histogram,
            accepted_by_source={"draft": self.accepted} if self.accepted else {},
            queue_time_ms=(self.started - self.arrived) * 1e3,
            time_to_first_token_ms=(self.first_token - self.arrived) * 1e3,
            generation_time_ms=generation * 1e3,
            verify_ms=round_s * 1e3,
        )


class _Mock:
    def __init__(self, child: Child, socket: zmq.Socket[Any], ends: frozenset[int], round_s: float) -> None:
        self._child, self._socket, self._ends, self._round_s = child, socket, ends, round_s
        self._frontend = b""
        self._waiting: dict[int, _MockRequest] = {}
        self._running: dict[int, _MockRequest] = {}

    def serve(self) -> None:
        self._child.ready()
        trace = self._child.trace
        while True:
            self._child.beat()
            busy = bool(self._running or self._waiting)
            if not busy:
                trace.enter(State.IDLE)
                self._socket.poll(IDLE_MS)
            began = time.perf_counter()
            self._read()
            self._admit()
            if not self._running:
                if busy:  # an abort has ended the last one
                    sockets.send(self._socket, Step([], self._load(0)), self._child.epoch, self._frontend)
                continue
            trace.enter(State.VERIFY, len(self._running) * (LOOKAHEAD + 1))
            if self._round_s:
                time.sleep(max(0.0, began + self._round_s - time.perf_counter()))
            trace.enter(State.SAMPLE)
            step = self._step()
            trace.enter(State.OTHER)
            for emission in step.emissions:
                trace.looked_up(emission.request, emission.cache)
            if not sockets.deliver(self._socket, step, self._child.epoch, self._frontend):
                self._abort_all()

    def _read(self) -> None:
        for peer, _, message in sockets.drained(self._socket, PEER_TO_TARGET):
            if isinstance(message, Hello):
                self._child.answer_hello(self._socket, peer, message)
                if message.role == "frontend":
                    self._abort_all()
                    self._frontend = peer
            elif isinstance(message, Submit):
                config = self._child.config
                answer = ScriptedAnswer(
                    message.token_ids, message.params, config.vocab_size, config.max_model_len, self._ends
                )
                self._waiting[message.request] = _MockRequest(message, answer, time.perf_counter())
            elif isinstance(message, Abort):
                self._waiting.pop(message.request, None)
                self._running.pop(message.request, None)

    def _abort_all(self) -> None:
        self._waiting.clear()
        self._running.clear()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._child.config.max_num_seqs:
            number = next(iter(self._waiting))
            request = self._running[number] = self._waiting.pop(number)
            request.started = time.perf_counter()

    def _step(self) -> Step:
        emissions = [request.advance(self._round_s) for request in self._running.values()]
        for emission in emissions:
            if emission.finish_reason is not None:
                del self._running[emission.request]
        return Step(emissions, self._load(sum(emission.drafted + 1 for emission in emissions)))

    def _load(self, batched_tokens: int) -> Load:
        running = len(self._running)
        return Load(
            running=running,
            waiting=len(self._waiting),
            kv_cache_usage=running / self._child.config.max_num_seqs,
            batched_tokens=batched_tokens,
            verify_seconds=self._round_s if batched_tokens else 0.0,
        )
