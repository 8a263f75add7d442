"""One rank of a target on a machine of a Ray cluster: starts it, watches it and reports its end."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import zmq

from ssd.config.engine import EngineConfig
from ssd.config.roles import FOLLOWERS
from ssd.errors import SsdError, UsageError
from ssd.ipc import sockets
from ssd.ipc.messages import CHILD_TO_SUPERVISOR, Status
from ssd.launch.children import ChildProcess
from ssd.launch.liveness import LOOK_S, Liveness
from ssd.launch.resources import SharedResources
from ssd.models import checkpoint


class Follower:
    """An actor of Ray, in a process of its own. The rank is a child of that process, and ends with it.

    `end` is called while `run` runs, in another thread."""

    def __init__(self) -> None:
        self._process: ChildProcess | None = None

    def run(self, config: bytes, rank: int, group: int, meeting: str) -> tuple[str, int]:
        """Run rank `rank` of the target in `config`, as JSON, until it ends.

        Return the cause, and the exit code or minus the signal."""
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
        liveness, role = Liveness(shared.heartbeats(), config.step_timeout), FOLLOWERS[rank - 1]
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
    """Return the configuration. Raises UsageError if this machine's code or files differ from the supervisor's."""
    try:
        config = msgspec.json.decode(encoded, type=EngineConfig)
    except msgspec.MsgspecError as error:
        raise UsageError(f"the supervisor runs another version of ssd: {error}") from None
    if checkpoint.inspect(Path(config.target), config.load_format == "auto").digest != config.digest:
        raise UsageError(f"{config.target} differs from the files there on the supervisor's machine")
    return config
