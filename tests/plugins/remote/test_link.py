"""Attacks on the door for drafts of other machines: the receiver lives, and takes an honest draft after each."""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from ssd.plugins.remote.link import Joined, Offer
from tests.attacks.zeromq import connected, wire, zmtp
from tests.plugins.remote.world import World

_FLOOD_S = 2.0
_OPEN = 140  # connections: more than the receiver takes
_PING = b"\x04\x07\x04PING\x00\x00"
_EMPTY = b"\x01\x00\x00\x00"  # a message of two empty frames


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("link"), secured=False)
    with world.running():
        yield world


@pytest.fixture(scope="module")
def expected(world: World) -> list[list[int]]:
    return world.ids("ar")[0]


def reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def flood(address: str, data: bytes, at_once: int = 1) -> None:
    """Send the same again and again for some seconds over several connections, each anew where it is cut off."""
    until = time.monotonic() + _FLOOD_S

    def one() -> None:
        while time.monotonic() < until:
            with suppress(OSError, AssertionError), zmtp(address) as client:
                while time.monotonic() < until:
                    client.sendall(data)
                reset(client)

    threads = [threading.Thread(target=one) for _ in range(at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def other_vocabularies(address: str) -> None:
    """Each offer is answered with the target's vocabulary, which nobody reads."""
    flood(address, wire(Offer("liar", "another one", 300)) * 1000, at_once=4)


def offers(address: str) -> None:
    flood(address, wire(Offer("liar", "", 300)) * 1000 + wire(Joined()) * 1000, at_once=4)


def messages_of_no_bytes(address: str) -> None:
    flood(address, _EMPTY * 20_000, at_once=4)


def messages_without_an_end(address: str) -> None:
    flood(address, b"\x01\x00" * 50_000, at_once=4)


def large_frames_without_an_end(address: str) -> None:
    flood(address, (b"\x03" + struct.pack(">Q", 60_000) + bytes(60_000)) * 16, at_once=4)


def resets_before_a_heartbeat_is_handled(address: str) -> None:
    """Libzmq aborts where a peer does this to a queue that is full."""
    until = time.monotonic() + _FLOOD_S
    while time.monotonic() < until:
        with ExitStack() as stack, suppress(OSError, AssertionError):
            clients = [stack.enter_context(zmtp(address)) for _ in range(8)]
            for client in clients:
                client.sendall((_EMPTY * 200 + _PING) * 10)
            for client in clients:
                reset(client)


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(other_vocabularies, marks=pytest.mark.thorough),
        offers,
        messages_of_no_bytes,
        pytest.param(messages_without_an_end, marks=pytest.mark.thorough),
        large_frames_without_an_end,
        resets_before_a_heartbeat_is_handled,
    ],
)
def test_a_peer_of_the_link_costs_nobody_else(
    world: World, expected: list[list[int]], attack: Callable[[str], None]
) -> None:
    receiver = world.engine.pids["draft"]
    attack(world.bind)
    with world.draft():
        world.until_hits(expected)
    assert world.engine.pids["draft"] == receiver


@contextmanager
def silent_connections(address: str) -> Iterator[None]:
    """Keep more connections open than the receiver takes, each anew where it is closed."""
    clients: dict[int, socket.socket] = {}
    poller, ended = select.poll(), threading.Event()

    def connect() -> None:
        client = connected(address)
        clients[client.fileno()] = client
        poller.register(client, select.POLLRDHUP)

    def keep() -> None:
        while not ended.is_set():
            for closed, _ in poller.poll(10):
                poller.unregister(closed)
                clients.pop(closed).close()
                connect()

    for _ in range(_OPEN):
        connect()
    thread = threading.Thread(target=keep)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        for client in clients.values():
            client.close()


def test_silent_connections_keep_no_draft_out(world: World, expected: list[list[int]]) -> None:
    with silent_connections(world.bind), world.draft():
        world.until_hits(expected)
