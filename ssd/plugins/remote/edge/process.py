"""The relay: takes the target's place in `ssd edge`, and lets an engine elsewhere do the work.

To the engine it is a client. Requests of a lost connection are sent again: the same seed gives the same tokens, so
tokens that the client already has are left out."""

from __future__ import annotations

import itertools
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from msgspec.structs import replace

from ssd.config.params import SamplingParams, Speculation
from ssd.errors import EngineDeadError, SsdError, UsageError
from ssd.ipc import sockets
from ssd.ipc.connection import Connection
from ssd.ipc.curve import client_keys
from ssd.ipc.messages import PEER_TO_TARGET, Abort, Emission, Hello, Load, Step, Submit
from ssd.ipc.process import IDLE_MS, Child
from ssd.ipc.public import Cancel, Chunk, Describe, Description, Done, Failed, Generate
from ssd.ipc.trace_ring import State
from ssd.models.checkpoint import inspect, stop_token_ids
from ssd.plugins.remote.reconnection import Reconnection

log = logging.getLogger("ssd.edge")

_ANSWER_S = 10.0  # to connect, shake hands and describe
# Refusals after which another try may succeed.
_AGAIN = {"overloaded", "loading", "restarting", "engine_restarted", "shutting_down"}


def main(child: Child) -> None:
    relay = EdgeRelay(child)
    while True:
        relay.turn()


class _Differs(Exception):
    """Upstream answers a request differently than before it was lost."""


@dataclass
class EdgeRequest:
    """A request of the frontend. `name`: its id upstream, or None.

    Its client has the tokens `given`. `seen`: tokens since it was last sent; the first are compared with `given`.
    `last`: a chunk that waits for the next message, as its last token may end the text."""

    submit: Submit
    ends: frozenset[int]
    name: int | None = None
    not_before: float = 0.0
    given: list[int] = field(default_factory=list)
    seen: int = 0
    last: Chunk | None = None

    def restart(self) -> None:
        self.name, self.seen, self.last = None, 0, None

    def fresh(self) -> Emission | None:
        """Take the waiting chunk; return the client's new part. Raises _Differs if the rest differs."""
        chunk, self.last = self.last, None
        if chunk is None:
            return None
        ids, begin = chunk.token_ids, self.seen
        again = max(0, min(len(ids), len(self.given) - begin))
        self.seen += len(ids)
        if ids[:again] != self.given[begin : begin + again]:
            raise _Differs
        if again == len(ids):
            return None
        self.given += ids[again:]
        logprobs = None if chunk.logprobs is None else chunk.logprobs[again:]
        prompt_logprobs = None if begin else chunk.prompt_logprobs
        return Emission(self.submit.request, ids[again:], logprobs, prompt_logprobs=prompt_logprobs)


class EdgeRelay:
    """Owns the target's socket and the connection upstream. Single-threaded."""

    def __init__(self, child: Child) -> None:
        config, upstream = child.config, child.config.upstream
        assert upstream is not None
        self._child, self._config, self._address = child, config, upstream.connect
        self._keys = None if upstream.keys is None else client_keys(Path(upstream.keys))
        self._socket = sockets.router(child.context, child.address(sockets.ENGINE))
        self._stops = stop_token_ids(inspect(Path(config.target), weights=False))
        self._frontend = b""
        self._asked: dict[int, EdgeRequest] = {}
        self._by_name: dict[int, EdgeRequest] = {}
        self._names = itertools.count(1)
        self._emissions: list[Emission] = []
        self._connection: Connection | None = None
        self._described = self._ready = False
        self._connect_at = self._answer_by = 0.0
        self._reconnection = Reconnection(log.warning)

    def turn(self) -> None:
        self._child.beat()
        self._child.trace.enter(State.VERIFY if self._by_name else State.IDLE)
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        if self._connection is not None:
            for descriptor in self._connection.descriptors():
                poller.register(descriptor, zmq.POLLIN)
        poller.poll(IDLE_MS)
        self._child.trace.enter(State.OTHER)
        self._read()
        self._connect()
        self._hear()
        self._send()
        if self._emissions:
            running = len(self._by_name)
            load = Load(running=running, waiting=len(self._asked) - running, draft_state="up")
            step, self._emissions = Step(self._emissions, load), []
            if not sockets.deliver(self._socket, step, self._child.epoch, self._frontend):
                self._forget_all()

    # -- the frontend -----------------------------------------------------------------------------------------------

    def _read(self) -> None:
        for peer, _, message in sockets.drained(self._socket, PEER_TO_TARGET):
            if isinstance(message, Hello):
                self._child.answer_hello(self._socket, peer, message)
                if message.role == "frontend":
                    self._forget_all()
                    self._frontend = peer
            elif isinstance(message, Submit):
                ends = frozenset() if message.params.ignore_eos else self._stops
                self._asked[message.request] = EdgeRequest(message, ends | frozenset(message.params.stop_token_ids))
            elif isinstance(message, Abort) and (asked := self._asked.pop(message.request, None)) is not None:
                self._cancel(asked)

    def _forget_all(self) -> None:
        for asked in self._asked.values():
            self._cancel(asked)
        self._asked.clear()

    def _cancel(self, asked: EdgeRequest) -> None:
        if asked.name is not None:
            del self._by_name[asked.name]
            if self._connection is not None and not self._connection.offer(Cancel(asked.name)):
                self._lost("it takes no more messages")

    # -- upstream ---------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Begin a connection when it is time; give up one that does not answer."""
        now = time.monotonic()
        if self._connection is None and now >= self._connect_at:
            self._connection = Connection(self._address, self._keys)
            self._described, self._answer_by = False, 0.0
            self._connect_by = now + _ANSWER_S
        elif self._connection is not None and not self._described:
            if self._connection.refused:
                raise UsageError(self._connection.trouble)
            if not self._answer_by and self._connection.offer(Describe()):
                self._answer_by = now + _ANSWER_S
            if now > (self._answer_by or self._connect_by):
                self._lost(f"nobody answers{self._connection.trouble}")

    def _lost(self, why: str) -> None:
        assert self._connection is not None
        self._connection.close()
        self._connection = None
        for asked in self._by_name.values():
            asked.restart()
        self._by_name.clear()
        self._connect_at = time.monotonic() + self._reconnection.lost(f"the engine at {self._address} was lost: {why}")

    def _hear(self) -> None:
        while self._connection is not None:
            answer = self._connection.take()
            if answer is None:
                self._connection.acknowledge()
                return
            if isinstance(answer, EngineDeadError):
                self._lost(str(answer))
            elif isinstance(answer, Description):
                self._welcome(answer)
            elif (asked := self._by_name.get(answer.id)) is not None:
                try:
                    self._answered(asked, answer)
                except _Differs:
                    self._fail(asked, "the engine was lost, and answers differently now")

    def _welcome(self, found: Description) -> None:
        """Check that upstream serves the model that this process was started for."""
        config = self._config
        if (found.model, found.vocab_size) != (config.target_name, config.vocab_size):
            raise SsdError(
                f"{self._address} serves {found.model} with {found.vocab_size} tokens now, it was {config.target_name} "
                f"with {config.vocab_size}: start again"
            )
        self._described = True
        self._reconnection.served()
        if not self._ready:
            self._ready = True
            self._child.ready()

    def _send(self) -> None:
        if self._connection is None or not self._described:
            return
        now = time.monotonic()
        for asked in self._asked.values():
            if asked.name is None and now >= asked.not_before:
                name = next(self._names)
                submit, params = asked.submit, _params(asked.submit, self._config.speculation)
                if not self._connection.offer(Generate(name, token_ids=submit.token_ids, params=params)):
                    return
                asked.name, asked.seen = name, 0
                self._by_name[name] = asked

    def _answered(self, asked: EdgeRequest, answer: Chunk | Done | Failed) -> None:
        if isinstance(answer, Chunk):
            if answer.token_ids:
                self._pass_on(asked)
                asked.last = answer
                if answer.token_ids[-1] not in asked.ends:
                    self._pass_on(asked)
        elif isinstance(answer, Failed):
            if answer.code in _AGAIN:
                self._ask_again(asked, answer.code)
            else:
                self._fail(asked, answer.message)
        elif answer.finish_reason == "abort":  # upstream shuts down
            self._ask_again(asked, "shutting_down")
        else:
            last = asked.fresh() or Emission(asked.submit.request, [])
            if asked.seen < len(asked.given):
                raise _Differs
            end = {"finish_reason": answer.finish_reason, "metrics": answer.metrics, "embedding": answer.embedding}
            self._end(asked, replace(last, **end))

    def _ask_again(self, asked: EdgeRequest, code: str) -> None:
        assert asked.name is not None
        del self._by_name[asked.name]
        asked.restart()
        asked.not_before = time.monotonic() + self._reconnection.pause_s
        log.info("request %d is sent again: %s", asked.submit.request, code)

    def _pass_on(self, asked: EdgeRequest) -> None:
        if (emission := asked.fresh()) is not None:
            self._emissions.append(emission)

    def _fail(self, asked: EdgeRequest, why: str) -> None:
        self._end(asked, Emission(asked.submit.request, [], finish_reason="error", error=why))

    def _end(self, asked: EdgeRequest, emission: Emission) -> None:
        if self._asked.pop(asked.submit.request, None) is None:
            return
        self._emissions.append(emission)
        if emission.finish_reason == "error" and asked.name is not None and self._connection is not None:
            self._connection.offer(Cancel(asked.name))  # it may have ended upstream as well
        self._by_name.pop(asked.name or 0, None)


def _params(submit: Submit, default: Speculation) -> SamplingParams:
    speculation = None if submit.params.speculation == default else submit.params.speculation
    return replace(submit.params, stop=[], truncate_prompt_tokens=None, speculation=speculation)
