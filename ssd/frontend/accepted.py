"""The connections that a public ZeroMQ socket has accepted: how many they are, and how much memory they take.

libzmq bounds neither. Its high water mark counts whole messages, so the frames of a message without an end pile up; and
it accepts until the process has no descriptor left, and then aborts it. So the kernel is asked how many bytes libzmq
has read from each connection. These bytes minus the messages that came out are what libzmq holds. A peer beyond a limit
loses its connection, and nobody else notices.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import logging
import os
import resource
import socket
import struct
import termios
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from ssd.ipc import sockets

log = logging.getLogger("ssd.frontend")

PEER_BYTES = (sockets.PUBLIC_QUEUE + 2) * sockets.PUBLIC_BYTES
"""What libzmq may hold of one connection: a full queue, a message that has just come and one that is coming."""
ALL_BYTES = 96 * 2**20
"""By so much the process may grow while messages are coming."""
UNSENT_BYTES = 8 * 2**20
"""So much may wait in libzmq for a client that does not read."""

_LOOK_S = 0.05
_LOOKS = 2  # before which a message may be one that is just coming
_TRIM_S = 1.0
_WORDS_S = 60.0
_TRIM_BYTES = 8 * 2**20
_NOTHING = 64 * 2**10  # bytes: messages that are on their way in any case
_HANDSHAKE = 1024  # bytes: more than it takes
_FRAME_COST = 64  # times its bytes: what the smallest frame takes in memory; other growth is not their doing
_FRAME = 64  # bytes: more than ZMTP adds to a message
_HEARTBEAT = 8  # bytes a second: more than a peer's heartbeats
# A connection takes two descriptors, one of libzmq and one here. The rest is for HTTP and for ourselves.
_DESCRIPTOR_SHARE = 8

_SO_PEEK_OFF, _PEEK_OFF = 42, 2**31 - 1
_TCP_BYTES_RECEIVED = 128  # where `struct tcp_info` has them
_PAGE = resource.getpagesize()
_libc = ctypes.CDLL(None)


class _Connection:
    """A second descriptor of one connection of libzmq's, so that the number cannot become another's."""

    def __init__(self, fd: int) -> None:
        self.peer = b""
        self.sent = 0
        self.closing = False
        self.looks = 0  # since a message has come out of libzmq
        self._taken = 0.0
        self._since = time.monotonic()
        self._socket = socket.socket(fileno=os.dup(fd))
        self._counted = 0
        if self._local:
            with contextlib.suppress(OSError):
                self._count_from_here()

    @property
    def _local(self) -> bool:
        return self._socket.family == socket.AF_UNIX

    def took(self, size: int) -> None:
        """So many bytes came out of libzmq as a message."""
        self._taken += size + _FRAME
        self.looks = 0

    def unread(self) -> int:
        """Bytes that libzmq has read and that have not come out of it; 0 where the kernel does not count."""
        try:
            received = self._received()
        except (OSError, struct.error):
            return 0
        self.looks += 1
        now = time.monotonic()
        self._taken += _HEARTBEAT * (now - self._since)
        self._since = now
        self._taken = min(self._taken, received)
        return int(received - self._taken)

    def stuck(self) -> bool:
        """Whether more than `UNSENT_BYTES` were sent since the peer has last read everything."""
        if self.sent > UNSENT_BYTES and self._waiting(termios.TIOCOUTQ) == 0:
            self.sent = 0
        return self.sent > UNSENT_BYTES

    def cut(self) -> None:
        """libzmq finds that the peer has gone, and the peer that the connection is reset."""
        self.closing = True
        with contextlib.suppress(OSError):  # it may have gone
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("=ii", 1, 0))
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _received(self) -> int:
        if not self._local:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            received: int = struct.unpack_from("=Q", info, _TCP_BYTES_RECEIVED)[0]
            return received - self._waiting(termios.FIONREAD)
        # The kernel lowers this offset by whatever is read; where it does not, there is none.
        offset = self._socket.getsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF)
        counted = _PEEK_OFF - offset if offset >= 0 else 0
        if counted > _PEEK_OFF // 2:
            self._counted += counted
            self._count_from_here()
            counted = 0
        return self._counted + counted

    def _count_from_here(self) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF, _PEEK_OFF)

    def _waiting(self, queue: int) -> int:
        return int(struct.unpack("=i", fcntl.ioctl(self._socket, queue, bytes(4)))[0])


class Accepted:
    """The connections of one ROUTER, from before it is bound; `most` of them."""

    def __init__(self, router: zmq.Socket[bytes], shed: Callable[[_Connection, str], None]) -> None:
        self._router, self._shed = router, shed
        self._connections: dict[int, _Connection] = {}
        self._peers: dict[bytes, _Connection] = {}
        self._most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _DESCRIPTOR_SHARE
        self._monitor = sockets.monitor(router)
        asyncio.get_running_loop().add_reader(self._monitor.FD, self._hear)
        self._hear()

    def took(self, peer: bytes, fd: int, size: int) -> None:
        """A message of so many bytes has come from a peer, over the connection with libzmq's descriptor `fd`."""
        connection = self._connections.get(fd)
        if connection is not None:
            connection.took(size)
            if connection.peer != peer:
                self._forget_peer(connection)
                connection.peer = peer
                self._peers[peer] = connection

    def sent(self, peer: bytes, size: int) -> None:
        """Note that a message of `size` bytes was given to libzmq for a peer."""
        connection = self._peers.get(peer)
        if connection is not None:
            connection.sent += size

    def stuck(self, peer: bytes) -> bool:
        """Whether as many bytes wait for a peer as may."""
        connection = self._peers.get(peer)
        return connection is not None and connection.stuck()

    def unread(self) -> list[tuple[int, _Connection]]:
        """The connections of which libzmq holds something now, and how many bytes."""
        self._hear()
        found = [(connection.unread(), connection) for connection in self._connections.values()]
        return [(unread, connection) for unread, connection in found if unread > _HANDSHAKE]

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._monitor.FD)
        self._router.disable_monitor()
        self._monitor.close(linger=0)
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def _hear(self) -> None:
        """Take in who came and who went."""
        while not self._monitor.closed:
            try:
                event, fd = struct.unpack_from("=Hi", self._monitor.recv_multipart(flags=zmq.NOBLOCK)[0])
            except zmq.Again:
                return
            self._forget(fd)
            if event == zmq.EVENT_ACCEPTED:
                self._admit(fd)

    def _admit(self, fd: int) -> None:
        try:
            connection = _Connection(fd)
        except OSError:
            return  # it has gone already
        self._connections[fd] = connection
        if len(self._connections) > self._most:
            self._shed(connection, f"{self._most} are open already")

    def _forget(self, fd: int) -> None:
        connection = self._connections.pop(fd, None)
        if connection is not None:
            self._forget_peer(connection)
            connection.close()

    def _forget_peer(self, connection: _Connection) -> None:
        if self._peers.get(connection.peer) is connection:
            del self._peers[connection.peer]


class Guard:
    """Keeps what libzmq holds for all peers of all public sockets within limits, by closing connections. `spoken_for`
    are bytes that have come out of it and are accounted for elsewhere."""

    def __init__(self, spoken_for: Callable[[], int]) -> None:
        self._spoken_for = spoken_for
        self._watched: list[Accepted] = []
        self._base = self._memory()
        self._next_trim = self._next_word = 0.0
        self._unsaid = 0
        self._loop = asyncio.get_running_loop()
        self._next_look = self._loop.call_later(_LOOK_S, self._look)

    def watch(self, router: zmq.Socket[bytes]) -> Accepted:
        """From now on look after the connections of `router`, which is not bound yet."""
        self._watched.append(Accepted(router, self._close))
        return self._watched[-1]

    def close(self) -> None:
        self._next_look.cancel()
        for accepted in self._watched:
            accepted.close()

    def _look(self) -> None:
        began = time.thread_time()
        holders = [holder for accepted in self._watched for holder in accepted.unread()]
        # Of the time at most a twentieth, however many connections there are.
        self._next_look = self._loop.call_later(max(_LOOK_S, 20 * (time.thread_time() - began)), self._look)
        self._balance(holders)

    def _balance(self, holders: list[tuple[int, _Connection]]) -> None:
        """Cut off who holds too much, and while all together do, those who hold most."""
        if any(connection.closing for _, connection in holders):
            return  # what they hold is about to be freed
        for unread, connection in holders:
            if unread > PEER_BYTES:
                self._cut(connection, unread)
        held = sum(unread for unread, _ in holders)
        if held < _NOTHING:
            self._settle()
        elif _FRAME_COST * held > ALL_BYTES and self._memory() > self._base + ALL_BYTES:
            self._trim()
            self._relieve(self._memory() - self._base - ALL_BYTES, holders)

    def _relieve(self, excess: int, holders: list[tuple[int, _Connection]]) -> None:
        """Cut off so many bytes. Small frames take more memory than they have bytes, so who holds far less than others
        is left for another look, as are those who have just come."""
        most = max(unread for unread, _ in holders)
        for unread, connection in sorted(holders, key=lambda holder: holder[0], reverse=True):
            if excess <= 0 or unread < most // 2:
                break
            excess -= unread
            if connection.looks >= _LOOKS:
                self._cut(connection, unread)

    def _cut(self, connection: _Connection, unread: int) -> None:
        self._close(connection, f"it had sent {unread // 2**10} KiB without the end of a message")

    def _close(self, connection: _Connection, why: str) -> None:
        connection.cut()
        now = time.monotonic()
        self._next_trim = now + _TRIM_S
        self._unsaid += 1
        if now >= self._next_word:
            log.warning("connections of clients closed: %d; the last one because %s", self._unsaid, why)
            self._unsaid, self._next_word = 0, now + _WORDS_S

    def _settle(self) -> None:
        """No message is coming: what is in use now is where growth begins. What was freed goes back to the system."""
        if self._memory() > self._base + _TRIM_BYTES and time.monotonic() >= self._next_trim:
            self._trim()
            self._base = self._memory()
        self._base = min(self._base, self._memory())

    def _trim(self) -> None:
        if hasattr(_libc, "malloc_trim"):  # of glibc
            _libc.malloc_trim(0)
        self._next_trim = time.monotonic() + _TRIM_S

    def _memory(self) -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE - self._spoken_for()
