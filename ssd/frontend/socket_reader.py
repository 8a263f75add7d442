"""Reads a ZeroMQ socket in an event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import zmq

from ssd.ipc import sockets
from ssd.ipc.public import BadFrame, Direction

log = logging.getLogger("ssd.frontend")

Handler = Callable[[bytes, Any], None]

_TURN_BYTES = 4 * 2**20


class SocketReader:
    """Calls `handle(peer, message)` for every message of a socket in an event loop.

    One turn handles at most `turn` messages and some MiB. Before `handle`, `took` gets the peer, the connection's
    descriptor and the size in bytes of everything that arrives. Frames that are no message are dropped, and `dropped`
    is called. An exception in `handle` loses only its message. The socket's descriptor signals only changes, and
    sending may consume a signal: call `look` after sending."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        direction: Direction,
        handle: Handler,
        turn: int,
        dropped: Callable[[], None],
        took: Callable[[bytes, int, int], None] = lambda peer, fd, size: None,
    ) -> None:
        self._socket, self._direction, self._handle, self._turn = socket, direction, handle, turn
        self._dropped, self._took = dropped, took
        self._bytes = 0  # in this turn
        self.frame: zmq.Frame | None = None  # the first one of the message that is handled
        self._loop = asyncio.get_running_loop()
        self._due = False
        self._loop.add_reader(socket.FD, self._read)
        self.look()

    @property
    def waiting(self) -> bool:
        """Return True if a message is there that has not been handled, and schedule reading it."""
        if self._socket.poll(0):
            self.look()  # polling may consume the descriptor's signal
            return True
        return False

    def look(self) -> None:
        if not self._due:
            self._due = True
            self._loop.call_soon(self._read)

    def close(self) -> None:
        """Stop reading; call it before the socket is closed."""
        self._loop.remove_reader(self._socket.FD)
        self._handle = _ignore

    def _read(self) -> None:
        self._due = False
        if self._handle is _ignore:
            return
        self._bytes = 0
        for _ in range(self._turn):
            if self._bytes > _TURN_BYTES:
                break
            try:
                received = sockets.receive(self._socket, self._direction, self._count)
            except BadFrame as error:
                log.info("dropped a frame: %s", error)
                self._dropped()
                continue
            if received is None:
                return
            try:
                self._handle(received[0], received[2])
            except Exception:
                log.exception("a bug in handling a message:")
        self.look()

    def _count(self, peer: bytes, frame: zmq.Frame, size: int) -> None:
        self._bytes += size
        self.frame = frame
        self._took(peer, int(frame.get(zmq.SRCFD)), size)


def _ignore(peer: bytes, message: Any) -> None:
    """Do nothing: the handler of a closed reader."""
