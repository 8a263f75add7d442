"""Peers of the public ZeroMQ sockets that take memory or descriptors: it costs them, and nobody else."""

from __future__ import annotations

import resource
import select
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from ssd.config.engine import ServerConfig
from ssd.config.params import SamplingParams
from ssd.errors import UsageError
from ssd.frontend import connection_limits
from ssd.frontend.connection_limits import http_connections
from ssd.ipc import peer_connections
from ssd.ipc.connection import Connection
from ssd.ipc.messages import Emission
from ssd.ipc.public import Chunk, Describe, Description, Failed, Generate
from tests.attacks.zeromq import wire, zmtp
from tests.frontend.raw_client import RawClient, prompt, scripted_frontend
from tests.scripted_engine import PATIENCE_S, ScriptedEngine, engine_config, gateway_process, scripted_engine

FRAME = 2**20
MOST = 200 * 2**20
DESCRIPTORS = 200


@dataclass
class Served:
    """A frontend as a process of its own, with both public sockets and an innocent stream."""

    engine: ScriptedEngine
    pid: int
    addresses: dict[str, str]
    innocent: RawClient
    request: int

    @property
    def memory(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * resource.getpagesize()

    def check(self) -> None:
        """The stream goes on."""
        self.engine.target.step(Emission(self.request, [28120]))
        assert isinstance(answer := self.innocent.receive(), Chunk) and answer.token_ids == [28120]


@contextmanager
def serving(descriptors: int | None = None) -> Iterator[Served]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        tcp = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    config = engine_config(server=ServerConfig(names=("scripted",), zmq_bind=tcp))
    with scripted_engine() as engine, gateway_process(engine, config) as process:
        if descriptors is not None:
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (descriptors, descriptors))
        engine.target.shake_hands()
        assert engine.status() == "ready"
        innocent = RawClient(engine.address)
        innocent.send(prompt(1, max_tokens=200))
        request = engine.target.next_submit().request
        yield Served(engine, process.pid, {"ipc": engine.address, "tcp": tcp}, innocent, request)
        innocent.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as served:
        yield served


def frame(size: int, more: bool) -> bytes:
    return struct.pack(">BQ", 2 + more, size) + bytes(size)


# -- messages without an end ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("door", ["ipc", "tcp"])
@pytest.mark.parametrize(
    ("sent", "most"),
    [(frame(FRAME, more=True), 1500), (b"\x01\x00" * 2**16, 150)],
    ids=["large frames", "small frames"],
)
def test_an_endless_message_costs_its_sender_the_connection(served: Served, door: str, sent: bytes, most: int) -> None:
    before = peak = served.memory
    other = RawClient(served.addresses[door])
    flooding = zmtp(served.addresses[door])
    with pytest.raises(OSError, match=r"Broken pipe|reset"):
        for _ in range(most * 2**20 // len(sent)):
            flooding.sendall(sent)
            peak = max(peak, served.memory)
    assert peak - before < MOST
    served.check()
    assert isinstance(other.ask(Describe()), Description)
    flooding.close()
    other.close()
    until_returned(served, before)


def until_returned(served: Served, before: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while served.memory - before > 32 * 2**20:
        assert time.monotonic() < deadline, "the memory was kept"
        time.sleep(0.05)


def test_many_peers_with_half_a_message_each_lose_it_but_not_who_sends_slowly(served: Served) -> None:
    """A slow one, who has sent less than they, ends its message while they are cut off. They come no faster than the
    frontend can look."""
    before = peak = served.memory
    other = RawClient(served.addresses["ipc"])
    message = wire(Generate(7, "x" * 2**20))
    slow = zmtp(served.addresses["tcp"])
    slow.sendall(message[: 2**19])
    holding = []
    for _ in range(80):
        holding.append(zmtp(served.addresses["ipc"]))
        holding[-1].sendall(frame(4 * 2**20, more=False)[:-10])
        assert isinstance(other.ask(Describe()), Description)
        time.sleep(connection_limits._LOOK_S / 4)
        peak = max(peak, served.memory)
    other.close()
    slow.sendall(message[2**19 :])
    assert b"context_length_exceeded" in until_said(slow)
    assert peak - before < MOST
    served.check()
    for each in (slow, *holding):
        each.close()
    until_returned(served, before)


def test_growth_that_is_not_theirs_costs_peers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beginnings of messages, or heartbeats, that are too few bytes to be its cause."""
    monkeypatch.setattr(connection_limits, "GROWTH_BYTES", 8 * 2**20)
    message = wire(Generate(7, "x" * 2**14))
    with scripted_frontend() as setup:
        peers = [zmtp(setup.engine.address) for _ in range(8)]
        for each in peers:
            each.sendall(message[: 10 * 2**10])
        hoard = b"x" * (64 * 2**20)
        for _ in range(10):
            assert isinstance(setup.client.ask(Describe()), Description)
            time.sleep(connection_limits._LOOK_S)
        del hoard
        for each in peers:
            each.sendall(message[10 * 2**10 :])
            assert until_said(each)
            each.close()


def until_said(made: socket.socket) -> bytes:
    """All that has come up to the reason of a failure."""
    heard = b""
    while b"Failed" not in heard or b"message" not in heard:
        heard += (part := made.recv(2**16))
        assert part, "the connection was closed"
    return heard


@pytest.mark.parametrize("door", ["ipc", "tcp"])
def test_who_sends_many_large_messages_is_answered(served: Served, door: str) -> None:
    before = peak = served.memory
    honest = Connection(served.addresses[door])
    count, sent, answered = 100, 0, 0
    message = Generate(9, "x" * (4 * 2**20 - 2000))
    while answered < count:
        if sent < count and honest.offer(message):
            sent += 1
        else:
            honest.wait(sending=not sent, deadline=time.monotonic() + 0.01)
        while (answer := honest.take()) is not None:
            assert isinstance(answer, Failed) and answer.code == "context_length_exceeded"
            answered += 1
        peak = max(peak, served.memory)
    assert peak - before < MOST
    honest.close()
    served.check()


# -- answers that nobody reads --------------------------------------------------------------------------------------


def test_large_answers_do_not_wait_in_the_transport_for_who_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they wait, limits on slow readers hold; who reads after all gets each."""
    monkeypatch.setattr(peer_connections, "UNSENT_BYTES", 2**16)
    asked, ids = 600, [40000] * 250
    with scripted_frontend() as setup:
        silent = zmtp(setup.engine.address)
        for name in range(asked):
            silent.sendall(wire(Generate(name, token_ids=ids, params=SamplingParams(max_tokens=1))))
            request = setup.engine.target.next_submit().request
            setup.engine.target.step(Emission(request, [], finish_reason="length"))
        assert isinstance(setup.client.ask(Describe()), Description)
        (client,) = setup.frontend._gateways[0]._clients.values()
        assert len(client.news) > asked // 4
        heard = b""
        while heard.count(b"\xa4Done") < asked:
            heard += (part := silent.recv(2**20))
            assert part, "the connection was closed"
        silent.close()


# -- connections ----------------------------------------------------------------------------------------------------


def test_idle_connections_do_not_use_up_the_descriptors() -> None:
    with serving(DESCRIPTORS) as served:
        host, _, port = served.addresses["tcp"].removeprefix("tcp://").rpartition(":")
        idle = [socket.socket() for _ in range(2 * DESCRIPTORS)]
        for made in idle:  # all at once: who waits for each waits for libzmq, which ends idle ones after 30 s
            made.setblocking(False)
            made.connect_ex((host, int(port)))
        deadline = time.monotonic() + PATIENCE_S
        while len(select.select([], idle, [], 0.1)[1]) <= DESCRIPTORS:
            assert time.monotonic() < deadline, "they never came"
        time.sleep(1.0)  # time to accept as many as it may
        served.check()
        for made in idle:
            made.close()
        for address in served.addresses.values():
            again = RawClient(address)
            assert isinstance(again.ask(Describe()), Description)
            again.close()


@pytest.fixture
def limited(request: pytest.FixtureRequest) -> int:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, before))
    resource.setrlimit(resource.RLIMIT_NOFILE, (request.param, before[1]))
    return int(request.param)


@pytest.mark.parametrize(("limited", "most"), [(1024, 768), (512, 256), (257, 1)], indirect=["limited"])
def test_256_are_kept(limited: int, most: int) -> None:
    assert http_connections(4224) == most
    assert http_connections(1) == 1


@pytest.mark.parametrize("limited", [256], indirect=True)
def test_fewer_are_an_error_that_says_so(limited: int) -> None:
    with pytest.raises(UsageError, match=r"HTTP needs more than 256 open files .* may have 256"):
        http_connections(4224)
