"""A node other than number 0: its ranks of the target run what rank 0 says, and end when node 0 ends.

What happens to a rank is told to node 0, which decides: it ends the whole group of ranks and begins another one, here
as well, or gives up. No process of this node outlives this one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import zmq
from msgspec.structs import replace

from ssd.config.engine import EngineConfig, Nodes
from ssd.config.roles import target_roles
from ssd.errors import SsdError, UsageError
from ssd.ipc import sockets
from ssd.ipc.messages import CHILD_TO_SUPERVISOR, Status
from ssd.ipc.nodes import Guest, HostEnded
from ssd.launch.children import ChildProcess
from ssd.launch.liveness import LOOK_S, Liveness
from ssd.launch.resources import SharedResources

log = logging.getLogger("ssd.node")

_PATIENCE_S = 600.0  # for node 0 to begin
_END_S = 1.0


class FollowerNode:
    """The part of an engine that runs here. `config` says where and from which checkpoint; the rest is node 0's."""

    def __init__(self, config: EngineConfig) -> None:
        assert config.nodes is not None and config.nodes.rank > 0
        self._own, self._nodes = config, config.nodes
        self._processes: dict[str, ChildProcess] = {}
        self._group: int | None = None
        self._epoch = 0
        self._failure: SsdError | None = None

    def run(self, ready: Callable[[], None]) -> None:
        """Run until node 0 has ended. Calls `ready` when the ranks are ready for the first time.

        Raises the cause of a failure here or at node 0, or says that node 0 is gone. An interrupt is told to node 0."""
        guest = Guest(self._nodes, _PATIENCE_S)
        with ExitStack() as held:
            self._config = merged(self._own, guest.config(), self._nodes)
            self._prepare(held)
            try:
                while True:
                    self._turn(guest)
                    if self._processes and all(process.ready for process in self._processes.values()):
                        ready()
                        ready = _nothing
            except HostEnded as end:
                if (cause := str(end)) or self._failure:
                    raise self._failure or SsdError(f"node 0 has ended: {cause}") from None
            except KeyboardInterrupt:
                self._tell(guest, "was interrupted")
                raise

    def _prepare(self, held: ExitStack) -> None:
        """Make what the processes share. When `held` closes, the children end first."""
        self._shared = SharedResources(held, self._config, only_ranks=True)
        context: zmq.Context[Any] = zmq.Context()
        held.callback(context.destroy, linger=0)
        self._socket = sockets.router(context, f"ipc://{self._shared.directory}/{sockets.SUPERVISOR}")
        self._liveness = Liveness(self._shared.heartbeats(), self._config.step_timeout)
        held.callback(self._end)

    def _turn(self, guest: Guest) -> None:
        """Do once what node 0 asks, read what the children say, and deal with the dead and the stuck."""
        group = guest.group()
        if group is not None and group != self._group:
            self._end()
            self._group = group
            self._spawn()
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        for process in self._processes.values():
            poller.register(process.pidfd, zmq.POLLIN)
        events = dict(poller.poll(int(1000 * LOOK_S)))
        self._read()
        for process in [p for p in self._processes.values() if p.pidfd in events]:
            if self._processes.pop(process.role, None) is not None:
                self._lost(guest, process)
        watched = {p.role: (p.pid, p.ready) for p in self._processes.values()}
        for role, why in self._liveness.stuck(watched, time.monotonic()).items():
            self._processes[role].kill(why)

    def _spawn(self) -> None:
        assert self._group is not None
        self._failure = None
        for rank, role in zip(self._config.ranks, target_roles(self._config), strict=True):
            self._epoch += 1
            start = self._shared.start(role, self._epoch, self._config.cpus_of("target", rank), rank, self._group)
            self._processes[role] = ChildProcess("ssd.target", start)

    def _read(self) -> None:
        for peer, epoch, status in sockets.drained(self._socket, CHILD_TO_SUPERVISOR):
            process = self._processes.get(peer.decode(errors="replace"))
            if process is not None and process.epoch == epoch and isinstance(status, Status):
                process.ready = process.ready or status.state == "ready"
                process.failure = status if status.state == "failed" else process.failure

    def _lost(self, guest: Guest, process: ChildProcess) -> None:
        """Tell node 0 that a rank is gone, and end the others: none is of use alone."""
        started = process.ready
        self._processes[process.role] = process  # for its last words
        cause = f"the {process.role} process ended: {process.cause(self._hear)}"
        del self._processes[process.role]
        usage = process.failure is not None and process.failure.exit_code == 2
        log.warning("%s", cause)
        if not started:
            self._failure = UsageError(cause) if usage else SsdError(cause)
        self._tell(guest, cause)
        self._end()

    def _hear(self, seconds: float) -> None:
        self._socket.poll(int(1000 * seconds) + 1 if seconds else 0)
        self._read()

    def _tell(self, guest: Guest, cause: str) -> None:
        if self._group is not None:
            guest.failed(self._group, f"node {self._nodes.rank}: {cause}")

    def _end(self) -> None:
        """Kill all children that are left."""
        for process in self._processes.values():
            process.kill("the group has ended")
            process.wait()
        self._processes.clear()


def merged(own: EngineConfig, theirs: EngineConfig, nodes: Nodes) -> EngineConfig:
    """Return node 0's configuration with this node's own places. Raises UsageError where the engines differ."""
    if theirs.nodes is None or theirs.nodes.count != nodes.count:
        raise UsageError(f"--nnodes {nodes.count}: node 0 has {theirs.nodes.count if theirs.nodes else 1}")
    if theirs.tensor_parallel_size != own.tensor_parallel_size:
        raise UsageError(f"--tensor-parallel-size {own.tensor_parallel_size}: node 0 has {theirs.tensor_parallel_size}")
    if theirs.digest != own.digest:
        raise UsageError(f"{own.target} is not the target of node 0, {theirs.target_name}: their files differ")
    here = {"target": own.target, "device": own.device, "target_cpus": own.target_cpus, "nodes": nodes}
    return replace(theirs, **here)


def _nothing() -> None:
    pass
