"""The processes of an engine: their start and their end."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack

from ssd.config.engine import EngineConfig
from ssd.config.roles import target_roles
from ssd.kernels import build
from ssd.launch import mps
from ssd.launch.children import ChildProcess
from ssd.launch.executors import Loss, RemoteRanks
from ssd.launch.resources import SharedResources
from ssd.system import registered

log = logging.getLogger("ssd.launch")


class Processes:
    """Starts and ends an engine's processes; the supervisor's thread calls it.

    `running`: those here, by role. `held` releases shared resources. `http_fd`: the frontend's socket, or -1. `stderr`:
    the descriptor for all, or None."""

    def __init__(
        self, running: dict[str, ChildProcess], config: EngineConfig, held: ExitStack, http_fd: int, stderr: int | None
    ) -> None:
        """Take places and shared memory. Raises UsageError or SsdError if there is none."""
        self.running, self.shared = running, SharedResources(held, config)
        self._config, self._http_fd, self._stderr = config, http_fd, stderr
        self._variables: dict[str, str] = {}  # of this engine's own MPS, and of the GPUs that an executor gave
        if config.mps and mps.state() != "running":
            self._variables |= held.enter_context(mps.service())
        self._remote: RemoteRanks | None = None
        if config.executor != "local":
            self._remote = registered.load(registered.EXECUTORS, config.executor)(config, held)
            self._variables |= self._remote.variables
        self._epoch = 0

    def start(self, role: str) -> None:
        """Start a process; for the target, all its ranks. Raises OSError."""
        config, group, meeting, is_target = self._config, self._epoch + 1, "", role == "target"
        if self._remote is not None:
            meeting = self._remote.meeting
            if is_target:
                self._remote.begin(group)
        package = _package(config, role)
        http_fd = self._http_fd if role == "frontend" else -1
        for rank, name in enumerate(target_roles(config) if is_target else (role,)):
            self._epoch += 1
            cpus = config.cpus_of("target" if is_target else "draft", rank)
            start = self.shared.start(name, self._epoch, cpus, rank, group, http_fd, meeting)
            self.running[name] = ChildProcess(package, start, self._variables, self._stderr)

    def loss(self) -> Loss | None:
        return None if self._remote is None else self._remote.loss()

    def end_models(self) -> list[str]:
        """Kill all ranks of the target and the draft, which need each other; return the ended roles."""
        if self._remote is not None:
            self._remote.end()
        ended = [role for role in (*target_roles(self._config), "draft") if role in self.running]
        for role in ended:
            self.running.pop(role).end(0.0)
        return ended

    def end(self) -> None:
        """Close the death pipe, which ends every child, and kill those that do not end in time."""
        with ExitStack() as ends:
            if self._remote is not None:
                ends.callback(self._remote.end)
            ends.callback(self.running.clear)
            deadline = time.monotonic() + 1.0
            for process in self.running.values():
                ends.callback(process.end, deadline)
            self.shared.close_death_pipe()


def has_kernels(config: EngineConfig) -> bool:
    """Compile the kernels, once for all processes; warn and return False if that fails."""
    if not config.has_weights or build.library() is not None:
        return True
    log.warning("this engine runs without compiled kernels: a CPU computes two to four times slower")
    return False


def _package(config: EngineConfig, role: str) -> str:
    own = {"target": "ssd.verifier", "draft": "ssd.draft", "frontend": "ssd.frontend"}
    kind = "edge" if config.upstream is not None else "receiver" if config.link is not None else ""
    if kind in registered.names(registered.PROCESSES):
        own |= registered.load(registered.PROCESSES, kind)
    if not config.has_weights:
        own |= registered.load(registered.LOAD_FORMATS, config.load_format).PACKAGES
    return own[role]
