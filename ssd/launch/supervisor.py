"""The supervisor: starts the processes of an engine, watches them, restarts them and ends them.

It runs in a thread of the process that starts the engine (`ssd launch`, `ssd generate`, `ssd.LLM`). When that process
ends, even killed, the death pipe closes and every child ends with it."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import zmq

from ssd.config.engine import EngineConfig
from ssd.config.roles import ROLES, of_target, target_roles
from ssd.errors import EngineDeadError, SsdError, UsageError
from ssd.ipc import listening, sockets
from ssd.ipc.messages import CHILD_TO_SUPERVISOR, DraftWanted, Drain, FrontendReport, Loading, TargetLost, Watch
from ssd.ipc.run_directory import remove
from ssd.ipc.running import announce
from ssd.launch import mps
from ssd.launch.children import ChildProcess
from ssd.launch.liveness import LOOK_S, Liveness
from ssd.launch.ray.ranks import RemoteRanks
from ssd.launch.resources import SharedResources
from ssd.launch.restarts import Restarts
from ssd.monitor.publisher import Publisher

log = logging.getLogger("ssd.launch.supervisor")

_FAREWELL_S = 3.0  # time for the frontend, after a drain, to tell its clients how their requests ended
_TELL_AGAIN_S = 0.02


class Engine:
    """A running engine. `start` returns when it can serve; `ssd.client.Client` connects to `address`.

    A process that dies, stops or hangs is replaced, after the usual back-off or that of `draft_restarts`. An engine
    whose target or frontend dies too often ends by itself, with the cause in `failure`."""

    def __init__(self, config: EngineConfig, draft_restarts: Restarts | None = None, stderr: int | None = None) -> None:
        self.config = config
        self._stderr = stderr  # the processes write to this descriptor; None: to this process's
        self.failure: SsdError | None = None
        self._pid = os.getpid()
        self._processes: dict[str, ChildProcess] = {}
        self._restarts = {"target": Restarts(), "frontend": Restarts(), "draft": draft_restarts or Restarts()}
        self._untold = False  # the frontend has to hear that the target was lost
        self._parked = False  # the target has told the draft to leave, and no other one is ready yet
        self._epoch = 0
        self._changed = threading.Condition()
        self._state = "new"  # new -> starting -> ready -> draining -> stopped
        self._thread = threading.Thread(target=self._run, name="ssd-supervisor", daemon=True)
        self._held = ExitStack()  # resources that are released at the end
        self._given_up_at = math.inf
        self._http: socket.socket | None = None
        self._remote: RemoteRanks | None = None
        self._drain_seconds = 0.0
        self._is_homeless = False  # its run directory is gone
        self._mps: dict[str, str] = {}  # variables by which processes find this engine's own MPS

    @property
    def url(self) -> str | None:
        """Return the URL of HTTP; None if it is not served."""
        return None if self._http is None else listening.url(self._http, self.config.server.ssl_certfile is not None)

    @property
    def address(self) -> str:
        return f"ipc://{self._shared.directory}/{sockets.CLIENT}"

    @property
    def pids(self) -> dict[str, int]:
        """Return the process ids by role."""
        return {role: process.pid for role, process in self._processes.copy().items()}

    @property
    def loading(self) -> Loading:
        """Return the bytes of weights read so far, by all processes together."""
        found = [process.loading for process in self._processes.copy().values()]
        return Loading(sum(one.done for one in found), sum(one.total for one in found))

    def start(self, timeout: float = 600.0) -> None:
        """Start all processes and wait until they can serve. Raises the cause that a failing child gave."""
        try:
            self._prepare()
        except BaseException:
            self._held.close()
            raise
        self._thread.start()  # `stop` ends it, even if this thread is interrupted
        with self._changed:
            self._changed.wait_for(lambda: self._state in ("ready", "stopped"), timeout)
            state = self._state
        if state != "ready":
            self.stop(drain=0.0)
            raise self.failure or SsdError(f"the engine was not ready within {timeout:.0f} s")

    def _prepare(self) -> None:
        """Take the port, and make the run directory and the shared resources."""
        if self.config.server.http:
            self._http = listening.listen(self.config.server)
            self._held.callback(self._close_http)
        self._shared = SharedResources(self._held, self.config)
        announce(self._shared.directory, self.config.target_name, self.url)
        self._wake_read, self._wake_write = map(self._shared.hold, os.pipe())
        if self.config.mps and mps.state() != "running":
            self._mps = self._held.enter_context(mps.service())
        if self.config.executor == "ray":
            self._remote = RemoteRanks(self.config, self._held)

    def _close_http(self) -> None:
        if self._http is not None:
            listening.close(self._http)
            self._http = None

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the engine has stopped by itself; return False at the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._state == "stopped", timeout)

    def stop(self, drain: float | None = None) -> None:
        """Let open requests finish for `drain` seconds (default: the configuration's), then end every process.

        A fork of the program ends nothing: the engine is its parent's."""
        if os.getpid() != self._pid:
            return
        if self._thread.ident is None:
            self._held.close()  # an interrupt came before the thread started
            return
        limit = self.config.shutdown_timeout if drain is None else drain
        with self._changed:
            if self._state == "ready" and limit > 0:
                self._state, self._drain_seconds = "draining", limit
                os.write(self._wake_write, b"d")
                if not self._changed.wait_for(lambda: self._state == "stopped", limit + _FAREWELL_S):
                    self.failure = self.failure or SsdError("the frontend did not drain in time")
            if self._state != "stopped":
                self._state = "stopping"
                os.write(self._wake_write, b"s")
        self._thread.join()
        self._held.close()

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- the supervisor thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Run the supervisor's thread; all methods below run in it.

        Children are started here because the kernel's parent-death signal is bound to the thread that starts them. They
        inherit its signal mask: SIGINT is for the supervisor's program alone."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        context: zmq.Context[Any] = zmq.Context()
        steps: tuple[Callable[[], object], ...] = (
            partial(self._serve, context),
            self._end_children,
            self._end_remote,
            partial(context.destroy, linger=0),
            partial(remove, self._shared.directory),
        )
        for step in steps:  # if one of them raises, the others still run
            try:
                step()
            except BaseException as error:
                self.failure = self.failure or SsdError(f"supervisor: {type(error).__name__}: {error}")
        self._set("stopped")

    def _serve(self, context: zmq.Context[Any]) -> None:
        self._socket = sockets.router(context, f"ipc://{self._shared.directory}/{sockets.SUPERVISOR}")
        self._advance("new", "starting")
        shared, heartbeats = self._shared, self._shared.heartbeats()
        liveness = Liveness(heartbeats, self.config.step_timeout)
        self._publisher = Publisher(context, shared.directory, self.config, shared.trace_fd, heartbeats)
        self._held.callback(self._publisher.let_go)
        for role in ROLES:
            if role != "draft" or self.config.has_draft:
                self._spawn(role)
        while self._state not in ("stopping", "stopped"):
            self._turn(liveness)

    def _turn(self, liveness: Liveness) -> None:
        """Wait for an event, then handle all that there are."""
        poller = zmq.Poller()
        for source in (self._socket, self._publisher.socket, self._wake_read):
            poller.register(source, zmq.POLLIN)
        for process in self._processes.values():
            poller.register(process.pidfd, zmq.POLLIN)
        events = dict(poller.poll(self._poll_ms()))
        if self._wake_read in events:
            os.read(self._wake_read, 64)
        self._read_statuses()
        for process in [p for p in self._processes.values() if p.pidfd in events]:
            if self._processes.get(process.role) is process:  # the end of another may have been its end too
                self._ended(process)
        watched = {p.role: (p.pid, p.ready) for p in self._processes.values()}
        for role, stuck in liveness.stuck(watched, time.monotonic()).items():
            self._processes[role].kill(*stuck)
        self._look_for_directory()
        self._ask_remote()
        self._tell_frontend()
        self._start_again()
        if self._state == "starting" and self._can_serve():
            self._advance("starting", "ready")
        if time.monotonic() > self._given_up_at:
            self._set("stopping")
        watch = self._publisher.turn(self._processes.values(), time.monotonic())
        if watch is not None:
            self._send_frontend(watch)

    def _look_for_directory(self) -> None:
        """Warn once when the run directory was removed, as programs that clean /tmp do."""
        if not self._is_homeless and not self._shared.directory.exists():
            self._is_homeless = True
            log.warning(
                "the run directory %s was removed: HTTP and open connections go on, but nobody can connect to %s now, "
                "and a process that dies cannot be replaced",
                self._shared.directory,
                self.address,
            )

    def _ask_remote(self) -> None:
        """Act on the loss of a rank that Ray has placed."""
        loss = None if self._remote is None else self._remote.loss()
        if loss is not None:
            self._deal_with_end("target", loss.cause, loss.code)

    def _poll_ms(self) -> int:
        """Return the milliseconds until the next timer is due."""
        now = time.monotonic()
        dues = [restarts.due - now for restarts in self._restarts.values() if restarts.due is not None]
        dues.append(self._publisher.delay(now))
        return max(0, int(1000 * min([_TELL_AGAIN_S if self._untold else LOOK_S, *dues])) + 1)

    def _tell_frontend(self) -> None:
        """Send a drain, then the loss of the target: a frontend that drains does not wait for another target."""
        if self._state == "draining":
            self._send_frontend(Drain(self._drain_seconds))
        if self._untold:  # a frontend that does not read yet is told later
            self._untold = "frontend" in self._processes and not self._send_frontend(TargetLost())

    def _send_frontend(self, message: Drain | TargetLost | Watch) -> bool:
        return sockets.send(self._socket, message, to=b"frontend")

    def _can_serve(self) -> bool:
        """Return True if every process that requests need is ready, the draft too unless it has died or was parked."""
        waits_for_draft = self.config.has_draft and not self._restarts["draft"].deaths and not self._parked
        needed = (*target_roles(self.config), "frontend", *(("draft",) if waits_for_draft else ()))
        return all(role in self._processes and self._processes[role].ready for role in needed)

    def _start_again(self) -> None:
        for role, restarts in self._restarts.items():
            if restarts.taken(time.monotonic()):
                try:
                    self._spawn(role)
                except OSError as error:
                    self._lost(role, f"cannot start it: {error}")

    def _spawn(self, role: str) -> None:
        """Start a process; for the target, all its ranks."""
        config, group, variables, meeting = self.config, self._epoch + 1, self._mps, ""
        is_target = role == "target"
        if self._remote is not None:
            variables, meeting = {**variables, **self._remote.variables}, self._remote.meeting
            if is_target:
                self._remote.begin(group)
        package = self._package(role)
        http_fd = self._http.fileno() if role == "frontend" and self._http is not None else -1
        for rank, name in enumerate(target_roles(config) if is_target else (role,)):
            self._epoch += 1
            cpus = config.cpus_of("target" if is_target else "draft", rank)
            start = self._shared.start(name, self._epoch, cpus, rank, group, http_fd, meeting)
            self._processes[name] = ChildProcess(package, start, variables, self._stderr)

    def _package(self, role: str) -> str:
        """Return the package that runs a role: another process may take the place of target or draft."""
        config, of_role = self.config, {"target": "ssd.verifier", "draft": "ssd.draft", "frontend": "ssd.frontend"}
        if config.upstream is not None:
            of_role |= {"target": "ssd.remote.edge", "draft": "ssd.remote.edge.draft"}
        elif config.load_format == "mock":
            of_role["target"] = "ssd.emulation.mock"
        elif config.link is not None:
            of_role["draft"] = "ssd.remote.receiver"
        return of_role[role]

    def _read_statuses(self) -> None:
        for peer, epoch, status in sockets.drained(self._socket, CHILD_TO_SUPERVISOR):
            process = self._processes.get(peer.decode(errors="replace"))
            if process is None or process.epoch != epoch:
                continue
            if isinstance(status, FrontendReport):
                self._publisher.reported(status)
            elif isinstance(status, DraftWanted):
                if self._parked and "draft" not in self._processes and not self._is_homeless:
                    self._restarts["draft"].replace(time.monotonic())
            elif isinstance(status, Loading):
                process.loading = status
            elif status.state == "ready":
                process.ready = True
                self._restarts[_group(process.role)].came_up()
                returns = process.role == "draft" and self._parked
                self._parked = self._parked and not returns
                if self._state in ("ready", "draining"):
                    level = logging.INFO if returns else logging.WARNING
                    log.log(level, "the %s is back (pid %d)", process.role, process.pid)
            elif status.state == "failed":
                process.failure = status
            elif status.state == "stopped":
                self._advance("draining", "stopping")

    def _ended(self, process: ChildProcess) -> None:
        """Handle a child that is gone: a draft that left by itself is parked, every other one is lost."""
        if process.role == "draft" and process.wait() == 0:
            self._parked = True
            self._publisher.ended("draft", parked=True)
            del self._processes["draft"]
            return
        cause = process.cause(self._hear)
        self._publisher.ended(process.role)
        del self._processes[process.role]
        self._deal_with_end(process.role, cause, process.code)

    def _deal_with_end(self, role: str, cause: str, code: int) -> None:
        """Replace a process that has ended, or end the engine if it gave up by itself before the engine was ready.

        `code` is negative for a signal. A process that fails as it starts would fail again: its cause is for the user.
        A lost draft costs speed only, a lost frontend its clients, a lost target the requests it had begun."""
        if self._state == "starting" and code >= 0:
            self._fail(role, cause, usage=code == UsageError.exit_code)
        elif self._state in ("starting", "ready", "draining"):
            self._lost(role, cause)

    def _hear(self, seconds: float) -> None:
        """Wait up to `seconds` for messages of children, and read them."""
        self._socket.poll(int(1000 * seconds) + 1 if seconds else 0)
        self._read_statuses()

    def _lost(self, name: str, cause: str) -> None:
        """Log the loss of a process and plan its restart, or give up."""
        role = _group(name)
        if role == "target":
            self._end_remote()
            self._untold = True
            for rank in target_roles(self.config):  # none is of use without the others
                self._end_one(rank, "another rank was lost")
            # The next draft begins with the next target.
            if self._end_one("draft", "its target was lost") or self._parked:
                self._restarts["draft"].replace(time.monotonic())
        if role != "frontend":
            self._parked = False
        if self._state == "draining" and role != "draft":
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

    def _end_one(self, role: str, why: str) -> bool:
        """Kill a process at once; return False if there is none."""
        process = self._processes.pop(role, None)
        if process is None:
            return False
        process.kill(why)
        process.wait()
        self._publisher.ended(role)
        return True

    def _give_up(self, role: str, cause: str) -> None:
        """End the engine. The frontend, if it lives, may first tell its clients how their requests ended."""
        if role == "frontend" or "frontend" not in self._processes or self._state == "starting":
            self._fail(role, cause)
            return
        self.failure = _as_error(role, cause)
        self._given_up_at = time.monotonic() + _FAREWELL_S
        if self._state != "draining":
            self._drain_seconds = _FAREWELL_S
        self._advance("ready", "draining")

    def _fail(self, role: str, cause: str, usage: bool = False) -> None:
        self.failure = UsageError(cause) if usage else _as_error(role, cause)
        self._set("stopping")

    def _end_children(self) -> None:
        """Close the death pipe, which ends every child, and kill those that do not end in time."""
        self._shared.close_death_pipe()
        deadline = time.monotonic() + 1.0
        with ExitStack() as ends:
            ends.callback(self._processes.clear)
            for process in self._processes.values():
                ends.callback(process.end, deadline)

    def _end_remote(self) -> None:
        """End the ranks that Ray has placed."""
        if self._remote is not None:
            self._remote.end()

    def _advance(self, before: str, after: str) -> None:
        """Change the state only if it is `before`, so that a requested stop is not overwritten."""
        with self._changed:
            if self._state == before:
                self._state = after
                self._changed.notify_all()

    def _set(self, state: str) -> None:
        with self._changed:
            self._state = state
            self._changed.notify_all()


def _group(role: str) -> str:
    """Return the role under which a process's restarts count: all ranks count as the target."""
    return "target" if of_target(role) else role


def _as_error(role: str, cause: str) -> EngineDeadError:
    return EngineDeadError(f"the {role} process ended: {cause}")
