"""A target that follows a script, behind the real protocol, and the real gateway in front of it; no torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import uvloop
import zmq

from ssd.config.engine import EngineConfig, ServerConfig
from ssd.config.params import Speculation
from ssd.frontend.process import Frontend
from ssd.ipc import board, sockets
from ssd.ipc.messages import (
    CHILD_TO_SUPERVISOR,
    PEER_TO_TARGET,
    Abort,
    Drain,
    Emission,
    Hello,
    Ready,
    Step,
    Submit,
)
from ssd.ipc.process import Child, Start, memory_file
from ssd.ipc.public import Message
from ssd.system.interpreter import child_command

MODEL = Path(__file__).parent.parent / "ssd" / "models" / "builtin" / "smollm2-draft"
SMALL: dict[str, Any] = {
    "target": str(Path(__file__).parent / "models" / "small"),
    "load_format": "dummy",
    "mode": "ar",
}
"""Options of a real engine that starts soon: one small model of random weights."""
PATIENCE_S = 90.0

Script = Callable[[Submit], Iterable[Emission]]


def engine_config(**changes: Any) -> EngineConfig:
    """A small engine around the packaged tokenizer, with plain decoding unless told otherwise."""
    plain = EngineConfig(
        target=str(MODEL),
        target_name="scripted",
        speculation=Speculation("ar"),
        server=ServerConfig(names=("scripted",)),
        max_model_len=256,
        digest="d1",
        vocab_size=49152,
    )
    return msgspec.structs.replace(plain, **changes)


class ScriptedTarget:
    """The target's ROUTER in the hands of a test: it reads what the gateway sends and emits what the test says."""

    def __init__(self, address: str) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.open: set[int] = set()
        self.aborted: list[int] = []
        self._router = sockets.router(self.context, address)
        self._peer = b""
        self._submits: deque[Submit] = deque()

    def shake_hands(self) -> Hello:
        self._peer, hello = self._receive()
        assert isinstance(hello, Hello)
        self._send(Ready())
        return hello

    def next_submit(self) -> Submit:
        return self._until(lambda: self._submits.popleft() if self._submits else None)

    def wait_abort(self, request: int) -> None:
        self._until(lambda: request in self.aborted or None)

    def step(self, *emissions: Emission) -> None:
        self.open -= {emission.request for emission in emissions if emission.finish_reason is not None}
        self._send(Step(list(emissions)))

    def garbage(self, *frames: bytes) -> None:
        self._router.send_multipart([self._peer, *frames])

    def pump(self, timeout_ms: int = 0) -> None:
        """Take in what has arrived."""
        while self._router.poll(timeout_ms):
            _, message = self._receive()
            if isinstance(message, Submit):
                self._submits.append(message)
                self.open.add(message.request)
            elif isinstance(message, Abort):
                self.aborted.append(message.request)
                self.open.discard(message.request)
            timeout_ms = 0

    def follow(self, script: Script, stop: threading.Event) -> None:
        """Answer every request by `script`, one emission of each in turn, until `stop`."""
        running: dict[int, Iterator[Emission]] = {}
        while not stop.is_set():
            self.pump(1 if running else 20)
            while self._submits:
                submit = self._submits.popleft()
                running[submit.request] = iter(script(submit))
            for request in [request for request in running if request not in self.open]:
                del running[request]
            emissions = [emission for stream in running.values() if (emission := next(stream, None)) is not None]
            if emissions:
                self.step(*emissions)

    def _until(self, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while (found := condition()) is None:
            assert time.monotonic() < deadline, "the gateway did not send what was expected"
            self.pump(100)
        return found

    def _receive(self) -> tuple[bytes, Any]:
        assert self._router.poll(int(1000 * PATIENCE_S)), "nothing came from the gateway"
        received = sockets.receive(self._router, PEER_TO_TARGET)
        assert received is not None
        return received[0], received[2]

    def _send(self, message: Message) -> None:
        assert sockets.send(self._router, message, to=self._peer)


class ScriptedEngine:
    """Supervisor, target and clients' address of one gateway."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.address = f"ipc://{directory}/{sockets.CLIENT}"
        self.target = ScriptedTarget(f"ipc://{directory}/{sockets.ENGINE}")
        self._supervisor = sockets.router(self.target.context, f"ipc://{directory}/{sockets.SUPERVISOR}")

    def status(self) -> str:
        """The next status of the gateway: its state, and its message if it has one."""
        assert self._supervisor.poll(int(1000 * PATIENCE_S)), "no status from the gateway"
        received = sockets.receive(self._supervisor, CHILD_TO_SUPERVISOR)
        assert received is not None
        return str(received[2].state + (received[2].message and f": {received[2].message}"))

    def notice(self) -> None:
        """As a supervisor that polls all the time, see that a gateway has left, before the next one takes its name."""
        self._supervisor.poll(200)

    def drain(self, seconds: float = PATIENCE_S) -> None:
        assert sockets.send(self._supervisor, Drain(seconds), to=b"frontend")

    def close(self) -> None:
        self.target.context.destroy(linger=0)


@contextmanager
def scripted_engine() -> Iterator[ScriptedEngine]:
    """Sockets in a directory with a short path."""
    directory = tempfile.mkdtemp(prefix="ssd-test-", dir="/tmp")
    engine = ScriptedEngine(directory)
    try:
        yield engine
    finally:
        engine.close()
        shutil.rmtree(directory, ignore_errors=True)  # a gateway that ends removes it too


@contextmanager
def gateway_thread(engine: ScriptedEngine, config: EngineConfig, http_fd: int = -1) -> Iterator[Frontend]:
    """The real frontend in a thread, ready; drained at the end."""
    child = Child(Start("frontend", 7, engine.directory, config, (), -1, -1, http_fd=http_fd))
    frontend = Frontend(child)

    def serve() -> None:
        uvloop.run(frontend.serve())
        child.stopped()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        engine.target.shake_hands()
        assert engine.status() == "ready"
        yield frontend
    finally:
        if thread.is_alive():
            engine.drain()
        while thread.is_alive():
            engine.target.pump(10)
            if engine.target.open:
                engine.target.step(*[Emission(request, [], finish_reason="abort") for request in engine.target.open])
        thread.join()
        child.close()


@contextmanager
def gateway_process(
    engine: ScriptedEngine, config: EngineConfig, http_fd: int = -1, descriptors: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """The real gateway as its own process, which may have so many descriptors."""
    with child_process("frontend", "ssd.frontend", engine.directory, config, http_fd, descriptors) as process:
        yield process


@contextmanager
def child_process(
    role: str, package: str, directory: str, config: EngineConfig, http_fd: int = -1, descriptors: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process of an engine as the supervisor starts it; not waited for."""
    death_read, death_write = os.pipe()
    board_fd = memory_file("board", board.size_bytes(config.max_num_seqs))
    start = Start(role, 7, directory, config, (), death_read, board_fd, http_fd=http_fd)
    payload = os.memfd_create("start")
    os.write(payload, msgspec.json.encode(start))
    os.lseek(payload, 0, os.SEEK_SET)
    command = child_command("ssd.ipc", package, str(payload))
    if descriptors is not None:
        command = ["sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh", *command]
    inherited = [payload, death_read, board_fd] + ([http_fd] if http_fd >= 0 else [])
    process = subprocess.Popen(command, pass_fds=inherited)
    for descriptor in (payload, death_read, board_fd):
        os.close(descriptor)
    try:
        yield process
    finally:
        os.close(death_write)
        process.wait(PATIENCE_S)


def text_processes() -> list[int]:
    """This process's text server and the processes that it has forked."""
    mine = [int(pid) for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()]
    servers = [pid for pid in mine if b"text_server" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    found = list(servers)
    for pid in servers:
        found += [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return found


@contextmanager
def following(engine: ScriptedEngine, script: Script) -> Iterator[None]:
    """Let the target answer by itself, in a thread, while the test talks as a client."""
    stop = threading.Event()
    thread = threading.Thread(target=engine.target.follow, args=(script, stop))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
