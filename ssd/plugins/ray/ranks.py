"""The ranks of a target on a Ray cluster, which talk as ranks on one machine do."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import zmq
from msgspec.structs import replace

from ssd.config import gpus
from ssd.config.engine import EngineConfig, ServerConfig
from ssd.config.roles import FOLLOWERS
from ssd.errors import SsdError, UsageError
from ssd.ipc import meeting, sockets
from ssd.ipc.messages import CHILD_TO_SUPERVISOR, Status
from ssd.launch.children import ChildProcess
from ssd.launch.executors import Loss, RemoteRanks
from ssd.launch.liveness import LOOK_S, Liveness
from ssd.launch.resources import SharedResources
from ssd.models import checkpoint

log = logging.getLogger("ssd.plugins.ray")

_PATIENCE_S = 600.0  # for the placement of every rank: a cluster that grows by itself takes minutes
_AT_ONCE_S = 5.0
_END_S = 1.0


class Follower:
    """An actor of Ray, whose child process is the rank. `end` is called while `run` runs."""

    def __init__(self) -> None:
        self._process: ChildProcess | None = None

    def run(self, config: bytes, rank: int, group: int, meeting: str) -> tuple[str, int]:
        """Run rank `rank` of the target in JSON `config`; return the cause, and exit code or minus signal."""
        try:
            with ExitStack() as held:
                return self._run(held, _checked(config), rank, group, meeting)
        except SsdError as error:
            return str(error), error.exit_code

    def end(self) -> None:
        """End the rank, if there is one, so that `run` returns and leaves nothing behind."""
        if self._process is not None:
            self._process.kill("the group has ended")

    def gpus(self) -> str:
        """Return the GPUs that Ray has given to this actor, as in CUDA_VISIBLE_DEVICES."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def _run(self, held: ExitStack, config: EngineConfig, rank: int, group: int, meeting: str) -> tuple[str, int]:
        shared = SharedResources(held, config, only_ranks=True)
        context: zmq.Context[Any] = zmq.Context()
        held.callback(context.destroy, linger=0)
        socket = sockets.router(context, f"ipc://{shared.directory}/{sockets.SUPERVISOR}")
        liveness, role = Liveness(shared.heartbeats()), FOLLOWERS[rank - 1]
        process = self._process = ChildProcess(
            "ssd.verifier", shared.start(role, group, (), rank, group, meeting=meeting)
        )
        held.callback(process.end, 0.0)

        def hear(seconds: float) -> None:
            socket.poll(int(1000 * seconds) + 1 if seconds else 0)
            for _, epoch, status in sockets.drained(socket, CHILD_TO_SUPERVISOR):
                if epoch == group and isinstance(status, Status):
                    process.ready = process.ready or status.state == "ready"
                    process.failure = status if status.state == "failed" else process.failure

        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(process.pidfd, zmq.POLLIN)
        while process.pidfd not in dict(poller.poll(int(1000 * LOOK_S))):
            hear(0.0)
            for stuck in liveness.stuck({role: (process.pid, process.ready)}, time.monotonic()).values():
                process.kill(*stuck)
        return process.cause(hear), process.code


def _checked(encoded: bytes) -> EngineConfig:
    """Return the configuration. Raises UsageError if code or files differ from the supervisor's."""
    try:
        config = msgspec.json.decode(encoded, type=EngineConfig)
    except msgspec.MsgspecError as error:
        raise UsageError(f"the supervisor runs another version of ssd: {error}") from None
    if checkpoint.inspect(Path(config.target), config.load_format == "auto").digest != config.digest:
        raise UsageError(f"{config.target} differs from the files there on the supervisor's machine")
    return config


class RayRanks(RemoteRanks):
    """All ranks of a target but rank 0, each an actor of Ray in its bundle of one placement group.

    The first bundle is for the supervisor's children, rank 0 and the draft. An actor's own placement group is used."""

    def __init__(self, config: EngineConfig, held: ExitStack) -> None:
        """Take the places. Raises UsageError without Ray or a cluster, SsdError if the cluster has no place."""
        self._ray = connected(held)
        from ray.util import get_current_placement_group, get_node_ip_address

        followers = replace(config, server=ServerConfig())  # they serve no client, and API keys stay on this machine
        self._config, self._size = msgspec.json.encode(followers), config.tensor_parallel_size
        self._running: dict[Any, tuple[int, Any]] = {}
        self.variables: dict[str, str] = {}
        self._group = get_current_placement_group() or self._placed(bundles(config), held)
        held.callback(self.end)
        self._store, self.meeting = meeting.host(get_node_ip_address())

    def _placed(self, wanted: list[dict[str, float]], held: ExitStack) -> Any:
        """Return a new placement group, and hold the GPUs of its first bundle."""
        from ray.util.placement_group import placement_group, remove_placement_group

        here = {"ray.io/node-id": self._ray.get_runtime_context().get_node_id()}
        anywhere: list[dict[str, str]] = [{} for _ in wanted[1:]]
        group = placement_group(wanted, strategy="PACK", bundle_label_selector=[here, *anywhere])
        held.callback(remove_placement_group, group)
        if not group.wait(_AT_ONCE_S):
            log.warning("waiting for a place in the Ray cluster for %s", wanted)
            deadline = time.monotonic() + _PATIENCE_S
            while not group.wait(1):  # which no signal interrupts
                if time.monotonic() > deadline:
                    raise SsdError(f"the Ray cluster has no place for {wanted}: {self._ray.cluster_resources()}")
        if "GPU" in wanted[0]:
            self._holder = self._actor(group, 0)
            self.variables["CUDA_VISIBLE_DEVICES"] = self._ray.get(self._holder.gpus.remote())
        return group

    def _actor(self, group: Any, rank: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = group.bundle_specs[rank]
        return (
            self._ray.remote(Follower)
            .options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                max_concurrency=2,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
            )
            .remote()
        )

    def begin(self, group: int) -> None:
        """Start this group of ranks. A rank whose machine is gone waits for another place."""
        for rank in range(1, self._size):
            actor = self._actor(self._group, rank)
            self._running[actor.run.remote(self._config, rank, group, self.meeting)] = rank, actor

    def loss(self) -> Loss | None:
        done, _ = self._ray.wait(list(self._running), timeout=0) if self._running else ([], [])
        if not done:
            return None
        rank, _ = self._running[done[0]]
        try:
            cause, code = self._ray.get(done[0])
        except self._ray.exceptions.RayError as error:  # its machine or its actor is lost
            cause, code = " ".join(str(error).split()), -signal.SIGKILL
        return Loss(f"rank {rank}: {cause}", code)

    def end(self) -> None:
        for _, actor in self._running.values():
            actor.end.remote()
        if self._running:
            self._ray.wait(list(self._running), num_returns=len(self._running), timeout=_END_S)
        for _, actor in self._running.values():
            self._ray.kill(actor)
        self._running.clear()


def bundles(config: EngineConfig) -> list[dict[str, float]]:
    """Return the resources of each rank, the draft's with the first's, on the supervisor's machine."""
    devices = {gpus.number(config.device), gpus.number(config.draft_device) if config.draft is not None else None}
    here: dict[str, float] = {"CPU": max(1, len({*config.target_cpus, *config.draft_cpus}))}
    each: dict[str, float] = {"CPU": max(1, len(config.target_cpus))}
    if on_gpus := len(devices - {None}):
        here["GPU"] = on_gpus
    if gpus.number(config.device) is not None:
        here["CPU"], each = 1, {"CPU": 1, "GPU": 1}  # the cores are for the ranks of all the GPUs there
    return [here, *(dict(each) for _ in range(1, config.tensor_parallel_size))]


def connected(held: ExitStack, logs: bool = True) -> Any:
    """Return `ray`, connected to this machine's cluster; `logs`: of actors, to stderr. Raises UsageError."""
    try:
        import ray
    except ImportError:
        raise UsageError("Ray is missing: install ssd-engine[ray]") from None
    if ray.is_initialized():
        return ray
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address="auto", logging_level=logging.WARNING, log_to_driver=logs)
    except ConnectionError:
        raise UsageError("no Ray cluster is running here: `ray start --head`, or set RAY_ADDRESS") from None
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray has set its own
    held.callback(ray.shutdown)
    return ray
