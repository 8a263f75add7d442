"""The connections of a ROUTER whose peers are not trusted: their number, and the bytes that libzmq holds of each.

libzmq bounds neither: the frames of an endless message pile up, and without a descriptor left it aborts the process. So
this module asks the kernel how many bytes libzmq has read from each connection, and subtracts the messages that came
out."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import socket
import struct
import termios
import time
from collections.abc import Callable

import zmq

from ssd.ipc import sockets

UNSENT_BYTES = 8 * 2**20
"""Most bytes that may wait in libzmq for a client that does not read."""

_HANDSHAKE = 1024  # bytes: more than a handshake takes
_FRAME = 64  # bytes: more than ZMTP adds to a message
_HEARTBEAT = 8  # bytes a second: more than a peer's heartbeats
# A connection takes two descriptors, one of libzmq and one here. The rest is for HTTP and for ourselves.
_DESCRIPTOR_SHARE = 8
_MOST_DESCRIPTORS = 65536
_SO_PEEK_OFF, _PEEK_OFF = 42, 2**31 - 1
_TCP_BYTES_RECEIVED = 128  # offset in `struct tcp_info`


def raise_descriptor_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class PeerConnection:
    """One connection of libzmq. Its duplicate of the descriptor stays valid after libzmq closes its own."""

    def __init__(self, fd: int) -> None:
        self.peer = b""
        self.sent = 0
        self.closing = False
        self.looks = 0  # calls of `unread` since a message has come out of libzmq
        self._taken = 0.0
        self._since = time.monotonic()
        self._socket = socket.socket(fileno=os.dup(fd))
        self._counted = 0
        self._local = self._socket.family == socket.AF_UNIX
        if self._local:
            with contextlib.suppress(OSError):
                self._count_from_here()

    def took(self, size: int) -> None:
        self._taken += size
        self.looks = 0

    def unread(self) -> int:
        """Return the bytes that libzmq holds of this connection; 0 if the kernel does not count."""
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

    def settle(self) -> None:
        """Count all bytes that libzmq has read as taken: it holds at most the beginning of a message."""
        with contextlib.suppress(OSError, struct.error):
            self._taken = self._received()

    def stuck(self) -> bool:
        if self.sent > UNSENT_BYTES and self._waiting(termios.TIOCOUTQ) == 0:
            self.sent = 0
        return self.sent > UNSENT_BYTES

    @property
    def name(self) -> bytes:
        """Return the address of the other end of a connection within this machine; empty if it has gone."""
        try:
            return bytes(self._socket.getpeername())
        except OSError:
            return b""

    def cut(self) -> None:
        """Reset the connection, so that libzmq finds its peer gone."""
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
    """The connections of one ROUTER, not bound yet. It calls `shed` with each connection beyond the limit.

    Each message counts `margin` bytes more than its own. A large margin hides a flood of small messages. The error of a
    small one adds up until `drained` is called."""

    def __init__(
        self,
        router: zmq.Socket[bytes],
        shed: Callable[[PeerConnection, str], None],
        margin: int = _FRAME,
    ) -> None:
        self._router, self._shed, self._margin = router, shed, margin
        self._connections: dict[int, PeerConnection] = {}
        self._peers: dict[bytes, PeerConnection] = {}
        self._most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _DESCRIPTOR_SHARE
        self.monitor = sockets.monitor(router)

    def took(self, peer: bytes, fd: int, size: int) -> None:
        connection = self._connections.get(fd)
        if connection is not None:
            connection.took(size + self._margin)
            if connection.peer != peer:
                self._forget_peer(connection)
                connection.peer = peer
                self._peers[peer] = connection

    def sent(self, peer: bytes, size: int) -> None:
        connection = self._peers.get(peer)
        if connection is not None:
            connection.sent += size

    def stuck(self, peer: bytes) -> bool:
        connection = self._peers.get(peer)
        return connection is not None and connection.stuck()

    def drained(self) -> None:
        """Settle the connections without news: no whole message is left in libzmq."""
        for connection in self._connections.values():
            if connection.looks == 0:
                connection.settle()

    def open(self) -> list[PeerConnection]:
        self.hear()
        return list(self._connections.values())

    def unread(self) -> list[tuple[int, PeerConnection]]:
        """List (bytes held by libzmq, connection) for the connections that hold more than a handshake."""
        found = [(connection.unread(), connection) for connection in self.open()]
        return [(unread, connection) for unread, connection in found if unread > _HANDSHAKE]

    def close(self) -> None:
        self._router.disable_monitor()
        self.monitor.close(linger=0)
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def hear(self) -> None:
        while not self.monitor.closed:
            try:
                event, fd = struct.unpack_from("=Hi", self.monitor.recv_multipart(flags=zmq.NOBLOCK)[0])
            except zmq.Again:
                return
            self._forget(fd)
            if event == zmq.EVENT_ACCEPTED:
                self._admit(fd)

    def _admit(self, fd: int) -> None:
        try:
            connection = PeerConnection(fd)
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

    def _forget_peer(self, connection: PeerConnection) -> None:
        if self._peers.get(connection.peer) is connection:
            del self._peers[connection.peer]
