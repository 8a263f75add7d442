"""ZeroMQ clients: the public protocol (`ssd.ipc.public`) on a ROUTER socket."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from ssd.config.params import SamplingParams
from ssd.errors import RequestError
from ssd.frontend.connection_limits import ConnectionGuard
from ssd.frontend.memory_budget import prompt_bytes
from ssd.frontend.request import Request
from ssd.frontend.request_manager import RequestManager
from ssd.frontend.socket_reader import SocketReader
from ssd.ipc import curve, sockets
from ssd.ipc.public import CLIENT_TO_FRONTEND, Cancel, Chunk, Describe, Description, Failed, Generate, Message, pack

_TURN = 64  # messages, so that tokens do not wait behind a flood of requests
_AGAIN_S = 0.02
_SILENCE_S = 1.0


@dataclass(eq=False)
class _GatewayClient:
    """One peer that has open requests or undelivered output.

    `requests` are its open requests by the peer's own ids, `news` requests with output to deliver, refused ones too.
    `told`: something was sent to it lately. `owner` is its key or that key's name, or ""."""

    identity: bytes
    owner: str = ""
    requests: dict[int, Request] = field(default_factory=dict)
    news: dict[Request, None] = field(default_factory=dict)
    told: bool = True


class Gateway:
    """Serves the peers of one ROUTER, which must not be bound yet. `guard` limits the memory of their connections."""

    def __init__(self, manager: RequestManager, socket: zmq.Socket[bytes], epoch: int, guard: ConnectionGuard) -> None:
        self._manager, self._socket, self._epoch = manager, socket, epoch
        self._clients: dict[bytes, _GatewayClient] = {}
        # Clients with news since the last delivery, and clients whose queue was full. The latter are tried again from
        # a timer, so that no other client waits for them.
        self._fresh: dict[_GatewayClient, None] = {}
        self._stuck: dict[_GatewayClient, None] = {}
        self._slow = manager.config.server.limits.slow_reader_seconds
        self._connections = guard.watch(socket)
        self._reader = SocketReader(
            socket, CLIENT_TO_FRONTEND, self._answer, _TURN, manager.dropped_frame, self._connections.took
        )
        self._loop = asyncio.get_running_loop()
        self._next_probe = self._loop.call_later(_SILENCE_S, self._probe)

    @property
    def busy(self) -> bool:
        """Return True if output is undelivered or a message is unread. Unread refusals do not count."""
        return bool(self._fresh) or any(client.requests for client in self._stuck) or self._reader.waiting

    def close(self) -> None:
        self._next_probe.cancel()
        self._reader.close()

    # -- requests ---------------------------------------------------------------------------------------------------

    def _answer(self, identity: bytes, message: Generate | Cancel | Describe) -> None:
        if isinstance(message, Describe):
            self._send(identity, self._description())
            return
        client = self._clients.get(identity)
        if isinstance(message, Generate):
            client = client or self._clients.setdefault(identity, _GatewayClient(identity, self._owner()))
            try:
                self._open(client, message)
            except RequestError as error:
                self._refuse(client, Failed(message.id, error.code, str(error)[:512]))
        elif client is not None and message.id in client.requests:
            self._manager.abort(client.requests[message.id])

    def _owner(self) -> str:
        # With a receiver, the name: a draft on another machine may have a key of the same name.
        config, key = self._manager.config, curve.user_of(self._reader.frame)
        if config.link is None or config.server.zmq_keys is None:
            return key
        return (key and curve.name_of(Path(config.server.zmq_keys), key)) or ""

    def _open(self, client: _GatewayClient, message: Generate) -> None:
        if message.id in client.requests:
            raise RequestError("invalid_request", f"request {message.id} is already open")
        size = prompt_bytes(message)
        self._manager.budget.take(client.identity, size)
        try:
            request = self._manager.open(message, lambda request: self._wake(request, client), owner=client.owner)
        except RequestError:
            self._manager.budget.give_back(client.identity, size)
            raise
        self._manager.budget.give_back_with(request, client.identity, size)
        client.requests[message.id] = request

    def _refuse(self, client: _GatewayClient, failed: Failed) -> None:
        # A client that does not read gets at most as many refusals as its queue takes.
        if len(client.news) < len(client.requests) + sockets.HIGH_WATER_MARK:
            refused = Request(failed.id, SamplingParams(), lambda request: None)
            refused.ended = True
            refused.output.end(failed)
            self._wake(refused, client)

    def _description(self) -> Description:
        config = self._manager.config
        return Description(
            model=config.target_name,
            names=list(config.server.names),
            draft=config.draft_name if config.has_draft else "",
            speculation=config.speculation,
            vocab_size=config.vocab_size,
            max_model_len=config.max_model_len,
            chat=self._manager.texts.vocabulary.has_chat,
            sampling=config.sampling,
        )

    # -- answers ----------------------------------------------------------------------------------------------------

    def _wake(self, request: Request, client: _GatewayClient) -> None:
        # At the end of this turn, when the tokens of the whole step are there.
        client.news[request] = None
        if client not in self._stuck:
            if not self._fresh:
                self._loop.call_soon(self._deliver)
            self._fresh[client] = None

    def _deliver(self) -> None:
        fresh, self._fresh = self._fresh, {}
        for client in fresh:
            if not self._serve(client):
                if not self._stuck:
                    self._loop.call_later(_AGAIN_S, self._try_again)
                self._stuck[client] = None
        self._reader.look()

    def _try_again(self) -> None:
        """Send to clients whose queue was full, and give up requests whose client reads too slowly."""
        for client in list(self._stuck):
            if self._serve(client):
                del self._stuck[client]
                continue
            for request in list(client.news):
                if request.output.seconds <= self._slow:
                    continue
                if request.ended:
                    self._forget(request, client)  # with its unread output
                else:
                    self._manager.drop(request)
        self._reader.look()
        if self._stuck:
            self._loop.call_later(_AGAIN_S, self._try_again)

    def _serve(self, client: _GatewayClient) -> bool:
        """Send all output of one client; return False if its queue is full."""
        for request in list(client.news):
            while (message := request.output.head) is not None:
                sent = self._send(client.identity, message)
                if sent == "gone":
                    self._lost(client)
                    return True
                if sent == "full":
                    return False
                client.told = True
                if request.output.sent():
                    self._forget(request, client)
                    break
            client.news.pop(request, None)
        return True

    def _probe(self) -> None:
        for client in list(self._clients.values()):
            if client.requests and not client.told:
                nothing = Chunk(next(iter(client.requests)), "", [])
                if self._send(client.identity, nothing) == "gone":
                    self._lost(client)
            client.told = False
        self._reader.look()
        self._next_probe = self._loop.call_later(_SILENCE_S, self._probe)

    def _forget(self, request: Request, client: _GatewayClient) -> None:
        client.news.pop(request, None)
        if client.requests.get(request.output.name) is request:
            del client.requests[request.output.name]
        if not client.requests and not client.news:
            del self._clients[client.identity]

    def _lost(self, client: _GatewayClient) -> None:
        del self._clients[client.identity]
        client.news.clear()
        for request in client.requests.values():
            self._manager.cancel(request)
        client.requests.clear()

    def _send(self, identity: bytes, message: Message) -> sockets.Sent:
        if self._connections.stuck(identity):
            return "full"
        header, body = pack(message, self._epoch)
        sent = sockets.offer_frames(self._socket, [identity, header, body])
        if sent == "sent":
            self._connections.sent(identity, len(body))
        return sent
