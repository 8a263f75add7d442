"""A client's connection to an engine."""

from __future__ import annotations

import math
import os
import struct
import time
import weakref
from typing import Any, TypeAlias

import zmq

from ssd.errors import EngineDeadError, RequestError, UsageError
from ssd.ipc import public, sockets
from ssd.ipc.curve import CURVE_BYTES, ClientKeys
from ssd.ipc.public import BadFrame, Chunk, Description, Direction, Done, Failed, Generate, Message, pack, unpack

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
    """A DEALER to the gateway at `address`, until its peer is lost. For one thread; only `wait` blocks.

    The transport's monitor tells when the peer comes and goes; silence alone means a slow engine. `trouble` says why
    there is no connection yet. Once `refused` is true, there will be none."""

    def __init__(
        self,
        address: str,
        keys: ClientKeys | None = None,
        direction: Direction = public.FRONTEND_TO_CLIENT,
        silent_ms: int = 60_000,
    ) -> None:
        """Begin to connect to a peer that sends `direction`; it counts as lost after `silent_ms` without data."""
        self.up = False
        self.refused = False
        self.trouble = ""
        self._address = address
        self._lost = False
        self._direction = direction
        self._pid = os.getpid()
        self._context: zmq.Context[Any] = zmq.Context()
        # Not IMMEDIATE: it drops what a peer sent before it left, and may abort this process in the middle of a message
        # (libzmq issue 3663). Still nothing is queued for an absent peer, because `offer` asks the monitor.
        self._socket = self._context.socket(zmq.DEALER)
        sockets.limit(self._socket, sockets.INTERNAL_BYTES + CURVE_BYTES, linger_ms=0)
        if address.startswith("tcp:"):
            sockets.notice_silence(self._socket, silent_ms)
        if keys is not None:
            keys.apply(self._socket)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        # The garbage collector might end the context before its sockets, and wait for them for ever.
        self._end = weakref.finalize(self, _end, self._context, self._socket, self._monitor)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise UsageError(f"{address!r} is no address of an engine: {error.strerror}") from None

    @property
    def closed(self) -> bool:
        """Return True after `close`, and in a fork of the connecting process, which lacks ZeroMQ's threads."""
        return not self._end.alive or os.getpid() != self._pid

    @property
    def stuck(self) -> bool:
        if self.closed:
            return False
        self._hear()
        return not (self.refused or self._lost or (self.up and self._socket.poll(0, zmq.POLLOUT)))

    def offer(self, message: Message, epoch: int = 0) -> bool:
        """Send without waiting; return False without a peer, without room, or after the peer was lost."""
        self._hear()
        return self.up and not self._lost and sockets.send(self._socket, message, epoch)

    def take(self) -> Answer | EngineDeadError | None:
        """Return the next message, or None.

        The last one is an EngineDeadError: after a lost peer's messages, or for a message that no engine sends."""
        framed = self.take_framed()
        return None if framed is None else framed[1]

    def take_framed(self) -> tuple[int, Any] | None:
        """Return (number in the message's header, message) as `take` does, or None."""
        framed = self._receive()
        if framed is None:
            self._hear()
            if self._lost:  # all messages from before the loss are in the socket now
                return self._receive() or (0, EngineDeadError(f"the engine at {self._address} went away"))
        return framed

    def wait(self, sending: bool, deadline: float | None) -> None:
        """Wait until there may be something to `take` or, when `sending`, until an `offer` may succeed.

        Return at `deadline` (time.monotonic) at the latest. Raises EngineDeadError after `close` and in a fork."""
        if self.closed:
            raise EngineDeadError(f"process {os.getpid()} is a fork of process {self._pid}, which has asked")
        poller = zmq.Poller()
        poller.register(self._monitor, zmq.POLLIN)
        if self.up or not sending:
            poller.register(self._socket, zmq.POLLOUT if sending else zmq.POLLIN)
        poller.poll(None if deadline is None else max(0, math.ceil(1000 * (deadline - time.monotonic()))))

    def descriptors(self) -> tuple[int, int]:
        """Return two descriptors for an event loop, readable on news until `acknowledge` or `take`."""
        return int(self._socket.getsockopt(zmq.FD)), int(self._monitor.getsockopt(zmq.FD))

    def acknowledge(self) -> None:
        """Silence the descriptors until there is more news."""
        self._hear()
        self._socket.getsockopt(zmq.EVENTS)

    def close(self) -> None:
        """Close the connection. Closing twice is fine."""
        self._end()

    def _receive(self) -> tuple[int, Any] | None:
        try:
            received = sockets.receive(self._socket, self._direction)
        except BadFrame as error:
            return 0, EngineDeadError(f"what answers at {self._address} is not this engine: {error}")
        return None if received is None else received[1:]

    def _hear(self) -> None:
        """Read the events of the transport's monitor."""
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
    """Raise RequestError for a request that a gateway would drop: out of bounds, broken text, too large."""
    if request.params is not None:
        request.params.check()
    try:
        frames = pack(request)
        unpack(frames, public.CLIENT_TO_FRONTEND)
    except (BadFrame, ValueError, TypeError, OverflowError) as error:
        raise RequestError("invalid_request", f"not a valid request: {error}") from None
    if len(frames[1]) > sockets.PUBLIC_BYTES:
        raise RequestError(
            "invalid_request", f"a request of {len(frames[1])} bytes; at most {sockets.PUBLIC_BYTES} are accepted"
        )
