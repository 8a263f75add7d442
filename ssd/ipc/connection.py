"""A client's end of a connection, which knows whether the other end is there."""

from __future__ import annotations

import math
import struct
import time
from typing import Any

import zmq

from ssd.errors import EngineDeadError, RequestError, UsageError
from ssd.ipc import sockets
from ssd.ipc.messages import (
    CLIENT_TO_FRONTEND,
    FRONTEND_TO_CLIENT,
    PROTOCOL_VERSION,
    BadFrame,
    Generate,
    Message,
    pack,
    unpack,
)


class Connection:
    """A DEALER to the gateway at `address`, for one thread.

    The transport's own monitor tells when a peer comes and goes; silence alone means a slow engine.
    """

    def __init__(self, address: str, timeout: float) -> None:
        self._address = address
        self._timeout = timeout
        self._up = False
        self._lost = False
        self._context: zmq.Context[Any] = zmq.Context()
        # Not IMMEDIATE, which drops what a peer sent before it left, and may abort this process in the middle of a
        # message (libzmq issue 3663). Nothing is queued for an absent peer all the same: `send` asks the monitor.
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, sockets.HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.RCVHWM, sockets.HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.MAXMSGSIZE, sockets.INTERNAL_BYTES)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise UsageError(f"{address!r} is no address of an engine: {error.strerror}") from None

    @property
    def closed(self) -> bool:
        return bool(self._context.closed)

    @property
    def lost(self) -> bool:
        """Whether the peer has gone since `receive` last said so."""
        self._hear()
        return self._lost

    def send(self, message: Message) -> None:
        """Queue a message; EngineDeadError when no connection comes up within the time-out."""
        if self.closed:
            raise EngineDeadError("this client is closed")
        deadline = time.monotonic() + self._timeout
        while not self.offer(message):
            if not self._up and time.monotonic() >= deadline:
                raise EngineDeadError(f"no engine answers at {self._address} (waited {self._timeout:g} s)")
            self._wait(zmq.POLLOUT if self._up else 0, deadline)

    def offer(self, message: Message) -> bool:
        """Send if that is possible at once."""
        self._hear()
        return self._up and sockets.send(self._socket, message)

    def receive(self, deadline: float | None = None) -> Message | None:
        """The next message. None, once, when the peer has gone; what it had sent comes first.

        Waits as long as it takes, or until `deadline` (of time.monotonic) and raises EngineDeadError then, and for
        what no engine sends.
        """
        while True:
            lost = self.lost  # asked before the socket: by then, what came before the loss is in it
            try:
                received = sockets.receive(self._socket, FRONTEND_TO_CLIENT)
            except BadFrame as error:
                raise EngineDeadError(f"what answers at {self._address} is not this engine: {error}") from None
            if received is not None:
                message: Message = received[2]
                return message
            if lost:
                self._lost = False
                return None
            if deadline is not None and time.monotonic() >= deadline:
                raise EngineDeadError(
                    f"what is at {self._address} does not answer as an engine of protocol version {PROTOCOL_VERSION}"
                )
            self._wait(zmq.POLLIN, deadline)

    def close(self) -> None:
        """Closing twice is fine."""
        if not self.closed:
            self._context.destroy(linger=0)

    def _wait(self, event: int, deadline: float | None) -> None:
        """Wait for `event` of the socket or for news of the connection, at most until `deadline`."""
        poller = zmq.Poller()
        poller.register(self._monitor, zmq.POLLIN)
        if event:
            poller.register(self._socket, event)
        poller.poll(None if deadline is None else max(0, math.ceil(1000 * (deadline - time.monotonic()))))

    def _hear(self) -> None:
        """Take in what the monitor has to say."""
        while True:
            try:
                news = self._monitor.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.Again:
                return
            (event,) = struct.unpack_from("=H", news[0])
            self._lost |= self._up and event == zmq.EVENT_DISCONNECTED
            self._up = event == zmq.EVENT_HANDSHAKE_SUCCEEDED


def validate(request: Generate) -> None:
    """Raise RequestError for what a gateway would drop unanswered: values out of bounds, broken text, too much of it.

    Needs no engine, so that bad input can be told before one is started.
    """
    request.params.check()
    try:
        frames = pack(request)
        unpack(frames, CLIENT_TO_FRONTEND)
    except (BadFrame, ValueError, TypeError, OverflowError) as error:
        raise RequestError("invalid_request", f"not a valid request: {error}") from None
    if len(frames[1]) > sockets.PUBLIC_BYTES:
        raise RequestError(
            "invalid_request", f"a request of {len(frames[1])} bytes; at most {sockets.PUBLIC_BYTES} are accepted"
        )
