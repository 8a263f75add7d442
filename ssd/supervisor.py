"""The supervisor: owns the run directory, the shared memory and the processes; watches, restarts, ends them.

It runs in a thread of the process that starts the engine (`ssd launch`, `ssd generate`, `ssd.LLM`). When that process
ends, however it ends, the death pipe closes and every child ends with it (contract C9).
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from ssd.config import EngineConfig
from ssd.errors import EngineDeadError, SsdError, UsageError
from ssd.ipc import board, listening, sockets
from ssd.ipc.laws import LawArena
from ssd.ipc.messages import CHILD_TO_SUPERVISOR, BadFrame, Drain, Status
from ssd.ipc.process import Start, memory_file, run_directory

log = logging.getLogger("ssd.supervisor")

RESTARTS_PER_MINUTE = 5
_FIRST_BACK_OFF, _LONGEST_BACK_OFF = 0.1, 30.0
_FAREWELL_S = 3.0  # what the frontend gets, after a drain, to tell its clients how their requests ended


@dataclass
class _Process:
    """One running child. `pidfd` becomes readable when it ends."""

    role: str
    handle: subprocess.Popen[bytes]
    pidfd: int
    epoch: int
    ready: bool = False
    failure: Status | None = None


@dataclass
class _DraftRestarts:
    """Back-off of the draft: 0.1 s doubling to 30 s; more than five deaths in a minute leave it off."""

    deaths: deque[float] = field(default_factory=deque)
    due: float | None = None

    def died(self, now: float) -> float | None:
        """Note a death; returns the delay before the next start, None when the draft stays off."""
        self.deaths.append(now)
        while self.deaths[0] < now - 60:
            self.deaths.popleft()
        if len(self.deaths) > RESTARTS_PER_MINUTE:
            self.due = None
            return None
        delay = min(_LONGEST_BACK_OFF, _FIRST_BACK_OFF * 2 ** (len(self.deaths) - 1))
        self.due = now + delay
        return delay


class Engine:
    """A running engine. `start` returns when it can serve; `address` is where `ssd.client.Client` connects."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.failure: SsdError | None = None
        self._processes: dict[str, _Process] = {}
        self._restarts = _DraftRestarts()
        self._epoch = 0
        self._changed = threading.Condition()
        self._state = "new"  # new -> starting -> ready -> draining -> stopped
        self._thread = threading.Thread(target=self._run, name="ssd-supervisor", daemon=True)
        self._descriptors: list[int] = []
        self._http: socket.socket | None = None
        self._drain_seconds = 0.0

    @property
    def url(self) -> str | None:
        """Where HTTP is served, if it is."""
        return None if self._http is None else listening.url(self._http)

    @property
    def address(self) -> str:
        return f"ipc://{self._directory}/{sockets.CLIENT}"

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by role, for people and tests."""
        return {role: process.handle.pid for role, process in self._processes.copy().items()}

    def start(self, timeout: float = 600.0) -> None:
        """Spawn everything and wait until it can serve. Raises the failing child's own cause."""
        if self.config.server.http:
            self._http = listening.listen(self.config.server)
        try:
            self._prepare()
            self._thread.start()
        except BaseException:
            self._release()
            raise
        with self._changed:
            self._changed.wait_for(lambda: self._state in ("ready", "stopped"), timeout)
            state = self._state
        if state != "ready":
            self.stop(drain=0.0)
            raise self.failure or SsdError(f"the engine was not ready within {timeout:.0f} s")

    def _prepare(self) -> None:
        """The run directory, and what the processes share."""
        self._directory = run_directory()
        self._wake_read, self._wake_write = os.pipe()
        self._death_read, self._death_write = os.pipe()
        self._board_fd = memory_file("ssd-board", board.size_bytes(self.config.max_num_seqs))
        self._descriptors = [self._wake_read, self._wake_write, self._death_read, self._board_fd]
        self._laws_fd = self._law_arena()

    def _law_arena(self) -> int:
        """Shared memory for the laws of drafted tokens, where the sampler looks at them; else -1."""
        config = self.config
        if config.speculation.sampler != "rejection" or config.draft is None:
            return -1
        size = LawArena.size_bytes(config.max_num_seqs, config.speculation, config.vocab_size)
        self._descriptors.append(memory_file("ssd-laws", size))
        return self._descriptors[-1]

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the engine has stopped by itself (a process it needs died); True if it has."""
        with self._changed:
            return self._changed.wait_for(lambda: self._state == "stopped", timeout)

    def stop(self, drain: float | None = None) -> None:
        """Let open requests finish for `drain` seconds (default: the configuration's), then end every process."""
        if self._thread.ident is None:
            return  # never started
        limit = self.config.shutdown_timeout if drain is None else drain
        with self._changed:
            if self._state == "ready" and limit > 0:
                self._state, self._drain_seconds = "draining", limit
                os.write(self._wake_write, b"d")
                self._changed.wait_for(lambda: self._state == "stopped", limit + _FAREWELL_S)
            if self._state != "stopped":
                self._state = "stopping"
                os.write(self._wake_write, b"s")
        self._thread.join()
        self._release()

    def _release(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())
        if self._http is not None:
            listening.close(self._http)
            self._http = None

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- the supervisor thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Everything below happens in this one thread; children are spawned here because the kernel's parent-death
        signal is bound to the spawning thread."""
        context: zmq.Context[Any] = zmq.Context()
        try:
            self._serve(context)
        except Exception as error:
            self.failure = self.failure or SsdError(f"supervisor: {type(error).__name__}: {error}")
        finally:
            self._end_children()
            context.destroy(linger=0)
            shutil.rmtree(self._directory, ignore_errors=True)
            self._set("stopped")

    def _serve(self, context: zmq.Context[Any]) -> None:
        self._socket = sockets.router(context, f"ipc://{self._directory}/{sockets.SUPERVISOR}")
        self._advance("new", "starting")
        for role in ("target", "frontend", "draft"):
            if role != "draft" or self.config.draft is not None:
                self._spawn(role)
        while self._state not in ("stopping", "stopped"):
            poller = zmq.Poller()
            poller.register(self._socket, zmq.POLLIN)
            poller.register(self._wake_read, zmq.POLLIN)
            for process in self._processes.values():
                poller.register(process.pidfd, zmq.POLLIN)
            events = dict(poller.poll(self._poll_ms()))
            if self._wake_read in events:
                os.read(self._wake_read, 64)
            self._read_statuses()
            for process in [p for p in self._processes.values() if p.pidfd in events]:
                self._ended(process)
            if self._state == "draining":
                sockets.send(self._socket, Drain(self._drain_seconds), to=b"frontend")
            if self._restarts.due is not None and time.monotonic() >= self._restarts.due:
                self._restarts.due = None
                try:
                    self._spawn("draft")
                except OSError as error:
                    self._lost_draft(f"cannot start it: {error}")

    def _poll_ms(self) -> int:
        if self._restarts.due is None:
            return 1000
        return max(0, int(1000 * (self._restarts.due - time.monotonic())) + 1)

    def _spawn(self, role: str) -> None:
        self._epoch += 1
        cpus = self.config.target_cpus if role == "target" else self.config.draft_cpus
        inherited: tuple[int, ...] = (self._death_read, self._board_fd, self._laws_fd)
        if role == "frontend" and self._http is not None:
            inherited = (*inherited, self._http.fileno())
        start = Start(role, self._epoch, str(self._directory), self.config, cpus, *inherited)
        payload = memory_file_with(msgspec.json.encode(start))
        package = "mock" if role == "target" and self.config.load_format == "mock" else role
        handle = subprocess.Popen(
            [sys.executable, "-m", f"ssd.{package}", str(payload)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[descriptor for descriptor in (payload, *inherited) if descriptor >= 0],
            env=_environment(len(cpus)),
            process_group=0,  # a signal to the terminal's group is for the supervisor to interpret
        )
        os.close(payload)
        self._processes[role] = _Process(role, handle, os.pidfd_open(handle.pid), self._epoch)

    def _read_statuses(self) -> None:
        while True:
            try:
                received = sockets.receive(self._socket, CHILD_TO_SUPERVISOR)
            except BadFrame as error:
                log.warning("dropped a frame: %s", error)
                continue
            if received is None:
                return
            _, epoch, status = received
            process = self._processes.get(status.role)
            if process is None or process.epoch != epoch:
                continue
            if status.state == "ready":
                process.ready = True
                if self._state == "starting":
                    if all(p.ready for p in self._processes.values()):
                        self._advance("starting", "ready")
                elif status.role == "draft":
                    log.warning("the draft is back (pid %d)", process.handle.pid)
            elif status.state == "failed":
                process.failure = status
            elif status.state == "stopped":
                self._advance("draining", "stopping")

    def _ended(self, process: _Process) -> None:
        """A child is gone: a lost draft costs speed only (C1); anything else ends the engine with its cause."""
        self._read_statuses()  # its last words may still be in the socket
        code = process.handle.wait()
        os.close(process.pidfd)
        del self._processes[process.role]
        if self._state in ("stopping", "stopped"):
            return
        cause = process.failure.message if process.failure else _describe_exit(code)
        if process.role == "draft" and self._state != "starting":
            self._lost_draft(cause)
            return
        self.failure = self._as_error(process, cause)
        self._set("stopping")

    def _lost_draft(self, cause: str) -> None:
        """Say so, and when it will be tried again."""
        delay = self._restarts.died(time.monotonic())
        then = "it stays off" if delay is None else f"restarting it in {delay:.1f} s"
        log.warning("the draft was lost (%s); generation goes on without it, %s", cause, then)

    def _as_error(self, process: _Process, cause: str) -> SsdError:
        if process.failure and process.failure.exit_code == 2:
            return UsageError(cause)
        return EngineDeadError(f"the {process.role} process ended: {cause}")

    def _end_children(self) -> None:
        """Close the death pipe, which ends every child; what does not listen is killed."""
        os.close(self._death_write)
        deadline = time.monotonic() + 1.0
        for process in self._processes.values():
            try:
                process.handle.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.handle.send_signal(signal.SIGKILL)
                process.handle.wait()
            os.close(process.pidfd)
        self._processes.clear()

    def _advance(self, before: str, after: str) -> None:
        """Change the state unless someone has changed it meanwhile: a stop that was asked for stays asked for."""
        with self._changed:
            if self._state == before:
                self._state = after
                self._changed.notify_all()

    def _set(self, state: str) -> None:
        with self._changed:
            self._state = state
            self._changed.notify_all()


def memory_file_with(payload: bytes) -> int:
    """An inheritable descriptor positioned at the start of `payload`."""
    descriptor = os.memfd_create("ssd-start", os.MFD_CLOEXEC)
    os.write(descriptor, payload)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _environment(threads: int) -> dict[str, str]:
    """The child's environment: one compute thread per core it is pinned to."""
    environment = dict(os.environ)
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
        environment["MKL_NUM_THREADS"] = str(threads)
    return environment


def _describe_exit(code: int) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit status {code}"
