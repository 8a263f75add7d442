"""The connections of drafts on other machines to the receiver's socket, and the limits on their cost.

libzmq 4.3.5 aborts its process if a peer fills a queue and resets its connection at a bad moment (`Assertion failed:
!_io_error`, its issue 4364). So a thread passes bytes on, and libzmq sees the end of a connection only when it has read
that far."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import threading
import time
from urllib.parse import urlsplit

import zmq

from ssd.errors import SsdError, UsageError
from ssd.ipc import listening
from ssd.ipc.peer_connections import PeerConnection, PeerConnections
from ssd.plugins.remote.receiver.sessions import MOST_SESSIONS, Sessions

_MOST_CONNECTIONS = 2 * MOST_SESSIONS
_SPARE = 8  # connections that always have room: more than are accepted between two looks of the guard
_ACCEPTING_S = 0.01  # pause after each connection, so that messages left behind are read faster than they come
_PART = 4 * 2**10  # bytes of a connection that wait here, and in the kernel, on the way to libzmq
_PARTS = 16  # parts of one connection before others have a turn
_PATIENCE_S = 10.0  # with a peer that does not read
LOOK_S = 0.05
"""Seconds between two looks of a guard."""
# Most bytes that libzmq may hold of one connection, and of all. The smallest frame takes 32 times its bytes of memory.
_MOST_UNREAD, _MOST_HELD = 2**19, 2**20


class Relay:
    """Passes connections from `address`, which then has the real port, on to `inner`. Raises UsageError."""

    def __init__(self, address: str, inner: str) -> None:
        where = urlsplit(address)
        try:
            self._listening = listening.tcp(where.hostname or "", where.port or 0)
            self._listening.listen()
        except OSError as error:
            raise UsageError(f"--draft-bind {address}: {error.strerror or error}") from None
        self._listening.setblocking(False)
        self.address = f"{address.rpartition(':')[0]}:{self._listening.getsockname()[1]}"
        self._inner = inner.removeprefix("ipc://")
        self._readers: dict[bytes, asyncio.Task[None]] = {}  # by the name of the connection to libzmq
        self._loop = asyncio.new_event_loop()
        run = self._loop.run_until_complete
        self.thread = threading.Thread(target=run, args=(self._accept(),), name="relay", daemon=True)
        self.thread.start()

    def cut(self, name: bytes) -> None:
        """End the connection with this name on libzmq's side."""
        self._loop.call_soon_threadsafe(lambda: name in self._readers and self._readers[name].cancel())

    async def _accept(self) -> None:
        serving = set[asyncio.Task[None]]()
        while True:
            with contextlib.suppress(OSError):  # the peer is gone, or no descriptor is left
                outer, _ = await self._loop.sock_accept(self._listening)
                serving.add(task := self._loop.create_task(self._serve(outer)))
                task.add_done_callback(serving.discard)
            await asyncio.sleep(_ACCEPTING_S)
            while len(serving) >= _MOST_CONNECTIONS:
                await asyncio.wait(serving, return_when=asyncio.FIRST_COMPLETED)

    async def _serve(self, outer: socket.socket) -> None:
        with outer, socket.socket(socket.AF_UNIX) as inner, contextlib.suppress(OSError):
            outer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            inner.setblocking(False)
            inner.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _PART)
            inner.bind("")  # the kernel makes up a name
            await self._loop.sock_connect(inner, self._inner)
            name, reader = inner.getsockname(), self._loop.create_task(self._read(outer, inner))
            self._readers[name] = reader
            try:
                await self._write(inner, outer, reader)
            finally:
                reader.cancel()
                del self._readers[name]

    async def _read(self, outer: socket.socket, inner: socket.socket) -> None:
        """Pass on the peer's bytes. At their end libzmq must close the connection: a reset could abort it."""
        with contextlib.suppress(OSError):
            try:
                for count in itertools.count(1):
                    if not (part := await self._loop.sock_recv(outer, _PART)):
                        break
                    await self._loop.sock_sendall(inner, part)
                    if len(part) == _PART or count % _PARTS == 0:
                        await asyncio.sleep(0)  # neither call waits while there is data and room
            finally:
                inner.shutdown(socket.SHUT_WR)
                outer.shutdown(socket.SHUT_RDWR)  # nothing waits any more for a peer that does not read

    async def _write(self, inner: socket.socket, outer: socket.socket, reader: asyncio.Task[None]) -> None:
        """Pass on libzmq's bytes until it closes the connection, even if the peer reads no more."""
        while part := await self._loop.sock_recv(inner, _PART):
            if not reader.done():
                try:
                    async with asyncio.timeout(_PATIENCE_S):
                        await self._loop.sock_sendall(outer, part)
                except OSError:
                    reader.cancel()


class Guard:
    """Ends connections of peers that send too much or keep others out. `router` must not be bound yet."""

    def __init__(self, router: zmq.Socket[bytes], relay: Relay) -> None:
        self._router, self._relay = router, relay
        self._peers = PeerConnections(router, self._cut, margin=0)
        self._look_at = 0.0

    def took(self, peer: bytes, fd: int, size: int) -> None:
        """Count a message of `size` bytes from a peer, over libzmq's descriptor `fd`."""
        self._peers.hear()  # the connection may be new, and this its only message for long
        self._peers.took(peer, fd, size)

    def look(self, sessions: Sessions) -> None:
        """Cut connections that hold too much, and surplus ones without a session, the oldest first.

        Call it in every turn. Raises SsdError if the relay's thread has ended."""
        if not self._relay.thread.is_alive():
            raise SsdError("nothing comes from drafts any more: the thread that passes it on has ended")
        if (now := time.monotonic()) < self._look_at:
            return
        self._look_at = now + LOOK_S
        self._make_room(sessions)
        if not int(self._router.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._peers.drained()
        holders = sorted(self._peers.unread(), key=lambda holder: holder[0])
        held = sum(unread for unread, _ in holders)
        while holders and (holders[-1][0] > _MOST_UNREAD or held > _MOST_HELD):
            unread, connection = holders.pop()
            held -= unread
            self._cut(connection)

    def _make_room(self, sessions: Sessions) -> None:
        connections = self._peers.open()
        strangers = [connection for connection in connections if sessions.of(connection.peer) is None]
        for connection in strangers[: max(0, len(connections) - _MOST_CONNECTIONS + _SPARE)]:
            self._cut(connection)

    def _cut(self, connection: PeerConnection, why: str = "") -> None:
        self._relay.cut(connection.name)
