"""A child process as a function that returns: start-up, status, and the end when its parent ends (RELIABILITY 1)."""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from ssd.config import EngineConfig
from ssd.errors import SsdError, UsageError
from ssd.ipc import run_directory, sockets
from ssd.ipc.messages import Message
from ssd.ipc.pulse import Pulses
from ssd.ipc.supervision import Loading, Report, Status
from ssd.monitor.lanes import LANES, SILENT, Lane, State

_PR_SET_PDEATHSIG = 1
_LOADING_S = 0.1  # between two words about it


class Start(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a child is told at its start, as JSON through an inherited file descriptor.

    `death_fd` reaches end of file when the supervisor ends; `board_fd` is the memfd of the speculation board and
    `laws_fd` that of the arena of draft laws, `features_fd` that of hidden states, `pulse_fd` that of the turn
    counters, `events_fd` that of the lanes, `http_fd` the socket that listens for HTTP; -1 where no one needs it. The
    ranks of a target are a `group`, named by the epoch of its first.
    """

    role: str
    epoch: int
    run_directory: str
    config: EngineConfig
    cpus: tuple[int, ...]
    death_fd: int
    board_fd: int
    laws_fd: int = -1
    features_fd: int = -1
    pulse_fd: int = -1
    events_fd: int = -1
    http_fd: int = -1
    rank: int = 0
    group: int = 0


class Child:
    """A child's view of its engine: configuration, sockets' directory, the supervisor's ear."""

    def __init__(self, start: Start, cores: Iterable[int] = ()) -> None:
        """`cores` are those that the threads of sockets may use; none given, they share this process's."""
        self.start = start
        self.config = start.config
        self.epoch = start.epoch
        self._pulses = Pulses(start.pulse_fd)
        records = self.config.telemetry and start.role in LANES
        self.lane = Lane(start.events_fd, start.role) if records else SILENT
        self.lane.enter(State.LOADING)
        self.context: zmq.Context[Any] = zmq.Context()
        for core in cores:
            self.context.set(zmq.THREAD_AFFINITY_CPU_ADD, core)
        self._loading_told = 0.0
        self.supervisor = sockets.dealer(self.context, self.address(sockets.SUPERVISOR), start.role.encode())

    def address(self, name: str) -> str:
        """The ZeroMQ address of a socket of this run."""
        return f"ipc://{self.start.run_directory}/{name}"

    def beat(self) -> None:
        """Show that this process goes on; once in every turn of its loop."""
        self._pulses.beat(self.start.role)

    def loading(self, done: int, total: int) -> None:
        """So many bytes of the weights have been read. Said now and then; may be lost."""
        if (now := time.monotonic()) >= self._loading_told + _LOADING_S:
            self._loading_told = now
            self._tell(Loading(done, total))

    def ready(self) -> None:
        self._tell(Status(self.start.role, "ready"))

    def stopped(self) -> None:
        self._tell(Status(self.start.role, "stopped"))

    def failed(self, message: str, exit_code: int) -> None:
        self._tell(Status(self.start.role, "failed", message[:65536], exit_code))

    def report(self, report: Report) -> None:
        """What someone watches; may be lost."""
        self._tell(report)

    def _tell(self, message: Message) -> None:
        sockets.send(self.supervisor, message, self.epoch)

    def close(self) -> None:
        self.supervisor.setsockopt(zmq.LINGER, 1000)
        self.context.destroy()


def run(module: str) -> None:
    """Entry point of every child: `python -m ssd.<role> FD`. Calls `main(child)` of `module`, reports how it ended,
    never returns.

    The module is imported last: loading torch takes a second, in which the parent may already die.
    """
    descriptor = int(sys.argv[1])
    with os.fdopen(descriptor, "rb") as file:
        start = msgspec.json.decode(file.read(), type=Start)
    logging.basicConfig(stream=sys.stderr, level=log_level(), format=f"ssd {start.role}: %(message)s")
    cores = os.sched_getaffinity(0)
    if start.cpus:
        os.sched_setaffinity(0, start.cpus)
    _die_with_parent(start)
    # Where a process has one core, each message sent would stop it for the thread that carries it.
    child = Child(start, cores if start.cpus else ())
    code = 0
    try:
        importlib.import_module(module).main(child)
    except SsdError as error:
        code = error.exit_code
        child.failed(str(error), code)
    except Exception as error:
        code = 1
        logging.getLogger("ssd").exception("a bug, or a broken machine:")
        child.failed(f"{type(error).__name__}: {error}", code)
    child.close()
    os._exit(code)


def log_level() -> str:
    """The level of SSD_LOG (DEBUG, INFO, WARNING, ERROR); raises `UsageError` for any other word."""
    level = os.environ.get("SSD_LOG", "WARNING").upper()
    if level not in logging.getLevelNamesMapping():
        raise UsageError(f"SSD_LOG is {level!r}; give DEBUG, INFO, WARNING or ERROR")
    return level


def _die_with_parent(start: Start) -> None:
    """End when the supervisor does, whatever this process is busy with."""
    parent = os.pidfd_open(os.getppid())

    def watch() -> None:
        # What the supervisor's program has forked holds the pipe open after its end: look at itself, too.
        select.select([start.death_fd, parent], [], [])
        run_directory.remove(Path(start.run_directory))
        os._exit(0)

    threading.Thread(target=watch, name="death-pipe", daemon=True).start()
    # A stopped process cannot read a pipe, nor can one that hangs in a device's library: when the supervisor's thread
    # ends, the kernel sends a signal. One process is only woken, to remove the directory.
    at_death = signal.SIGCONT if start.role == "frontend" else signal.SIGKILL
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, at_death)


def memory_file(name: str, size: int) -> int:
    """A sealed anonymous shared-memory file of `size` bytes; returns its descriptor (RELIABILITY 1)."""
    import fcntl

    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor
