"""A ZeroMQ socket in an event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from ssd.ipc import sockets
from ssd.ipc.messages import BadFrame

log = logging.getLogger("ssd.frontend")

Handler = Callable[[bytes, Any], None]


class Inlet:
    """Calls `handle(peer, message)` for every message that arrives, at most `turn` of them before others have a turn.

    Frames that are no message are counted and dropped. The descriptor of a socket tells only that something has
    changed, and sending uses that news up too: whoever sends calls `look` afterwards.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], decoder: msgspec.msgpack.Decoder[Any], handle: Handler, turn: int
    ) -> None:
        self.bad_frames = 0
        self._socket, self._decoder, self._handle, self._turn = socket, decoder, handle, turn
        self._loop = asyncio.get_running_loop()
        self._due = False
        self._loop.add_reader(socket.FD, self._read)
        self.look()

    def look(self) -> None:
        """Read what is there, soon."""
        if not self._due:
            self._due = True
            self._loop.call_soon(self._read)

    def close(self) -> None:
        """Read no more; before the socket is closed."""
        self._loop.remove_reader(self._socket.FD)
        self._handle = _ignore

    def _read(self) -> None:
        self._due = False
        if self._handle is _ignore:
            return
        for _ in range(self._turn):
            try:
                received = sockets.receive(self._socket, self._decoder)
            except BadFrame as error:
                self.bad_frames += 1
                log.info("dropped a frame: %s", error)
                continue
            if received is None:
                return
            self._handle(received[0], received[2])
        self.look()


def _ignore(peer: bytes, message: Any) -> None:
    """What a closed inlet does."""
