"""Clients over ZeroMQ: the public protocol of `ssd.ipc.messages` on one or several ROUTER sockets."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import zmq

from ssd.errors import RequestError
from ssd.frontend.accepted import Guard
from ssd.frontend.budget import prompt_bytes
from ssd.frontend.desk import Desk, Request
from ssd.frontend.inlet import Inlet
from ssd.ipc import sockets
from ssd.ipc.messages import CLIENT_TO_FRONTEND, Cancel, Chunk, Describe, Description, Failed, Generate, Message, pack
from ssd.params import SamplingParams

_TURN = 64  # messages: tokens that have arrived do not wait behind a flood of requests
_AGAIN_S = 0.02
_SILENCE_S = 1.0


@dataclass(eq=False)
class _Client:
    """One peer, for as long as something of it is open or on its way: its open requests by its own names for them, and
    the requests with something to deliver, refused ones among them. `told`: it has been sent something lately."""

    identity: bytes
    requests: dict[int, Request] = field(default_factory=dict)
    news: dict[Request, None] = field(default_factory=dict)
    told: bool = True


class Gateway:
    """One ROUTER socket, not bound yet, whose peers are clients. `guard` looks after their connections."""

    def __init__(self, desk: Desk, socket: zmq.Socket[bytes], epoch: int, guard: Guard) -> None:
        self._desk, self._socket, self._epoch = desk, socket, epoch
        self._clients: dict[bytes, _Client] = {}
        # Those with news since the last delivery, and those who could not take theirs. These are tried again at their
        # own pace, and keep nobody else waiting.
        self._fresh: dict[_Client, None] = {}
        self._stuck: dict[_Client, None] = {}
        self._slow = desk.config.server.limits.slow_reader_seconds
        self._accepted = guard.watch(socket)
        self._inlet = Inlet(socket, CLIENT_TO_FRONTEND, self._answer, _TURN, desk.dropped_frame, self._accepted.took)
        self._loop = asyncio.get_running_loop()
        self._next_probe = self._loop.call_later(_SILENCE_S, self._probe)

    @property
    def busy(self) -> bool:
        """Whether a client has something to come, or to say. Refusals that are not read hold up nothing."""
        return bool(self._fresh) or any(client.requests for client in self._stuck) or self._inlet.waiting

    def close(self) -> None:
        self._next_probe.cancel()
        self._inlet.close()

    # -- what clients say -------------------------------------------------------------------------------------------

    def _answer(self, identity: bytes, message: Generate | Cancel | Describe) -> None:
        if isinstance(message, Describe):
            self._send(identity, self._description())
            return
        client = self._clients.get(identity)
        if isinstance(message, Generate):
            client = client or self._clients.setdefault(identity, _Client(identity))
            try:
                self._open(client, message)
            except RequestError as error:
                self._refuse(client, Failed(message.id, error.code, str(error)[:512]))
        elif client is not None and message.id in client.requests:
            self._desk.abort(client.requests[message.id])

    def _open(self, client: _Client, message: Generate) -> None:
        if message.id in client.requests:
            raise RequestError("invalid_request", f"request {message.id} is already open")
        size = prompt_bytes(message)
        self._desk.budget.take(client.identity, size)
        try:
            request = self._desk.open(message, lambda request: self._wake(request, client))
        except RequestError:
            self._desk.budget.give_back(client.identity, size)
            raise
        self._desk.budget.give_back_with(request, client.identity, size)
        client.requests[message.id] = request

    def _refuse(self, client: _Client, failed: Failed) -> None:
        """The end of a request that never was one. Who floods and does not read is not even told: as many refusals wait
        for a client as its queue in the transport takes, which is full by then."""
        if len(client.news) < len(client.requests) + sockets.HIGH_WATER_MARK:
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
            chat=self._desk.vocabulary.has_chat,
        )

    # -- what they are told -----------------------------------------------------------------------------------------

    def _wake(self, request: Request, client: _Client) -> None:
        """Deliver at the end of this turn, when the tokens of the whole step are there."""
        client.news[request] = None
        if client not in self._stuck:
            if not self._fresh:
                self._loop.call_soon(self._deliver)
            self._fresh[client] = None

    def _deliver(self) -> None:
        """Send what has come since the last time."""
        fresh, self._fresh = self._fresh, {}
        for client in fresh:
            if not self._serve(client):
                if not self._stuck:
                    self._loop.call_later(_AGAIN_S, self._try_again)
                self._stuck[client] = None
        self._inlet.look()

    def _try_again(self) -> None:
        """Send those what they could not take before, until they are too slow."""
        for client in list(self._stuck):
            if self._serve(client):
                del self._stuck[client]
                continue
            for request in list(client.news):
                if request.outbox.seconds > self._slow:
                    self._give_up(request, client)
        self._inlet.look()
        if self._stuck:
            self._loop.call_later(_AGAIN_S, self._try_again)

    def _serve(self, client: _Client) -> bool:
        """Send all there is for one client; False if it takes no more."""
        for request in list(client.news):
            while (message := request.outbox.head) is not None:
                sent = self._send(client.identity, message)
                if sent == "gone":
                    self._lost(client)
                    return True
                if sent == "full":
                    return False
                client.told = True
                if request.outbox.sent():
                    self._forget(request, client)
                    break
            client.news.pop(request, None)
        return True

    def _probe(self) -> None:
        """Only sending tells that a peer has gone. So those who wait for their first tokens, and have been told nothing
        for a while, are sent a chunk without any."""
        for client in list(self._clients.values()):
            if client.requests and not client.told:
                nothing = Chunk(next(iter(client.requests)), "", [])
                if self._send(client.identity, nothing) == "gone":
                    self._lost(client)
            client.told = False
        self._inlet.look()
        self._next_probe = self._loop.call_later(_SILENCE_S, self._probe)

    def _give_up(self, request: Request, client: _Client) -> None:
        """The client has not read for long: its request ends, and then even the news of that."""
        if request.ended:
            self._forget(request, client)
        else:
            self._desk.drop(request)

    def _forget(self, request: Request, client: _Client) -> None:
        client.news.pop(request, None)
        if client.requests.get(request.outbox.name) is request:
            del client.requests[request.outbox.name]
        if not client.requests and not client.news:
            del self._clients[client.identity]

    def _lost(self, client: _Client) -> None:
        """The peer has gone, and with it all that was open or on its way."""
        del self._clients[client.identity]
        client.news.clear()
        for request in client.requests.values():
            self._desk.cancel(request)
        client.requests.clear()

    def _send(self, identity: bytes, message: Message) -> sockets.Sent:
        if self._accepted.stuck(identity):
            return "full"
        header, body = pack(message, self._epoch)
        sent = sockets.offer_frames(self._socket, [identity, header, body])
        if sent == "sent":
            self._accepted.sent(identity, len(body))
        return sent
