"""Limits on clients' connections: how many there are, and how much memory ZeroMQ's take.

libzmq bounds neither. Its high water mark counts whole messages, so the frames of a message without an end pile up. It
accepts until the process has no descriptor left, and then aborts it. So this module asks the kernel how many bytes
libzmq has read from each connection, and subtracts the messages that came out: the rest is what libzmq holds. A peer
beyond a limit loses its connection, and nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
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

from ssd.allocator import give_back_freed
from ssd.errors import UsageError
from ssd.ipc import sockets

log = logging.getLogger("ssd.frontend")

UNREAD_BYTES = (sockets.PUBLIC_QUEUE + 2) * sockets.PUBLIC_BYTES
"""What libzmq may hold of one connection: a full queue, a message just complete and one on its way."""
GROWTH_BYTES = 96 * 2**20
"""What the process may grow by while messages are coming."""
UNSENT_BYTES = 8 * 2**20
"""What may wait in libzmq for a client that does not read."""

_LOOK_S = 0.05
_LOOKS = 2  # a peer is not cut before: its message may just be coming
_TRIM_S = 1.0
_WORDS_S = 60.0
_TRIM_BYTES = 8 * 2**20
_NOTHING = 64 * 2**10  # bytes: messages on their way in normal operation
_HANDSHAKE = 1024  # bytes: more than a handshake takes
_FRAME_COST = 64  # memory of the smallest frame over its bytes; growth beyond has other causes
_FRAME = 64  # bytes: more than ZMTP adds to a message
_HEARTBEAT = 8  # bytes a second: more than a peer's heartbeats
# A connection takes two descriptors, one of libzmq and one here. The rest is for HTTP and for ourselves.
_DESCRIPTOR_SHARE = 8

_SO_PEEK_OFF, _PEEK_OFF = 42, 2**31 - 1
_TCP_BYTES_RECEIVED = 128  # offset in `struct tcp_info`
_PAGE = resource.getpagesize()
_MOST_DESCRIPTORS = 65536
_RESERVED_DESCRIPTORS = 256  # for ZeroMQ, shared memory and files


def raise_descriptor_limit() -> None:
    """Raise the soft limit on open files, up to a bound. The usual one is for programs that call select."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def http_connections(wanted: int) -> int:
    """Returns how many of `wanted` HTTP connections may be open at once. Raises UsageError if none may.
    The rest of the descriptors is ZeroMQ's: libzmq ends a process that has none left for its sockets."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    if soft <= _RESERVED_DESCRIPTORS:
        raise UsageError(
            f"HTTP needs more than {_RESERVED_DESCRIPTORS} open files (ulimit -n), and this process may have {soft}"
        )
    return min(wanted, soft - _RESERVED_DESCRIPTORS)


class _PeerConnection:
    """One connection of libzmq's. Holds a duplicate of its descriptor, so that the number cannot become another's."""

    def __init__(self, fd: int) -> None:
        self.peer = b""
        self.sent = 0
        self.closing = False
        self.looks = 0  # since a message has come out of libzmq
        self._taken = 0.0
        self._since = time.monotonic()
        self._socket = socket.socket(fileno=os.dup(fd))
        self._counted = 0
        self._local = self._socket.family == socket.AF_UNIX
        if self._local:
            with contextlib.suppress(OSError):
                self._count_from_here()

    def took(self, size: int) -> None:
        """Notes a message of `size` bytes that came out of libzmq."""
        self._taken += size + _FRAME
        self.looks = 0

    def unread(self) -> int:
        """Returns the bytes that libzmq holds of this connection; 0 where the kernel does not count."""
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
        """True if more than `UNSENT_BYTES` were sent since the peer last read everything."""
        if self.sent > UNSENT_BYTES and self._waiting(termios.TIOCOUTQ) == 0:
            self.sent = 0
        return self.sent > UNSENT_BYTES

    def cut(self) -> None:
        """Resets the connection; libzmq finds that the peer has gone."""
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
        # Reading lowers this offset. A kernel that does not do so has no offset.
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


class PeerConnections:
    """The connections of one ROUTER, from before it is bound. `shed` is called for one too many."""

    def __init__(self, router: zmq.Socket[bytes], shed: Callable[[_PeerConnection, str], None]) -> None:
        self._router, self._shed = router, shed
        self._connections: dict[int, _PeerConnection] = {}
        self._peers: dict[bytes, _PeerConnection] = {}
        self._most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _DESCRIPTOR_SHARE
        self._monitor = sockets.monitor(router)
        asyncio.get_running_loop().add_reader(self._monitor.FD, self._hear)
        self._hear()

    def took(self, peer: bytes, fd: int, size: int) -> None:
        """Notes a message of `size` bytes from a peer, over libzmq's descriptor `fd`."""
        connection = self._connections.get(fd)
        if connection is not None:
            connection.took(size)
            if connection.peer != peer:
                self._forget_peer(connection)
                connection.peer = peer
                self._peers[peer] = connection

    def sent(self, peer: bytes, size: int) -> None:
        """Notes a message of `size` bytes that was given to libzmq for a peer."""
        connection = self._peers.get(peer)
        if connection is not None:
            connection.sent += size

    def stuck(self, peer: bytes) -> bool:
        """True if as many bytes wait for a peer as may."""
        connection = self._peers.get(peer)
        return connection is not None and connection.stuck()

    def unread(self) -> list[tuple[int, _PeerConnection]]:
        """Returns the connections of which libzmq holds something, with the bytes."""
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
        """Reads who came and who went."""
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
            connection = _PeerConnection(fd)
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

    def _forget_peer(self, connection: _PeerConnection) -> None:
        if self._peers.get(connection.peer) is connection:
            del self._peers[connection.peer]


class ConnectionGuard:
    """Keeps what libzmq holds for all peers within limits, by closing connections.
    `spoken_for` returns the bytes that came out of libzmq and are accounted for elsewhere."""

    def __init__(self, spoken_for: Callable[[], int]) -> None:
        self._spoken_for = spoken_for
        self._watched: list[PeerConnections] = []
        self._base = self._memory()
        self._next_trim = self._next_word = 0.0
        self._unsaid = 0
        self._loop = asyncio.get_running_loop()
        self._next_look = self._loop.call_later(_LOOK_S, self._look)

    def watch(self, router: zmq.Socket[bytes]) -> PeerConnections:
        """Looks after the connections of `router` from now on; it must not be bound yet."""
        self._watched.append(PeerConnections(router, self._close))
        return self._watched[-1]

    def close(self) -> None:
        self._next_look.cancel()
        for peers in self._watched:
            peers.close()

    def _look(self) -> None:
        began = time.thread_time()
        holders = [holder for peers in self._watched for holder in peers.unread()]
        # Looking takes at most a twentieth of the time, however many connections there are.
        self._next_look = self._loop.call_later(max(_LOOK_S, 20 * (time.thread_time() - began)), self._look)
        self._balance(holders)

    def _balance(self, holders: list[tuple[int, _PeerConnection]]) -> None:
        """Cuts peers that hold too much and, while all together do, those that hold most."""
        if any(connection.closing for _, connection in holders):
            return  # what they hold is about to be freed
        for unread, connection in holders:
            if unread > UNREAD_BYTES:
                self._cut(connection, unread)
        held = sum(unread for unread, _ in holders)
        if held < _NOTHING:
            self._settle()
        elif _FRAME_COST * held > GROWTH_BYTES and self._memory() > self._base + GROWTH_BYTES:
            self._trim()
            self._relieve(self._memory() - self._base - GROWTH_BYTES, holders)

    def _relieve(self, excess: int, holders: list[tuple[int, _PeerConnection]]) -> None:
        """Cuts peers that hold `excess` bytes, the largest first.
        Small frames take more memory than they have bytes. So peers that hold far less than the largest wait for
        another look, as do those that have just come."""
        most = max(unread for unread, _ in holders)
        for unread, connection in sorted(holders, key=lambda holder: holder[0], reverse=True):
            if excess <= 0 or unread < most // 2:
                break
            excess -= unread
            if connection.looks >= _LOOKS:
                self._cut(connection, unread)

    def _cut(self, connection: _PeerConnection, unread: int) -> None:
        self._close(connection, f"it had sent {unread // 2**10} KiB without the end of a message")

    def _close(self, connection: _PeerConnection, why: str) -> None:
        connection.cut()
        now = time.monotonic()
        self._next_trim = now + _TRIM_S
        self._unsaid += 1
        if now >= self._next_word:
            log.warning("connections of clients closed: %d; the last one because %s", self._unsaid, why)
            self._unsaid, self._next_word = 0, now + _WORDS_S

    def _settle(self) -> None:
        """No message is coming: returns freed memory to the system, and measures growth from here."""
        if self._memory() > self._base + _TRIM_BYTES and time.monotonic() >= self._next_trim:
            self._trim()
            self._base = self._memory()
        self._base = min(self._base, self._memory())

    def _trim(self) -> None:
        give_back_freed()
        self._next_trim = time.monotonic() + _TRIM_S

    def _memory(self) -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE - self._spoken_for()
