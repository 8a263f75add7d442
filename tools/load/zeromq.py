"""Sends requests over ZeroMQ in the public protocol, many on each of a few connections."""

from __future__ import annotations

from typing import Any

import zmq

from ssd.ipc import sockets
from ssd.ipc.public import FRONTEND_TO_CLIENT, Chunk, Done, Failed, Generate
from tools.load.checking import Request, Sink

_PER_TURN = 256  # messages of one connection before the next gets its turn


class ZeroMQ:
    """A `Transport` to the engine at `address`."""

    def __init__(self, address: str, connections: int) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._sockets = [sockets.dealer(self._context, address) for _ in range(connections)]
        self._poller = zmq.Poller()
        for socket in self._sockets:
            self._poller.register(socket, zmq.POLLIN)

    def send(self, request: Request) -> bool:
        socket = self._sockets[request.name % len(self._sockets)]
        return sockets.send(socket, Generate(request.name, token_ids=request.prompt, params=request.params))

    def receive(self, timeout_s: float, sink: Sink) -> None:
        for socket, _ in self._poller.poll(int(1000 * timeout_s)):
            for _ in range(_PER_TURN):
                received = sockets.receive(socket, FRONTEND_TO_CLIENT)
                if received is None:
                    break
                message = received[2]
                if isinstance(message, Chunk):
                    sink.piece(message.id, message.token_ids, message.text)
                elif isinstance(message, Done):
                    sink.end(message.id, message.finish_reason, message.text)
                elif isinstance(message, Failed):
                    sink.fail(message.id, message.code)

    def close(self) -> None:
        self._context.destroy(linger=0)
