"""Limits on clients' connections, which libzmq does not bound (`ssd.ipc.peer_connections`)."""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from ssd.errors import UsageError
from ssd.ipc import sockets
from ssd.ipc.peer_connections import PeerConnection, PeerConnections
from ssd.system.allocator import give_back_freed

log = logging.getLogger("ssd.frontend")

UNREAD_BYTES = (sockets.PUBLIC_QUEUE + 2) * sockets.PUBLIC_BYTES
"""Most bytes that libzmq may hold of one connection: a full queue, a message just complete and one on its way."""
GROWTH_BYTES = 96 * 2**20
"""Bytes that the process may grow by while messages are coming."""

_LOOK_S = 0.05
_LOOKS = 2  # looks before a peer is cut: its message may be about to complete
_TRIM_S = 1.0
_WORDS_S = 60.0
_TRIM_BYTES = 8 * 2**20
_NOTHING = 64 * 2**10  # bytes: messages on their way in normal operation
_FRAME_COST = 64  # memory of the smallest frame / its bytes; unread bytes cannot explain more growth than this factor

_PAGE = resource.getpagesize()
_RESERVED_DESCRIPTORS = 256  # for ZeroMQ, shared memory and files


def http_connections(wanted: int) -> int:
    """Return how many of `wanted` HTTP connections may be open at once. Raises UsageError if none may.

    libzmq ends a process that has no descriptors left for its sockets."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    if soft <= _RESERVED_DESCRIPTORS:
        raise UsageError(
            f"HTTP needs more than {_RESERVED_DESCRIPTORS} open files (ulimit -n), and this process may have {soft}"
        )
    return min(wanted, soft - _RESERVED_DESCRIPTORS)


class ConnectionGuard:
    """Keeps the memory that libzmq holds for peers within limits, by closing connections.

    `spoken_for` returns the bytes that came out of libzmq and are counted elsewhere."""

    def __init__(self, spoken_for: Callable[[], int]) -> None:
        self._spoken_for = spoken_for
        self._watched: list[PeerConnections] = []
        self._base = self._memory()
        self._next_trim = self._next_word = 0.0
        self._unsaid = 0
        self._loop = asyncio.get_running_loop()
        self._next_look = self._loop.call_later(_LOOK_S, self._look)

    def watch(self, router: zmq.Socket[bytes]) -> PeerConnections:
        """Limit the connections of `router` from now on; it must not be bound yet."""
        peers = PeerConnections(router, self._close)
        self._loop.add_reader(peers.monitor.FD, peers.hear)
        peers.hear()
        self._watched.append(peers)
        return peers

    def close(self) -> None:
        self._next_look.cancel()
        for peers in self._watched:
            self._loop.remove_reader(peers.monitor.FD)
            peers.close()

    def _look(self) -> None:
        began = time.thread_time()
        holders = [holder for peers in self._watched for holder in peers.unread()]
        # Looking takes at most a twentieth of the time, however many connections there are.
        self._next_look = self._loop.call_later(max(_LOOK_S, 20 * (time.thread_time() - began)), self._look)
        self._balance(holders)

    def _balance(self, holders: list[tuple[int, PeerConnection]]) -> None:
        """Cut peers that hold too much and, if all together hold too much, those that hold most."""
        if any(connection.closing for _, connection in holders):
            return  # their memory is about to be freed
        for unread, connection in holders:
            if unread > UNREAD_BYTES:
                self._cut(connection, unread)
        held = sum(unread for unread, _ in holders)
        if held < _NOTHING:
            self._settle()
        elif _FRAME_COST * held > GROWTH_BYTES and self._memory() > self._base + GROWTH_BYTES:
            self._trim()
            self._relieve(self._memory() - self._base - GROWTH_BYTES, holders)

    def _relieve(self, excess: int, holders: list[tuple[int, PeerConnection]]) -> None:
        # Peers that hold less than half of the largest, or have just connected, wait for another look: small frames
        # take more memory than their bytes, so `excess` may be too large.
        most = max(unread for unread, _ in holders)
        for unread, connection in sorted(holders, key=lambda holder: holder[0], reverse=True):
            if excess <= 0 or unread < most // 2:
                break
            excess -= unread
            if connection.looks >= _LOOKS:
                self._cut(connection, unread)

    def _cut(self, connection: PeerConnection, unread: int) -> None:
        self._close(connection, f"it had sent {unread // 2**10} KiB without the end of a message")

    def _close(self, connection: PeerConnection, why: str) -> None:
        connection.cut()
        now = time.monotonic()
        self._next_trim = now + _TRIM_S
        self._unsaid += 1
        if now >= self._next_word:
            log.warning("connections of clients closed: %d; the last one because %s", self._unsaid, why)
            self._unsaid, self._next_word = 0, now + _WORDS_S

    def _settle(self) -> None:
        # Growth is measured from here, while no message is coming.
        if self._memory() > self._base + _TRIM_BYTES and time.monotonic() >= self._next_trim:
            self._trim()
            self._base = self._memory()
        self._base = min(self._base, self._memory())

    def _trim(self) -> None:
        give_back_freed()
        self._next_trim = time.monotonic() + _TRIM_S

    def _memory(self) -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE - self._spoken_for()
