from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping

import msgspec

from ssd.config import gpus
from ssd.ipc.messages import Loading, Status
from ssd.ipc.process import Start, memory_file
from ssd.launch import mps
from ssd.system import cgroups, interpreter

_NONE: Mapping[str, str] = {}
_LAST_WORDS_S = 0.5
# Spins of a thread of torch before it sleeps: about 0.1 ms, longer than the host needs between two layers. The threads
# of our kernels have AWAKE_NS (team.c).
_SPINS = 10_000
_oom_kills = 0


class ChildProcess:
    """One running child process, with more environment `variables`. Raises OSError if it does not start.

    `name`: its module or package. `pidfd` becomes readable when it ends; `code` is then its exit code, minus the
    signal, or 1 if it hung. `failure`: the cause that child or supervisor gave. `loading` counts the bytes of weights
    read."""

    def __init__(
        self, name: str, start: Start, variables: Mapping[str, str] = _NONE, stderr: int | None = None
    ) -> None:
        inherited = (getattr(start, name) for name in Start.__struct_fields__ if name.endswith("_fd"))
        encoded = msgspec.json.encode(start)
        payload = memory_file("ssd-start", len(encoded))
        os.pwrite(payload, encoded, 0)
        _new_oom_kills()
        try:
            self._handle = subprocess.Popen(
                interpreter.child_command("ssd.ipc", name, str(payload)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=[descriptor for descriptor in (payload, *inherited) if descriptor >= 0],
                env={**_environment(start), **variables},
                process_group=0,  # a signal to the terminal's group is for the supervisor to interpret
            )
        finally:
            os.close(payload)
        self.role, self.epoch, self.code = start.role, start.epoch, 0
        self.pid = self._handle.pid
        try:
            self.pidfd = os.pidfd_open(self.pid)
        except OSError:
            self._handle.kill()
            raise
        self.ready = self._hangs = False
        self.loading = Loading(0, 0)
        self.failure: Status | None = None

    def kill(self, why: str, hangs: bool = False) -> None:
        """End the process at once, even a stopped one. With `hangs`, count it as one that has failed."""
        self._hangs = hangs
        self.failure = Status(self.role, "failed", why, 1)
        self._handle.send_signal(signal.SIGKILL)

    def wait(self) -> int:
        """Wait for the end of a process that is about to end, and return its `code`."""
        code = self._handle.wait()
        self.code = 1 if self._hangs else code
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        return self.code

    def cause(self, hear: Callable[[float], None]) -> str:
        """Return the cause of the process's end, in its own words if it sent any. Call it once.

        `hear` reads messages of children; it waits at most the given seconds."""
        for_memory = self.wait() == -signal.SIGKILL and _new_oom_kills() > 0
        hear(0.0)
        if self.code < 0 and self.failure is None:
            return f"killed by {_signal_name(-self.code)}" + (
                ": the kernel has killed for want of memory" if for_memory else ""
            )
        deadline = time.monotonic() + _LAST_WORDS_S
        while self.failure is None and (left := deadline - time.monotonic()) > 0:
            hear(left)
        return f"exit status {self.code}" if self.failure is None else self.failure.message

    def end(self, deadline: float) -> None:
        """Wait until `deadline` (of time.monotonic) for the process to end, then kill it."""
        try:
            self._handle.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._handle.send_signal(signal.SIGKILL)
        self.wait()


def _new_oom_kills() -> int:
    global _oom_kills
    before, _oom_kills = _oom_kills, cgroups.oom_kills()
    return _oom_kills - before


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _environment(start: Start) -> dict[str, str]:
    environment, config = interpreter.environment(), start.config
    if not start.kernels:
        environment["SSD_KERNELS"] = "0"
    environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    environment.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch's: huge pages are read faster
    if start.cpus:
        environment["OMP_NUM_THREADS"] = environment["MKL_NUM_THREADS"] = str(len(start.cpus))
    if config.elastic_cores and start.role in ("target", "draft"):
        # A thread stays on its core, and soon leaves it to the other model when it has nothing to do.
        environment["OMP_PLACES"] = ",".join(f"{{{cpu}}}" for cpu in start.cpus)
        environment |= {"OMP_PROC_BIND": "close", "GOMP_SPINCOUNT": str(_SPINS)}
    if start.role == "draft" and gpus.number(config.draft_device) in gpus.of_ranks(config.device, len(config.ranks)):
        environment |= mps.draft_environment(os.environ)
    return environment
