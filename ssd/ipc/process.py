"""A child process: how it starts, reports to its supervisor, and ends with it."""

from __future__ import annotations

import ctypes
import importlib
import logging
import mmap
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from ssd.config.engine import EngineConfig
from ssd.config.roles import FOLLOWERS, ROLES
from ssd.errors import SsdError, UsageError, out_of_memory
from ssd.ipc import run_directory, sockets
from ssd.ipc.messages import ArenaHandle, DraftWanted, FrontendReport, Hello, Loading, Ready, Status
from ssd.ipc.public import Message
from ssd.ipc.trace_ring import NO_TRACE, TRACED, State, TraceRing

log = logging.getLogger("ssd.ipc")

IDLE_MS = 100
"""Longest sleep of an engine without work, before it shows a heartbeat again."""

_PR_SET_PDEATHSIG = 1
_LOADING_S = 0.1  # between two messages
_BEATS = {role: place for place, role in enumerate((*ROLES, *FOLLOWERS))}
HEARTBEAT_BYTES = 8 * len(_BEATS)


class Heartbeats:
    """Counters of the turns of each process's loop, in the memory of `descriptor`; -1 allocates private memory.

    A hang shows only here: ZeroMQ's threads go on in a process that does nothing."""

    def __init__(self, descriptor: int) -> None:
        self._turns = memoryview(mmap.mmap(descriptor, HEARTBEAT_BYTES)).cast("q")

    def beat(self, role: str) -> None:
        """Count one more turn of the loop of `role`. Only that process may call it."""
        self._turns[_BEATS[role]] += 1

    def turns(self, role: str) -> int:
        return self._turns[_BEATS[role]]


class Start(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of a child, which it reads at its start as JSON from an inherited file descriptor.

    `death_fd` reaches end of file when the supervisor ends. `http_fd` is HTTP's listening socket, the other descriptors
    are memfds; -1: the child needs none. Without `kernels` the child computes by torch alone. The ranks of a target
    share a `group`, the epoch of its first rank; on several machines they meet in the store at `meeting`, "HOST:PORT".
    """

    role: str
    epoch: int
    run_directory: str
    config: EngineConfig
    cpus: tuple[int, ...]
    death_fd: int
    board_fd: int
    draft_probs_fd: int = -1
    features_fd: int = -1
    heartbeat_fd: int = -1
    trace_fd: int = -1
    http_fd: int = -1
    kernels: bool = True
    rank: int = 0
    group: int = 0
    meeting: str = ""


class Child:
    def __init__(self, start: Start, cores: Iterable[int] = ()) -> None:
        """Open the shared memory and connect to the supervisor; ZeroMQ's threads run on `cores`, if any."""
        self.start = start
        self.config = start.config
        self.epoch = start.epoch
        self._heartbeats = Heartbeats(start.heartbeat_fd)
        self.trace = TraceRing(start.trace_fd, start.role) if start.role in TRACED else NO_TRACE
        self.trace.enter(State.LOADING)
        self.context: zmq.Context[Any] = zmq.Context()
        for core in cores:
            self.context.set(zmq.THREAD_AFFINITY_CPU_ADD, core)
        self._loading_told = 0.0
        self.supervisor = sockets.dealer(self.context, self.address(sockets.SUPERVISOR), start.role.encode())

    def address(self, name: str) -> str:
        return f"ipc://{self.start.run_directory}/{name}"

    def beat(self) -> None:
        self._heartbeats.beat(self.start.role)

    def loading(self, done: int, total: int) -> None:
        """Report progress in reading weights, in bytes, at most ten times a second. The message may be lost."""
        if (now := time.monotonic()) >= self._loading_told + _LOADING_S:
            self._loading_told = now
            self._tell(Loading(done, total))

    def ready(self) -> None:
        self._tell(Status(self.start.role, "ready"))

    def stopped(self) -> None:
        self._tell(Status(self.start.role, "stopped"))

    def failed(self, message: str, exit_code: int) -> None:
        self._tell(Status(self.start.role, "failed", message[:65536], exit_code))

    def want_draft(self) -> None:
        self._tell(DraftWanted())

    def report(self, report: FrontendReport) -> None:
        self._tell(report)

    def _tell(self, message: Message) -> None:
        sockets.send(self.supervisor, message, self.epoch)

    def answer_hello(
        self, socket: zmq.Socket[bytes], peer: bytes, hello: Hello, arenas: Sequence[ArenaHandle] = ()
    ) -> None:
        """Answer a peer of the target, a draft with the exported `arenas`."""
        if not sockets.send(socket, Ready(list(arenas) if hello.role == "draft" else []), self.epoch, peer):
            log.warning("%r was gone before it was answered", peer)

    def close(self) -> None:
        self.supervisor.setsockopt(zmq.LINGER, 1000)
        self.context.destroy()


def run() -> None:
    """Call `main(child)` of the module NAME, or of `process` in the package NAME; end with its exit code.

    The module is imported last: loading torch takes a second, in which the parent may already die."""
    name, descriptor = sys.argv[1], int(sys.argv[2])
    with os.fdopen(descriptor, "rb") as file:
        start = msgspec.json.decode(file.read(), type=Start)
    logging.basicConfig(stream=sys.stderr, level=log_level(), format=f"ssd {start.role}: %(message)s")
    cores = os.sched_getaffinity(0)
    if start.cpus:
        os.sched_setaffinity(0, start.cpus)
    _die_with_parent(start)
    # On one core, each message would stop this process for ZeroMQ's thread.
    child = Child(start, cores if start.cpus else ())
    code = 0
    try:
        found = importlib.import_module(name)
        module = importlib.import_module(f"{name}.process") if hasattr(found, "__path__") else found
        module.main(child)
    except SsdError as error:
        code = error.exit_code
        child.failed(str(error), code)
    except Exception as error:
        code = 1
        said = out_of_memory(error)
        if not said:
            logging.getLogger("ssd").exception("a bug, or a broken machine:")
        child.failed(said or f"{type(error).__name__}: {error}", code)
    child.close()
    os._exit(code)


def log_level() -> str:
    """Return the level named by SSD_LOG. Raises UsageError for any other word."""
    level = os.environ.get("SSD_LOG", "WARNING").upper()
    if level not in logging.getLevelNamesMapping():
        raise UsageError(f"SSD_LOG is {level!r}; give DEBUG, INFO, WARNING or ERROR")
    return level


def _die_with_parent(start: Start) -> None:
    """End this process when the supervisor ends, even if its main thread is busy or stopped."""
    parent = os.pidfd_open(os.getppid())

    def watch() -> None:
        # A fork of the supervisor's program may hold the pipe open: watch the parent too.
        select.select([start.death_fd, parent], [], [])
        run_directory.remove(Path(start.run_directory))
        os._exit(0)

    threading.Thread(target=watch, name="death-pipe", daemon=True).start()
    # A process that is stopped, or hangs in a device's library, cannot read a pipe. So the kernel sends a signal when
    # the supervisor's thread ends. The frontend is only woken, to remove the directory.
    at_death = signal.SIGCONT if start.role == "frontend" else signal.SIGKILL
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, at_death)


def memory_file(name: str, size: int) -> int:
    import fcntl

    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor
