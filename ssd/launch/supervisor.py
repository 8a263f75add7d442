"""The supervisor: starts the processes of an engine, watches them, restarts them and ends them.

It runs in a thread of the process that starts the engine. When that ends, even killed, the death pipe ends every
child."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from contextlib import ExitStack
from enum import IntEnum
from typing import Any

import zmq

from ssd.config.engine import EngineConfig
from ssd.config.roles import ROLES, of_target, target_roles
from ssd.errors import EngineDeadError, SsdError, UsageError
from ssd.ipc import listening, sockets
from ssd.ipc.messages import CHILD_TO_SUPERVISOR, DraftWanted, Drain, FrontendReport, Loading, TargetLost, Watch
from ssd.ipc.run_directory import remove
from ssd.ipc.running import announce
from ssd.launch.children import ChildProcess
from ssd.launch.liveness import LOOK_S, Liveness
from ssd.launch.processes import Processes, has_kernels
from ssd.launch.restarts import Restarts
from ssd.monitor.publisher import SnapshotPublisher

log = logging.getLogger("ssd.launch.supervisor")

_FAREWELL_S = 3.0  # time for the frontend, after a drain, to tell its clients how their requests ended
_TELL_AGAIN_S = 0.02


Stage = IntEnum("Stage", ("NEW", "STARTING", "READY", "DRAINING", "STOPPING", "STOPPED"))  # of an engine's life


class Lifecycle:
    """An engine's stage, which its user's threads and its supervisor's share.

    `failure`: the cause of an end that nobody asked for. Each change makes `wake_fd` readable."""

    def __init__(self) -> None:
        self.stage = Stage.NEW
        self.failure: SsdError | None = None
        self.drain_seconds = 0.0
        self.wake_fd = -1
        self._changed = threading.Condition()

    def advance(self, stage: Stage) -> None:
        """Go on to a later stage. An earlier one is ignored, so that no requested stop is overwritten."""
        with self._changed:
            if self.stage < stage:
                self.stage = stage
                os.eventfd_write(self.wake_fd, 1)  # open: it closes after the supervisor's thread, the last to advance
                self._changed.notify_all()

    def drain(self, seconds: float) -> bool:
        """Let open requests finish for `seconds`; return False if the engine is not ready."""
        with self._changed:
            if self.stage != Stage.READY:
                return False
            self.drain_seconds = seconds
            self.advance(Stage.DRAINING)
            return True

    def wait(self, stage: Stage, timeout: float | None) -> bool:
        """Wait until the engine is at a stage or beyond; return False at the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self.stage >= stage, timeout)


class Engine:
    """A running engine. `start` returns when it can serve; `ssd.client.Client` connects to `address`.

    A process that dies, stops or hangs is replaced. An engine whose target or frontend dies too often ends, with the
    cause in `failure`. `url`: of HTTP, or None. The processes write to the descriptor `stderr`; None: this
    process's."""

    def __init__(self, config: EngineConfig, draft_restarts: Restarts | None = None, stderr: int | None = None) -> None:
        self.config = config
        self.url: str | None = None
        self._stderr, self._pid = stderr, os.getpid()
        self._life = Lifecycle()
        self._running: dict[str, ChildProcess] = {}
        self._restarts = {"target": Restarts(), "frontend": Restarts(), "draft": draft_restarts or Restarts()}
        self._thread: threading.Thread | None = None
        self._held = ExitStack()  # resources that are released at the end

    @property
    def address(self) -> str:
        return f"ipc://{self._directory}/{sockets.CLIENT}"

    @property
    def failure(self) -> SsdError | None:
        return self._life.failure

    @property
    def pids(self) -> dict[str, int]:
        return {role: process.pid for role, process in self._running.copy().items()}

    @property
    def loading(self) -> Loading:
        """Return the bytes of weights read so far, by all processes together."""
        found = [process.loading for process in self._running.copy().values()]
        return Loading(sum(one.done for one in found), sum(one.total for one in found))

    def start(self, timeout: float = 600.0) -> None:
        """Start all processes and wait until they can serve. Raises the cause that a failing child gave."""
        try:
            thread = self._prepare()
        except BaseException:
            self._held.close()
            raise
        self._thread = thread
        thread.start()  # `stop` ends it, even if this thread is interrupted
        self._life.wait(Stage.READY, timeout)
        if self._life.stage != Stage.READY:
            self.stop(drain=0.0)
            raise self.failure or SsdError(f"the engine was not ready within {timeout:.0f} s")

    def _prepare(self) -> threading.Thread:
        """Compile the kernels before the port is open: nobody could answer. Return the supervisor's thread."""
        config, kernels, http_fd = self.config, has_kernels(self.config), -1
        if config.server.http:
            http = listening.listen(config.server)
            self._held.callback(listening.close, http)
            self.url, http_fd = listening.url(http, config.server.ssl_certfile is not None), http.fileno()
        processes = Processes(self._running, config, self._held, http_fd, self._stderr)
        processes.shared.kernels = kernels
        self._directory = processes.shared.directory
        announce(self._directory, config.target_name, self.url)
        self._life.wake_fd = processes.shared.hold(os.eventfd(0))
        self._supervisor = Supervisor(config, self._life, processes, self._restarts)
        return threading.Thread(target=self._supervisor.run, name="ssd-supervisor", daemon=True)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the engine has stopped by itself; return False at the timeout."""
        return self._life.wait(Stage.STOPPED, timeout)

    def stop(self, drain: float | None = None) -> None:
        """Let open requests finish for `drain` seconds (default: the configuration's), then end every process.

        A fork of the program ends nothing."""
        if os.getpid() != self._pid:
            return
        if self._thread is None or self._thread.ident is None:
            self._held.close()  # an interrupt came before the thread started
            return
        limit = self.config.shutdown_timeout if drain is None else drain
        if limit > 0 and self._life.drain(limit) and not self.wait(limit + _FAREWELL_S):
            self._life.failure = self.failure or SsdError("the frontend did not drain in time")
        self._life.advance(Stage.STOPPING)
        self._thread.join()
        self._held.close()

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Supervisor:
    """Watches an engine's processes, replaces lost ones, and ends all. `run` is the loop of its thread."""

    def __init__(
        self, config: EngineConfig, lifecycle: Lifecycle, processes: Processes, restarts: dict[str, Restarts]
    ) -> None:
        self._config, self._life, self._processes, self._restarts = config, lifecycle, processes, restarts
        self._running, self._shared = processes.running, processes.shared
        self._untold = False  # the frontend has to hear that the target was lost
        self._parked = False  # the target has told the draft to leave, and no other one is ready yet
        self._given_up_at = math.inf
        self._is_homeless = False  # its run directory is gone

    def run(self) -> None:
        """Start the processes, watch them until the engine has to end, then end them.

        The kernel's parent-death signal is bound to the thread that starts children. They inherit its mask: SIGINT is
        for the supervisor's program alone."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with ExitStack() as ends:  # if one of them raises, the others still run
                ends.callback(remove, self._shared.directory)
                context: zmq.Context[Any] = zmq.Context()
                ends.callback(context.destroy, linger=0)
                ends.callback(self._processes.end)
                self._serve(context)
        except BaseException as error:
            self._life.failure = self._life.failure or SsdError(f"supervisor: {type(error).__name__}: {error}")
        finally:
            self._life.advance(Stage.STOPPED)

    def _serve(self, context: zmq.Context[Any]) -> None:
        shared, heartbeats = self._shared, self._shared.heartbeats()
        self._socket = sockets.router(context, f"ipc://{shared.directory}/{sockets.SUPERVISOR}")
        self._life.advance(Stage.STARTING)
        liveness = Liveness(heartbeats)
        self.publisher = SnapshotPublisher(
            context, shared.directory, self._config, shared.trace_fd, heartbeats, shared.kernels
        )
        try:
            for role in ROLES:
                if role != "draft" or self._config.drafts_apart:
                    self._processes.start(role)
            while self._life.stage < Stage.STOPPING:
                self._turn(liveness)
        finally:
            self.publisher.let_go()

    def _turn(self, liveness: Liveness) -> None:
        poller = zmq.Poller()
        for source in (self._socket, self.publisher.socket, self._life.wake_fd):
            poller.register(source, zmq.POLLIN)
        for process in self._running.values():
            poller.register(process.pidfd, zmq.POLLIN)
        events = dict(poller.poll(self._poll_ms()))
        if self._life.wake_fd in events:
            os.eventfd_read(self._life.wake_fd)
        self._read_statuses()
        for process in [p for p in self._running.values() if p.pidfd in events]:
            if self._running.get(process.role) is process:  # the end of another may have been its end too
                self._ended(process)
        watched = {p.role: (p.pid, p.ready) for p in self._running.values()}
        for role, stuck in liveness.stuck(watched, time.monotonic()).items():
            self._running[role].kill(*stuck)
        self._look_for_directory()
        if (loss := self._processes.loss()) is not None:
            self._deal_with_end("target", loss.cause, loss.code)
        self._tell_frontend()
        self._start_again()
        if self._can_serve():
            self._life.advance(Stage.READY)
        if time.monotonic() > self._given_up_at:
            self._life.advance(Stage.STOPPING)
        if (watch := self.publisher.turn(self._running.values(), time.monotonic())) is not None:
            self._send_frontend(watch)

    def _poll_ms(self) -> int:
        now = time.monotonic()
        dues = [restarts.due - now for restarts in self._restarts.values() if restarts.due is not None]
        dues.append(self.publisher.delay(now))
        return max(0, int(1000 * min([_TELL_AGAIN_S if self._untold else LOOK_S, *dues])) + 1)

    def _look_for_directory(self) -> None:
        """Warn once when the run directory was removed, as programs that clean /tmp do."""
        if not self._is_homeless and not self._shared.directory.exists():
            self._is_homeless = True
            log.warning(
                "the run directory %s was removed: HTTP and open connections go on, but nobody can connect to "
                "ipc://%s/%s now, and a process that dies cannot be replaced",
                self._shared.directory,
                self._shared.directory,
                sockets.CLIENT,
            )

    def _can_serve(self) -> bool:
        """Return True if every needed process is ready, the draft too unless it has died or was parked."""
        waits_for_draft = self._config.drafts_apart and not self._restarts["draft"].deaths and not self._parked
        needed = (*target_roles(self._config), "frontend", *(("draft",) if waits_for_draft else ()))
        return all(role in self._running and self._running[role].ready for role in needed)

    def _start_again(self) -> None:
        for role, restarts in self._restarts.items():
            if restarts.taken(time.monotonic()):
                try:
                    self._processes.start(role)
                except OSError as error:
                    self._lost(role, f"cannot start it: {error}")

    def _tell_frontend(self) -> None:
        """Send a drain, then the loss of the target: a frontend that drains waits for no other target."""
        if self._life.stage == Stage.DRAINING:
            self._send_frontend(Drain(self._life.drain_seconds))
        if self._untold:  # a frontend that does not read yet is told later
            self._untold = "frontend" in self._running and not self._send_frontend(TargetLost())

    def _send_frontend(self, message: Drain | TargetLost | Watch) -> bool:
        return sockets.send(self._socket, message, to=b"frontend")

    def _read_statuses(self) -> None:
        for peer, epoch, status in sockets.drained(self._socket, CHILD_TO_SUPERVISOR):
            process = self._running.get(peer.decode(errors="replace"))
            if process is None or process.epoch != epoch:
                continue
            if isinstance(status, FrontendReport):
                self.publisher.reported(status)
            elif isinstance(status, DraftWanted):
                if self._parked and "draft" not in self._running and not self._is_homeless:
                    self._restarts["draft"].replace(time.monotonic())
            elif isinstance(status, Loading):
                process.loading = status
            elif status.state == "ready":
                process.ready = True
                self._restarts[_group(process.role)].came_up()
                returns = process.role == "draft" and self._parked
                self._parked = self._parked and not returns
                if self._life.stage in (Stage.READY, Stage.DRAINING):
                    level = logging.INFO if returns else logging.WARNING
                    log.log(level, "the %s is back (pid %d)", process.role, process.pid)
            elif status.state == "failed":
                process.failure = status
            elif status.state == "stopped" and self._life.stage == Stage.DRAINING:
                self._life.advance(Stage.STOPPING)

    # -- ends -------------------------------------------------------------------------------------------------------

    def _ended(self, process: ChildProcess) -> None:
        if process.role == "draft" and process.wait() == 0:
            self._parked = True
            self.publisher.ended("draft", parked=True)
            del self._running["draft"]
            return
        cause = process.cause(self._hear)
        self.publisher.ended(process.role)
        del self._running[process.role]
        self._deal_with_end(process.role, cause, process.code)

    def _deal_with_end(self, role: str, cause: str, code: int) -> None:
        """Replace a process that has ended, or end the engine if it gave up before the engine was ready.

        `code` is negative for a signal. A process that fails as it starts would fail again."""
        if self._life.stage == Stage.STARTING and code >= 0:
            self._life.failure = UsageError(cause) if code == UsageError.exit_code else _as_error(role, cause)
            self._life.advance(Stage.STOPPING)
        elif self._life.stage < Stage.STOPPING:
            self._lost(role, cause)

    def _hear(self, seconds: float) -> None:
        self._socket.poll(int(1000 * seconds) + 1 if seconds else 0)
        self._read_statuses()

    def _lost(self, name: str, cause: str) -> None:
        role = _group(name)
        if role == "target":
            self._untold = True
            ended = self._processes.end_models()
            for model in ended:
                self.publisher.ended(model)
            if "draft" in ended or self._parked:  # the next draft begins with the next target
                self._restarts["draft"].replace(time.monotonic())
        if role != "frontend":
            self._parked = False
        if self._life.stage == Stage.DRAINING and role != "draft":
            self._give_up(name, cause)
            return
        self._look_for_directory()
        if self._is_homeless:
            delay, why = None, "the run directory was removed"
        else:
            delay = self._restarts[role].died(time.monotonic())
            why = f"it dies again and again ({self._restarts[role].deaths} times)"
        if delay is None and role != "draft":
            self._give_up(name, f"{cause}; {why}")
            return
        then = f"{why}; it stays off" if delay is None else f"restarting it in {delay:.1f} s"
        log.warning("the %s was lost (%s), %s", name, cause, then)

    def _give_up(self, role: str, cause: str) -> None:
        self._life.failure = _as_error(role, cause)
        if role == "frontend" or "frontend" not in self._running or self._life.stage == Stage.STARTING:
            self._life.advance(Stage.STOPPING)
            return
        self._given_up_at = time.monotonic() + _FAREWELL_S
        self._life.drain(_FAREWELL_S)


def _group(role: str) -> str:
    return "target" if of_target(role) else role


def _as_error(role: str, cause: str) -> EngineDeadError:
    return EngineDeadError(f"the {role} process ended: {cause}")
