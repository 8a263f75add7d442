"""Attacks by what a connection does, or leaves undone."""

from __future__ import annotations

import random
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack

from tests.attacks.http_client import COMPLETIONS, connect, exchange, head, read, request
from tests.attacks.http_messages import question
from tests.attacks.registry import PATIENCE_S, Answer, Site, attack
from tests.attacks.zeromq import described

_IDLE = 1500  # connections: more than the test's engine may have open files
_LOOKS, _LOOK_S = 5, 0.2
_HALF_OPEN = 50
_HEAD_S = 10.0  # what the server waits for a head (docs/serving.md)


def healthy(site: Site) -> Answer:
    return exchange(site, head(site, "/health", 0, method="GET"))[0]


def reset(client: socket.socket) -> None:
    """Close with a reset."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


@attack("200", "described")
def idle_connections(site: Site) -> Iterator[Answer]:
    """More of them than there are descriptors, while a client comes over ZeroMQ. Afterwards there is room again."""
    with ExitStack() as stack:
        for _ in range(_IDLE):
            try:
                stack.enter_context(connect(site))
            except OSError:
                break
        for _ in range(_LOOKS):  # they are accepted by and by
            yield from described(site)
            time.sleep(_LOOK_S)
    yield healthy(site)


@attack("none")
def slow_heads(site: Site) -> Iterator[Answer]:
    """Heads and bodies of which a byte comes now and then: the head's time is over, however often something comes."""
    raw = request(site, COMPLETIONS, question(site))
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(site)) for _ in range(_HALF_OPEN)]
        began = time.monotonic()
        for byte in raw[:24]:
            for client in clients:
                try:
                    client.send(bytes([byte]))
                except OSError:
                    continue
            time.sleep(_HEAD_S / 20)
            if time.monotonic() > began + _HEAD_S + 1:
                break
        for client in clients:
            yield read(client)[0]


@attack("200")
def resets(site: Site) -> Iterator[Answer]:
    """Clients that are gone at any byte of a request."""
    dice = random.Random(3)
    raw = request(site, COMPLETIONS, question(site, stream=True, max_tokens=500))
    for _ in range(300):
        client = connect(site)
        client.sendall(raw[: dice.randint(0, len(raw))])
        reset(client)
    yield healthy(site)


@attack("200")
def streams_that_are_left(site: Site) -> Iterator[Answer]:
    """Streams whose clients go after the first bytes."""
    raw = request(site, COMPLETIONS, question(site, stream=True, max_tokens=4000, ignore_eos=True, n=8))
    for _ in range(100):
        client = connect(site)
        client.sendall(raw)
        client.recv(100)
        reset(client)
    yield healthy(site)


@attack("200")
def streams_that_nobody_reads(site: Site) -> Iterator[Answer]:
    """Long streams with a small window, of which nothing is taken."""
    raw = request(site, COMPLETIONS, question(site, stream=True, max_tokens=8000, ignore_eos=True, n=8, logprobs=20))
    with ExitStack() as stack:
        for _ in range(16):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(PATIENCE_S)
            client.connect(("127.0.0.1", site.port))
            client.sendall(raw)
        for _ in range(20):
            yield healthy(site)
            time.sleep(0.15)


@attack("200")
def connections_that_come_and_go(site: Site) -> Iterator[Answer]:
    """A thousand connections that say nothing."""
    for _ in range(1000):
        connect(site).close()
    yield healthy(site)


@attack("200", "none")
def requests_without_a_reader(site: Site) -> Iterator[Answer]:
    """A client that asks on and on over one connection and reads no answer."""
    raw = request(site, COMPLETIONS, question(site))
    with connect(site) as client:
        client.settimeout(0.5)
        try:
            for _ in range(3000):
                client.sendall(raw)
        except OSError:
            pass
    yield healthy(site)
