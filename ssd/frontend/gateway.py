"""The frontend's loop: clients on one side, the target on the other, text in between."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq

from ssd.errors import RequestError, SsdError
from ssd.frontend.admission import admit
from ssd.frontend.detokenization import Detokenizer
from ssd.frontend.tokenization import Tokenizer
from ssd.ipc import sockets
from ssd.ipc.messages import (
    CLIENT_TO_FRONTEND,
    SUPERVISOR_TO_CHILD,
    TARGET_TO_FRONTEND,
    Abort,
    BadFrame,
    Cancel,
    Chunk,
    Describe,
    Description,
    Done,
    Emission,
    Failed,
    FinishReason,
    Generate,
    Hello,
    Message,
    Metrics,
    Refused,
    Step,
    Submit,
    Usage,
)
from ssd.ipc.process import Child

log = logging.getLogger("ssd.frontend")

MAX_OPEN = 4096
_CLIENT_MESSAGES_PER_TURN = 64  # tokens that have arrived do not wait behind a flood of requests
_SLOW_READER_S = 30.0


@dataclass
class _Request:
    """One open request; `id` is the client's name for it, `number` the engine's."""

    client: bytes
    id: int
    number: int
    prompt: list[int]
    detokenizer: Detokenizer
    metrics: Metrics
    completion_tokens: int = field(default=0)


class Gateway:
    """Admission, tokenisation and delivery of all requests. `connect`, then `serve`; one thread."""

    def __init__(self, child: Child) -> None:
        self.bad_frames = 0
        self._supervisor = child.supervisor
        self._config = child.config
        self._epoch = child.epoch
        self._tokenizer = Tokenizer(Path(child.config.target))
        self._client_address = child.address(sockets.CLIENT)
        self._engine = sockets.dealer(child.context, child.address(sockets.ENGINE), b"frontend-%d" % child.epoch)
        # The clients' side has its own context: ending it waits for the last results without ending the other sockets.
        self._client_context: zmq.Context[Any] = zmq.Context()
        self._open: dict[int, _Request] = {}
        self._numbers: dict[tuple[bytes, int], int] = {}
        self._count = 0
        self._draining = False
        # Requests whose end a full queue refused, until when to try again.
        self._owed: dict[tuple[bytes, int], float] = {}
        self._next_retry = 0.0

    def connect(self) -> None:
        """Shake hands with the target, which may still be loading, then open for clients. Raises SsdError if refused.

        Clients are let in last, so that whoever finds a connection finds an engine that answers.
        """
        hello = Hello("frontend", self._config.vocab_size, self._config.digest)
        while not sockets.send(self._engine, hello, self._epoch):
            self._engine.poll(1000, zmq.POLLOUT)
        answer = None
        while answer is None:
            self._engine.poll()
            answer = next((message for _, message in self._messages(self._engine, TARGET_TO_FRONTEND, 1)), None)
        if isinstance(answer, Refused):
            raise SsdError(answer.message)
        self._clients = sockets.router(self._client_context, self._client_address, sockets.PUBLIC_BYTES)

    def serve(self) -> None:
        """Answer until the supervisor asks to drain and every request has ended and left this process."""
        poller = zmq.Poller()
        for socket in (self._clients, self._engine, self._supervisor):
            poller.register(socket, zmq.POLLIN)
        while not self._draining or self._open or self._clients.poll(0):
            poller.poll(1000)
            for _ in self._messages(self._supervisor, SUPERVISOR_TO_CHILD, 1):
                self._draining = True
            for _, message in self._messages(self._engine, TARGET_TO_FRONTEND, sockets.HIGH_WATER_MARK):
                if isinstance(message, Step):
                    for emission in message.emissions:
                        self._emit(emission)
            for client, message in self._messages(self._clients, CLIENT_TO_FRONTEND, _CLIENT_MESSAGES_PER_TURN):
                self._answer(client, message)
            self._retry_owed()
        self._client_context.destroy(linger=1000)

    def _messages(
        self, socket: zmq.Socket[bytes], decoder: msgspec.msgpack.Decoder[Any], limit: int
    ) -> Iterator[tuple[bytes, Any]]:
        """(peer, message) of at most `limit` frames that have arrived; bad ones are counted and dropped."""
        for _ in range(limit):
            try:
                received = sockets.receive(socket, decoder)
            except BadFrame as error:
                self.bad_frames += 1
                log.info("dropped a frame: %s", error)
                continue
            if received is None:
                return
            yield received[0], received[2]

    # -- clients ----------------------------------------------------------------------------------------------------

    def _answer(self, client: bytes, message: Generate | Cancel | Describe) -> None:
        if isinstance(message, Generate):
            try:
                self._submit(client, message)
            except RequestError as error:
                self._send(client, Failed(message.id, error.code, str(error)[:512]))
        elif isinstance(message, Cancel):
            number = self._numbers.get((client, message.id))
            if number is not None:
                self._abort(number)
                self._finish(self._open[number], "abort")
        else:
            self._send(client, self._description())

    def _submit(self, client: bytes, message: Generate) -> None:
        if self._draining:
            raise RequestError("shutting_down", "the engine is shutting down")
        if (client, message.id) in self._numbers:
            raise RequestError("invalid_request", f"request {message.id} is already open")
        if len(self._open) >= MAX_OPEN:
            raise RequestError("overloaded", f"{MAX_OPEN} requests are open already")
        token_ids, params = admit(message, self._config, self._tokenizer)
        number = self._epoch << 32 | self._count
        if not sockets.send(self._engine, Submit(number, token_ids, params), self._epoch):
            raise RequestError("overloaded", "the engine takes no more requests at the moment")
        self._count += 1
        assert params.speculation is not None
        detokenizer = Detokenizer(self._tokenizer, params.stop)
        metrics = Metrics(mode=params.speculation.mode)
        self._open[number] = _Request(client, message.id, number, token_ids, detokenizer, metrics)
        self._numbers[client, message.id] = number

    def _description(self) -> Description:
        config = self._config
        return Description(
            model=config.target_name,
            names=[config.target_name],
            draft=config.draft_name if config.draft is not None else "",
            speculation=config.speculation,
            vocab_size=config.vocab_size,
            max_model_len=config.max_model_len,
            chat=self._tokenizer.has_chat,
        )

    # -- the target -------------------------------------------------------------------------------------------------

    def _emit(self, emission: Emission) -> None:
        """Pass on what one step gave one request."""
        request = self._open.get(emission.request)
        if request is None:
            if emission.finish_reason is None:  # a step from before the abort, or a full queue has lost the abort
                self._abort(emission.request)
            return
        request.metrics = emission.metrics or request.metrics
        text, used = request.detokenizer.feed(emission.token_ids)
        request.completion_tokens += used
        if used:
            logprobs = None if emission.logprobs is None else emission.logprobs[:used]
            if not self._send(request.client, Chunk(request.id, text, emission.token_ids[:used], logprobs)):
                return
        if emission.finish_reason == "error":
            self._end(request, Failed(request.id, "engine_error", emission.error or "the engine failed"))
        elif emission.finish_reason is not None:
            self._finish(request, emission.finish_reason)
        elif request.detokenizer.stopped:
            self._abort(request.number)
            self._finish(request, "stop")

    def _finish(self, request: _Request, reason: FinishReason) -> None:
        text = request.detokenizer.finish()
        usage = Usage(len(request.prompt), request.completion_tokens)
        reason = "stop" if request.detokenizer.stopped else reason
        self._end(request, Done(request.id, reason, text, request.prompt, usage, request.metrics))

    def _end(self, request: _Request, message: Done | Failed) -> None:
        if self._send(request.client, message):
            self._forget(request)

    def _forget(self, request: _Request) -> None:
        del self._open[request.number]
        del self._numbers[request.client, request.id]

    def _abort(self, number: int) -> None:
        sockets.send(self._engine, Abort(number), self._epoch)

    # -- delivery ---------------------------------------------------------------------------------------------------

    def _send(self, client: bytes, message: Message) -> bool:
        """False: the client is gone or does not read; its requests have ended."""
        if sockets.send(self._clients, message, self._epoch, to=client):
            return True
        for request in [request for request in self._open.values() if request.client == client]:
            self._abort(request.number)
            self._forget(request)
            self._owed[client, request.id] = time.monotonic() + _SLOW_READER_S
        return False

    def _retry_owed(self) -> None:
        """Once a second, tell clients that read again how their requests ended; those that are gone expire."""
        now = time.monotonic()
        if now < self._next_retry:
            return
        self._next_retry = now + 1.0
        for (client, name), deadline in list(self._owed.items()):
            failed = Failed(name, "slow_reader", "the client did not read its tokens, so the request was aborted")
            if sockets.send(self._clients, failed, self._epoch, to=client) or now > deadline:
                del self._owed[client, name]
