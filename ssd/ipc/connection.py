"""A client's end of a connection, which knows whether the other end is there."""

from __future__ import annotations

import math
import struct
import time
import weakref
from typing import Any, TypeAlias

import zmq

from ssd.errors import EngineDeadError, RequestError, UsageError
from ssd.ipc import sockets
from ssd.ipc.curve import CURVE_BYTES, ClientKeys
from ssd.ipc.messages import (
    CLIENT_TO_FRONTEND,
    FRONTEND_TO_CLIENT,
    BadFrame,
    Chunk,
    Description,
    Done,
    Failed,
    Generate,
    Message,
    pack,
    unpack,
)

Answer: TypeAlias = Description | Chunk | Done | Failed

_REFUSALS = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the engine at {} does not accept this client's key",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "what is at {} does not shake hands as this client does: either both sides "
    "have keys, or neither",
}
_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)


class Connection:
    """A DEALER to the gateway at `address`, from its first try to connect to the loss of its peer; for one thread.

    The transport's own monitor tells when a peer comes and goes; silence alone means a slow engine. Only `wait` waits.
    `trouble` says what is known of why no connection has come up; when it was `refused`, none will.
    """

    def __init__(self, address: str, keys: ClientKeys | None = None) -> None:
        self.up = False
        self.refused = False
        self.trouble = ""
        self._address = address
        self._lost = False
        self._context: zmq.Context[Any] = zmq.Context()
        # Not IMMEDIATE, which drops what a peer sent before it left, and may abort this process in the middle of a
        # message (libzmq issue 3663). Nothing is queued for an absent peer all the same: `offer` asks the monitor.
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, sockets.HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.RCVHWM, sockets.HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.MAXMSGSIZE, sockets.INTERNAL_BYTES + CURVE_BYTES)
        self._socket.setsockopt(zmq.LINGER, 0)
        if address.startswith("tcp:"):
            sockets.notice_silence(self._socket)
        if keys is not None:
            keys.apply(self._socket)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        # Also when it is forgotten: the collector might end the context before its sockets, and wait for them for ever.
        self._end = weakref.finalize(self, _end, self._context, self._socket, self._monitor)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise UsageError(f"{address!r} is no address of an engine: {error.strerror}") from None

    @property
    def closed(self) -> bool:
        return not self._end.alive

    @property
    def stuck(self) -> bool:
        """Whether an `offer` would fail, and goes on to until there is news."""
        if self.closed:
            return False
        self._hear()
        return not (self.refused or self._lost or (self.up and self._socket.poll(0, zmq.POLLOUT)))

    def offer(self, message: Message) -> bool:
        """Send if that is possible at once. It is not while the loss of the peer has not been taken."""
        self._hear()
        return self.up and not self._lost and sockets.send(self._socket, message)

    def take(self) -> Answer | EngineDeadError | None:
        """The next message, None when there is none. An EngineDeadError, after all that the peer has sent, when it has
        gone, and for what no engine sends: then this connection is over."""
        answer = self._receive()
        if answer is None:
            self._hear()
            if self._lost:  # by now, all that came before the loss is in the socket
                return self._receive() or EngineDeadError(f"the engine at {self._address} went away")
        return answer

    def wait(self, sending: bool, deadline: float | None) -> None:
        """Wait until there may be something to `take`, or until an `offer` may succeed; at the latest until `deadline`
        (of time.monotonic)."""
        poller = zmq.Poller()
        poller.register(self._monitor, zmq.POLLIN)
        if self.up or not sending:
            poller.register(self._socket, zmq.POLLOUT if sending else zmq.POLLIN)
        poller.poll(None if deadline is None else max(0, math.ceil(1000 * (deadline - time.monotonic()))))

    def descriptors(self) -> tuple[int, int]:
        """For an event loop: readable when there may be news, until `acknowledge` or an attempt to `take`."""
        return int(self._socket.getsockopt(zmq.FD)), int(self._monitor.getsockopt(zmq.FD))

    def acknowledge(self) -> None:
        """Silence the descriptors until there is more news than what there is now."""
        self._hear()
        self._socket.getsockopt(zmq.EVENTS)

    def close(self) -> None:
        """Closing twice is fine."""
        self._end()

    def _receive(self) -> Answer | EngineDeadError | None:
        try:
            received = sockets.receive(self._socket, FRONTEND_TO_CLIENT)
        except BadFrame as error:
            return EngineDeadError(f"what answers at {self._address} is not this engine: {error}")
        return None if received is None else received[2]

    def _hear(self) -> None:
        """Take in what the monitor has to say."""
        while True:
            try:
                news = self._monitor.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.Again:
                return
            (event,) = struct.unpack_from("=H", news[0])
            self._lost |= self.up and event == zmq.EVENT_DISCONNECTED
            self.up = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if event in _REFUSALS:
                self.refused = True
                self.trouble = _REFUSALS[event].format(self._address)
            elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self.trouble = "; what is there does not shake hands: is its key another one?"


def _end(context: zmq.Context[Any], *sockets: zmq.Socket[bytes]) -> None:
    for socket in sockets:
        socket.close(linger=0)
    context.term()


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
