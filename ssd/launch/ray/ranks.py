"""The ranks of a target on the machines of a Ray cluster.

Ray only places and watches them: tokens go over ZeroMQ and torch.distributed, as between ranks on one machine."""

from __future__ import annotations

import logging
import signal
import threading
import time
from contextlib import ExitStack
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from ssd.config import gpus
from ssd.config.engine import EngineConfig, ServerConfig
from ssd.errors import SsdError, UsageError
from ssd.ipc import meeting
from ssd.launch.ray.follower import Follower

log = logging.getLogger("ssd.launch.ray")

_PATIENCE_S = 600.0  # for the placement of every rank: a cluster that grows by itself takes minutes
_AT_ONCE_S = 5.0
_END_S = 1.0


class Loss(NamedTuple):
    """The reason why the ranks cannot go on: the cause, and the exit code of the ended rank, or minus the signal."""

    cause: str
    code: int


class RemoteRanks:
    """All ranks of a target but rank 0, each an actor of Ray in its bundle of one placement group.

    The first bundle is on the supervisor's machine. It is for rank 0 and the draft, which share memory with the
    supervisor as its children, with the environment `variables`. All ranks meet in the store at `meeting`. Inside an
    actor that has a placement group, that group is used. `held` releases everything when it closes."""

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
        """Start this group of ranks. A rank whose machine is gone waits until Ray has found another place for it."""
        for rank in range(1, self._size):
            actor = self._actor(self._group, rank)
            self._running[actor.run.remote(self._config, rank, group, self.meeting)] = rank, actor

    def loss(self) -> Loss | None:
        """Return why the running group cannot go on; None while it can."""
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
        """End the running group, if there is one."""
        for _, actor in self._running.values():
            actor.end.remote()
        if self._running:
            self._ray.wait(list(self._running), num_returns=len(self._running), timeout=_END_S)
        for _, actor in self._running.values():
            self._ray.kill(actor)
        self._running.clear()


def bundles(config: EngineConfig) -> list[dict[str, float]]:
    """Return the resources of each rank, the draft's with those of the first, on the supervisor's machine."""
    devices = {gpus.number(config.device), gpus.number(config.draft_device) if config.draft is not None else None}
    here: dict[str, float] = {"CPU": max(1, len({*config.target_cpus, *config.draft_cpus}))}
    each: dict[str, float] = {"CPU": max(1, len(config.target_cpus))}
    if on_gpus := len(devices - {None}):
        here["GPU"] = on_gpus
    if gpus.number(config.device) is not None:
        here["CPU"], each = 1, {"CPU": 1, "GPU": 1}  # the cores are for the ranks of all the GPUs there
    return [here, *(dict(each) for _ in range(1, config.tensor_parallel_size))]


def connected(held: ExitStack, logs: bool = True) -> Any:
    """Return the module `ray`, connected to the cluster that this machine is part of. Raises UsageError.

    With `logs`, this program's actors log to stderr."""
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
