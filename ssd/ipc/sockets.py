"""The engine's ZeroMQ sockets: explicit limits everywhere, and no send that blocks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import zmq

from ssd.errors import SsdError
from ssd.ipc.public import BadFrame, Direction, Message, pack, unpack

log = logging.getLogger("ssd.ipc")

Sent = Literal["sent", "full", "gone"]

INTERNAL_BYTES = 16 * 2**20
PUBLIC_BYTES = 4 * 2**20
HIGH_WATER_MARK = 1000
PUBLIC_QUEUE = 2
"""Messages of one client that may wait to be read. More messages of the largest size would take too much memory."""

# A stopped frontend reads nothing. The supervisor replaces it after half of this time (`ssd.launch.liveness`).
_PATIENCE_S, _RETRY_S = 10.0, 0.005
_SUBSCRIPTION_BYTES = 256
# Plain integers, because each operation on zmq's flags makes an object.
_NOW, _NOW_AND_MORE, _READABLE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.POLLIN)

# Names of the sockets inside a run directory.
CLIENT = "client.sock"
ENGINE = "engine.sock"
SUPERVISOR = "supervisor.sock"
TELEMETRY = "telemetry.sock"
LINK = "link.sock"


def router(context: zmq.Context[Any], address: str) -> zmq.Socket[bytes]:
    """Return a bound ROUTER. Sending to a peer that is gone fails at once (ROUTER_MANDATORY)."""
    socket = _unbound_router(context, INTERNAL_BYTES)
    if address.startswith("tcp:"):
        notice_silence(socket)
    socket.bind(address)
    return socket


def public_router(context: zmq.Context[Any], max_bytes: int = PUBLIC_BYTES) -> zmq.Socket[bytes]:
    socket = _unbound_router(context, max_bytes)
    socket.setsockopt(zmq.RCVHWM, PUBLIC_QUEUE)
    return socket


def monitor(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """Return a socket that reports connections to `socket` and their ends, with the descriptor.

    Its queue has no bound: libzmq would block until a full queue has room."""
    address = f"inproc://monitor-{socket.underlying:x}"
    socket.monitor(address, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
    listener = socket.context.socket(zmq.PAIR)
    listener.setsockopt(zmq.RCVHWM, 0)
    listener.connect(address)
    return listener


def dealer(context: zmq.Context[Any], address: str, identity: bytes | None = None) -> zmq.Socket[bytes]:
    """Return a connected DEALER.

    Not IMMEDIATE: with it libzmq 4.3.5 discards unread messages when the peer disconnects, and has been seen to abort
    the process over half a message."""
    socket = context.socket(zmq.DEALER)
    if identity is not None:
        socket.setsockopt(zmq.IDENTITY, identity)
    limit(socket, INTERNAL_BYTES, linger_ms=0)
    socket.connect(address)
    return socket


def publisher(context: zmq.Context[Any], address: str, most: int) -> zmq.Socket[bytes]:
    """Return a bound XPUB that keeps `most` messages for a subscriber that does not read, and drops the rest."""
    socket = context.socket(zmq.XPUB)
    socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # report every subscription, not only the first
    limit(socket, _SUBSCRIPTION_BYTES, linger_ms=0)
    socket.setsockopt(zmq.SNDHWM, most)
    socket.bind(address)
    return socket


def subscription(socket: zmq.Socket[bytes]) -> bool | None:
    """Return True for a new subscriber, False when the last has left, None without news."""
    while True:
        try:
            frames = socket.recv_multipart(flags=zmq.NOBLOCK)
        except zmq.Again:
            return None
        if frames in ([b"\x01"], [b"\x00"]):
            return frames == [b"\x01"]


def subscriber(context: zmq.Context[Any], address: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.SUB)
    limit(socket, INTERNAL_BYTES, linger_ms=0)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(address)
    return socket


def notice_silence(socket: zmq.Socket[bytes], silent_ms: int = 60_000) -> None:
    """Treat a TCP peer as gone after `silent_ms` without data; send a heartbeat four times in that time.

    A minute is longer than an engine tolerates a slow reader, whose transport is just as silent."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, silent_ms // 4)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, silent_ms)


def _unbound_router(context: zmq.Context[Any], max_bytes: int) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    limit(socket, max_bytes, linger_ms=1000)
    return socket


def limit(socket: zmq.Socket[bytes], max_bytes: int, linger_ms: int) -> None:
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    socket.setsockopt(zmq.LINGER, linger_ms)


def offer(socket: zmq.Socket[bytes], message: Message, epoch: int = 0, to: bytes | None = None) -> Sent:
    """Send without waiting; return "full" if the peer's queue is full, "gone" if there is no such peer."""
    frames = pack(message, epoch)
    return offer_frames(socket, frames if to is None else [to, *frames])


def offer_frames(socket: zmq.Socket[bytes], frames: list[bytes], copy: bool = True) -> Sent:
    """Send a packed message as `offer` does. Without `copy`, all peers that are sent a frame share its memory."""
    try:
        for frame in frames[:-1]:
            socket.send(frame, _NOW_AND_MORE, copy)
        socket.send(frames[-1], _NOW, copy)
    except zmq.Again:
        return "full"
    except zmq.ZMQError as error:
        if error.errno == zmq.EHOSTUNREACH:
            return "gone"
        raise
    return "sent"


def send(socket: zmq.Socket[bytes], message: Message, epoch: int = 0, to: bytes | None = None) -> bool:
    return offer(socket, message, epoch, to) == "sent"


def deliver(socket: zmq.Socket[bytes], message: Message, epoch: int, to: bytes) -> bool:
    """Send a message that must not be dropped; return False if the receiver is gone.

    A slow receiver slows the sender. Raises SsdError if it reads nothing for ten seconds."""
    for _ in range(int(_PATIENCE_S / _RETRY_S)):
        sent = offer(socket, message, epoch, to)
        if sent != "full":
            return sent == "sent"
        time.sleep(_RETRY_S)
    raise SsdError(f"the frontend took no results for {_PATIENCE_S:.0f} s")


def receive(
    socket: zmq.Socket[bytes], direction: Direction, took: Callable[[bytes, zmq.Frame, int], None] | None = None
) -> tuple[bytes, int, Any] | None:
    """Return (peer, epoch, message), or None if nothing is there. `peer` is empty on a DEALER.

    `took` gets the peer, the first frame and the size in bytes of every arrival, valid or not. Raises `BadFrame` for
    frames that are not a message of `direction`; they are consumed."""
    if not int(socket.getsockopt(zmq.EVENTS)) & _READABLE:
        return None  # in a tenth of the time that an exception takes
    # Without zmq's own frames: the end of one calls signal handlers, and what they raise, as Ctrl-C does, is lost.
    first = None if took is None else socket.recv(_NOW, False)
    frames = [] if first is None else [first.bytes]
    if first is None or first.more:
        frames += socket.recv_multipart(_NOW)
    peer = b""
    if socket.type == zmq.ROUTER:
        peer, frames = frames[0], frames[1:]
    if took is not None and first is not None:
        took(peer, first, sum(map(len, frames)))
    try:
        epoch, message = unpack(frames, direction)
    except BadFrame as error:
        raise BadFrame(f"{peer!r}: {error}") from None
    return peer, epoch, message


def drained(socket: zmq.Socket[bytes], direction: Direction) -> Iterator[tuple[bytes, int, Any]]:
    """Yield each result of `receive`; drop bad frames with a warning."""
    while True:
        try:
            received = receive(socket, direction)
        except BadFrame as error:
            log.warning("dropped a frame from %s", error)
            continue
        if received is None:
            return
        yield received
