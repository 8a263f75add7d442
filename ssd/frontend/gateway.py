"""Clients over ZeroMQ: the public protocol of `ssd.ipc.messages` on one or several ROUTER sockets."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import zmq

from ssd.errors import RequestError
from ssd.frontend.desk import Desk, Request
from ssd.frontend.inlet import Inlet
from ssd.ipc import sockets
from ssd.ipc.messages import CLIENT_TO_FRONTEND, Cancel, Describe, Description, Failed, Generate, Message
from ssd.params import SamplingParams

_TURN = 64  # messages: tokens that have arrived do not wait behind a flood of requests
_AGAIN_S = 0.02


@dataclass(eq=False)
class _Client:
    """One peer; its open requests by its own names for them."""

    identity: bytes
    requests: dict[int, Request] = field(default_factory=dict)


class Gateway:
    """One ROUTER socket whose peers are clients."""

    def __init__(self, desk: Desk, socket: zmq.Socket[bytes], epoch: int) -> None:
        self._desk, self._socket, self._epoch = desk, socket, epoch
        self._clients: dict[bytes, _Client] = {}
        # Requests with something to deliver, and whose client it is for.
        self._news: dict[Request, _Client] = {}
        self._timer: asyncio.Handle | None = None
        self._slow = desk.config.server.limits.slow_reader_seconds
        self._inlet = Inlet(socket, CLIENT_TO_FRONTEND, self._answer, _TURN, desk.dropped_frame)

    @property
    def busy(self) -> bool:
        """Whether a client has something to come, or to say."""
        return bool(self._news) or self._inlet.waiting

    def close(self) -> None:
        self._inlet.close()

    # -- what clients say -------------------------------------------------------------------------------------------

    def _answer(self, identity: bytes, message: Generate | Cancel | Describe) -> None:
        if isinstance(message, Describe):
            self._send(identity, self._description())
            return
        client = self._clients.get(identity) or _Client(identity)
        if isinstance(message, Generate):
            try:
                self._open(client, message)
            except RequestError as error:
                self._refuse(client, Failed(message.id, error.code, str(error)[:512]))
        elif message.id in client.requests:
            self._desk.abort(client.requests[message.id])

    def _open(self, client: _Client, message: Generate) -> None:
        if message.id in client.requests:
            raise RequestError("invalid_request", f"request {message.id} is already open")
        request = self._desk.open(message, lambda request: self._wake(request, client))
        self._clients[client.identity] = client
        client.requests[message.id] = request

    def _refuse(self, client: _Client, failed: Failed) -> None:
        """The end of a request that never was one. Who floods and does not read is not even told."""
        if len(self._news) < 2 * self._desk.config.server.limits.max_open_requests:
            refused = Request(failed.id, SamplingParams(), lambda request: None)
            refused.ended = True
            refused.outbox.end(failed)
            self._wake(refused, client)

    def _description(self) -> Description:
        config = self._desk.config
        return Description(
            model=config.target_name,
            names=list(config.server.names),
            draft=config.draft_name if config.draft is not None else "",
            speculation=config.speculation,
            vocab_size=config.vocab_size,
            max_model_len=config.max_model_len,
            chat=self._desk.tokenizer.has_chat,
        )

    # -- what they are told -----------------------------------------------------------------------------------------

    def _wake(self, request: Request, client: _Client) -> None:
        """Deliver at the end of this turn, when the tokens of the whole step are there."""
        self._news[request] = client
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_soon(self._deliver)

    def _deliver(self) -> None:
        """Send what clients are ready to take; the rest is tried again until they are too slow."""
        self._timer = None
        full: set[_Client] = set()
        for request, client in list(self._news.items()):
            if client not in full and not self._hand_over(request, client):
                full.add(client)
            if request in self._news and request.outbox.seconds > self._slow:
                self._give_up(request, client)
        self._inlet.look()
        if self._news and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_AGAIN_S, self._deliver)

    def _hand_over(self, request: Request, client: _Client) -> bool:
        """Send all there is of one request; False if its client takes no more."""
        while (message := request.outbox.head) is not None:
            sent = self._send(client.identity, message)
            if sent == "gone":
                self._lost(client)
                return True
            if sent == "full":
                return False
            if request.outbox.sent():
                self._forget(request, client)
                return True
        self._news.pop(request, None)
        return True

    def _give_up(self, request: Request, client: _Client) -> None:
        """The client has not read for long: its request ends, and then even the news of that."""
        if request.ended:
            self._forget(request, client)
        else:
            self._desk.drop(request)

    def _forget(self, request: Request, client: _Client) -> None:
        self._news.pop(request, None)
        if client.requests.get(request.outbox.name) is request:
            del client.requests[request.outbox.name]
        if not client.requests:
            self._clients.pop(client.identity, None)

    def _lost(self, client: _Client) -> None:
        for request in list(client.requests.values()):
            self._desk.cancel(request)
            self._forget(request, client)

    def _send(self, identity: bytes, message: Message) -> sockets.Sent:
        return sockets.offer(self._socket, message, self._epoch, to=identity)
