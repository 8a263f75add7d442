"""Results are never dropped, and never wait for ever; no socket is without its limits."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from ssd.errors import SsdError
from ssd.ipc import keys, sockets
from ssd.ipc.connection import Connection
from ssd.ipc.curve import client_keys, secure_router
from ssd.ipc.messages import Drain, Step, internal
from ssd.ipc.public import Describe, unpack

DRAIN_OR_STEP = internal(Drain | Step)
# Prints how many signals came while messages were read, and how many of their exceptions.
RINGING = """
import random, signal, zmq
from ssd.ipc import sockets
from ssd.ipc.messages import Drain, internal

class Rung(KeyboardInterrupt): ...

def ring(*_):
    global rung
    rung += 1
    raise Rung

rung = caught = 0
signal.signal(signal.SIGALRM, ring)
with zmq.Context() as context:
    for number in range(500):
        with context.socket(zmq.PAIR) as sender, context.socket(zmq.PAIR) as reader:
            sender.bind(f"inproc://{number}")
            reader.connect(f"inproc://{number}")
            for _ in range(60):
                sockets.send(sender, Drain(1.0))
            before = rung
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(2e-5, 2e-4))
                while rung == before:
                    sockets.receive(reader, internal(Drain))
            except Rung:
                caught += 1
print(rung, caught)
"""


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """A router, and a peer of its that has as many messages unread as the transport takes."""
    address = f"ipc://{tmp_path}/s"
    with (
        zmq.Context() as context,
        sockets.router(context, address) as router,
        sockets.dealer(context, address, b"slow") as peer,
    ):
        sockets.send(peer, Describe())
        assert router.poll(5000)
        full = 0
        while full < 20:  # the transport moves some of them on, a little later
            sent = sockets.send(router, Drain(1.0), to=b"slow")
            full = 0 if sent else full + 1
            if not sent:
                time.sleep(0.005)
        yield router, peer


def test_a_result_waits_for_its_receiver(slow: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]) -> None:
    router, peer = slow
    arrived: list[Any] = []

    def read() -> None:
        while not arrived or isinstance(arrived[-1], Drain):
            assert peer.poll(5000)
            arrived.append(unpack(peer.recv_multipart(), DRAIN_OR_STEP)[1])

    reader = threading.Timer(0.05, read)
    reader.start()
    assert sockets.deliver(router, Step([]), 3, b"slow")
    reader.join()
    assert arrived[-1] == Step([])


def test_a_result_does_not_wait_for_ever(
    slow: tuple[zmq.Socket[bytes], zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "_PATIENCE_S", 0.05)
    with pytest.raises(SsdError, match="took no results"):
        sockets.deliver(slow[0], Step([]), 3, b"slow")


def test_a_result_for_nobody_is_told_at_once(slow: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]) -> None:
    assert not sockets.deliver(slow[0], Step([]), 3, b"gone")


def test_ctrl_c_is_not_lost_while_a_message_is_read() -> None:
    """pyzmq's own frames call signal handlers when they end, where an exception can only be printed."""
    done = subprocess.run([sys.executable, "-c", RINGING], capture_output=True, text=True)
    assert done.stdout.split() == ["500", "500"] and not done.stderr


def test_every_socket_has_its_limits(tmp_path: Path) -> None:
    keys.new_server(tmp_path / "keys")
    own = client_keys(keys.new_client(tmp_path / "keys", "laptop"))
    internal, public, results, at_once = sockets.INTERNAL_BYTES, sockets.PUBLIC_BYTES, 1000, 0
    made: list[tuple[zmq.Socket[bytes], int, int]] = []
    with zmq.Context() as context:
        made.append((sockets.router(context, f"ipc://{tmp_path}/r"), internal, results))
        made.append((for_clients := sockets.public_router(context), public, results))
        made.append((over_tcp := sockets.router(context, "tcp://127.0.0.1:*"), internal, results))
        made.append((secure := secure_router(context, tmp_path / "keys"), public + 33, results))
        for_clients.bind(f"ipc://{tmp_path}/p")
        secure.bind("tcp://127.0.0.1:*")
        made.append((sockets.dealer(context, f"ipc://{tmp_path}/r"), internal, at_once))
        address = secure.getsockopt_string(zmq.LAST_ENDPOINT)
        connections = [Connection(address, own), Connection(f"ipc://{tmp_path}/p")]
        made += [(connection._socket, internal + 33, at_once) for connection in connections]
        for socket, bytes_, linger in made:
            unread = sockets.PUBLIC_QUEUE if socket in (for_clients, secure) else sockets.HIGH_WATER_MARK
            assert socket.getsockopt(zmq.SNDHWM) == sockets.HIGH_WATER_MARK
            assert socket.getsockopt(zmq.RCVHWM) == unread
            assert (socket.getsockopt(zmq.MAXMSGSIZE), socket.getsockopt(zmq.LINGER)) == (bytes_, linger)
        for socket in (over_tcp, secure, connections[0]._socket):
            assert socket.getsockopt(zmq.HEARTBEAT_IVL) == 15_000
            assert socket.getsockopt(zmq.HEARTBEAT_TIMEOUT) == 60_000
        for connection in connections:
            connection.close()
        context.destroy(linger=0)
