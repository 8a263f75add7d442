"""Who gets through to a secure ROUTER, and what those who do not can do to it. It answers from its own process."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq

from ssd.client import AsyncClient, Client
from ssd.config.params import SamplingParams
from ssd.errors import EngineDeadError
from ssd.ipc import curve, keys, sockets
from ssd.ipc.connection import Connection, validate
from ssd.ipc.public import Generate, pack

ANSWERS = """
import sys, zmq
from pathlib import Path
from ssd.ipc import curve, sockets
from ssd.ipc.public import *
from ssd.config.params import Speculation

router = curve.secure_router(zmq.Context(), Path(sys.argv[1]))
router.bind(sys.argv[2])
print(router.getsockopt_string(zmq.LAST_ENDPOINT), flush=True)
while True:
    router.poll()
    peer, _, message = sockets.receive(router, CLIENT_TO_FRONTEND)
    if isinstance(message, Describe):
        answer = Description("answers", [], "", Speculation("ar"), 1, 1, False)
    elif message.prompt == "endless":
        answer = Chunk(message.id, "x", [1])
    else:
        answer = Done(message.id, "stop", str(len(message.prompt)), [], Usage(0, 0), Metrics())
    sockets.send(router, answer, to=peer)
"""


@dataclass
class Server:
    directory: Path
    address: str
    pid: int

    @property
    def client(self) -> Path:
        return self.directory / "clients" / "laptop"

    @property
    def resident_bytes(self) -> int:
        pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def answering(directory: Path, address: str = "tcp://127.0.0.1:*") -> Iterator[Server]:
    command = [sys.executable, "-c", ANSWERS, str(directory), address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield Server(directory, process.stdout.readline().strip(), process.pid)
        process.kill()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("curve") / "keys"
    keys.new_server(directory)
    keys.new_client(directory, "laptop")
    return directory


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[Server]:
    with answering(directory) as server:
        yield server


def test_a_client_on_the_list_talks(server: Server) -> None:
    with Client(server.address, keys=server.client) as client:
        assert client.describe().model == "answers"
        assert client.generate("four").text == "4"


def test_frames_may_be_as_large_as_without_encryption(server: Server) -> None:
    request = Generate(1, "", params=SamplingParams())
    size = sockets.PUBLIC_BYTES - len(pack(request)[1]) - 4  # a longer text has a longer length field
    validate(Generate(1, "x" * size, params=SamplingParams()))
    with Client(server.address, keys=server.client) as client:
        assert client.generate("x" * size, timeout=20).text == str(size)


def test_a_larger_frame_ends_the_connection(server: Server) -> None:
    connection = Connection(server.address, curve.client_keys(server.client))
    while not connection.offer(Generate(1, "x" * sockets.PUBLIC_BYTES)):
        connection.wait(sending=True, deadline=None)
    while (answer := connection.take()) is None:
        connection.wait(sending=False, deadline=None)
    assert isinstance(answer, EngineDeadError)
    connection.close()


@pytest.mark.parametrize("intruder", ["without keys", "with a key of its own", "for another engine"])
def test_others_do_not(server: Server, tmp_path: Path, intruder: str) -> None:
    folder: Path | None = None
    if intruder != "without keys":
        keys.new_server(tmp_path / "keys")
        folder = keys.new_client(tmp_path / "keys", "intruder")
    if folder is not None and intruder == "with a key of its own":
        (folder / "server.pub").write_text((server.directory / "server.pub").read_text())
    with pytest.raises(EngineDeadError):
        Client(server.address, timeout=0.5, keys=folder)


def test_the_list_is_read_at_each_handshake(server: Server) -> None:
    folder = keys.new_client(server.directory, "guest")
    (server.directory / "authorized" / "broken.pub").write_text("no key")
    os.mkfifo(server.directory / "authorized" / "a-pipe.pub")
    with Client(server.address, keys=folder) as client:
        (server.directory / "authorized" / "guest.pub").unlink()
        assert client.describe().model == "answers", "who is in stays in"
    with pytest.raises(EngineDeadError, match="does not accept this client's key"):
        Client(server.address, keys=folder)


def test_a_client_that_is_shut_out_is_told_so_and_may_come_back(directory: Path) -> None:
    folder = keys.new_client(directory, "visitor")
    with answering(directory) as before:
        client = Client(before.address, keys=folder)
        stream = client.stream("endless")
        assert next(stream).text.startswith("x")
    authorization = (directory / "authorized" / "visitor.pub").rename(directory / "visitor.pub")
    with answering(directory, before.address):
        time.sleep(0.5)  # the transport connects again by itself, and is refused
        with pytest.raises(EngineDeadError, match="does not accept this client's key"):
            client.describe()
        with pytest.raises(EngineDeadError):
            next(stream)
        authorization.rename(directory / "authorized" / "visitor.pub")
        assert client.describe().model == "answers"
    client.close()


def test_a_client_that_was_refused_may_try_again(server: Server, tmp_path: Path) -> None:
    async def body() -> None:
        folder = keys.new_client(server.directory, "early")
        authorization = (server.directory / "authorized" / "early.pub").rename(tmp_path / "early.pub")
        client = AsyncClient(server.address, keys=folder)
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="does not accept this client's key"):
                await client.describe()
        authorization.rename(server.directory / "authorized" / "early.pub")
        assert (await client.describe()).model == "answers"
        await client.close()

    asyncio.run(asyncio.wait_for(body(), 20))


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01"
CURVE = GREETING + b"CURVE".ljust(20, b"\0") + bytes(32)
GARBAGE = {
    "nothing": b"",
    "half a greeting": GREETING,
    "random bytes": os.urandom(100_000),
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "no encryption": GREETING + b"NULL".ljust(20, b"\0") + bytes(32) + b"\x04\x05READY",
    "half a hello": CURVE + b"\x04\xc8\x05HELLO\x01",
    "a false hello": CURVE + b"\x04\xc8\x05HELLO\x01\0" + os.urandom(192),
    "a frame of exabytes": CURVE + b"\x02" + b"\x3f" + b"\xff" * 7,
    "a frame of megabytes": CURVE + b"\x06" + (4 * 2**20).to_bytes(8, "big") + os.urandom(2**20),
    "many frames": CURVE + (b"\x01\xff" + bytes(255)) * 1000,
}


@contextmanager
def flood(address: str, each: int) -> Iterator[None]:
    """Many peers, which say one kind of garbage or another and then say nothing more."""
    host, port = address.removeprefix("tcp://").split(":")
    with ExitStack() as stack:
        for garbage in list(GARBAGE.values()) * each:
            peer = stack.enter_context(socket.create_connection((host, int(port))))
            peer.settimeout(0.2)
            with suppress(OSError):  # thrown out already, or not listened to
                peer.sendall(garbage)
        yield


def test_garbage_disturbs_nobody_and_takes_no_memory(server: Server) -> None:
    with Client(server.address, keys=server.client) as client:
        with flood(server.address, 2):
            client.describe()
        before = server.resident_bytes
        for _ in range(3):
            with flood(server.address, 20):
                assert client.generate("four", timeout=20).text == "4"
                with Client(server.address, keys=server.client) as another:
                    assert another.describe().model == "answers"
        assert server.resident_bytes < before + 32 * 2**20


def test_without_its_guard_nobody_gets_in(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curve, "_guard", lambda context, directory: None)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = curve.secure_router(context, server.directory)
    router.bind("tcp://127.0.0.1:*")
    with pytest.raises(EngineDeadError, match="no engine answers"):
        Client(router.getsockopt_string(zmq.LAST_ENDPOINT), timeout=0.3, keys=server.client)
    context.destroy(linger=0)


def test_the_guard_ends_with_its_context(server: Server) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    curve.secure_router(context, server.directory)
    (guard,) = [thread for thread in threading.enumerate() if thread.name == "ssd-curve"]
    context.destroy(linger=0)
    guard.join(10)
    assert not guard.is_alive()


def test_a_list_that_cannot_be_read_lets_nobody_in_and_is_read_again(directory: Path) -> None:
    key = keys.load_public(directory / "authorized" / "laptop.pub")
    listed = curve._AllowList(directory)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        assert not listed.callback("", key)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert listed.callback("", key)
