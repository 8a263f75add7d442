"""A child process as its supervisor sees it: started, watched, ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import msgspec

from ssd.ipc.process import Start
from ssd.ipc.supervision import Loading, Status


class ChildProcess:
    """One running child. `pidfd` becomes readable when it ends; `failure` is what it says of itself before that, or
    what the supervisor has to say; `loading` is how far it is. Raises OSError where it cannot be started."""

    def __init__(self, package: str, start: Start) -> None:
        inherited = (getattr(start, name) for name in Start.__struct_fields__ if name.endswith("_fd"))
        payload = _memory_file_with(msgspec.json.encode(start))
        try:
            self._handle = subprocess.Popen(
                [sys.executable, "-m", package, str(payload)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[descriptor for descriptor in (payload, *inherited) if descriptor >= 0],
                env=_environment(len(start.cpus)),
                process_group=0,  # a signal to the terminal's group is for the supervisor to interpret
            )
        finally:
            os.close(payload)
        self.role, self.epoch = start.role, start.epoch
        self.pid = self._handle.pid
        try:
            self.pidfd = os.pidfd_open(self.pid)
        except OSError:
            self._handle.kill()
            raise
        self.ready = False
        self.loading = Loading(0, 0)
        self.failure: Status | None = None

    def kill(self, why: str) -> None:
        """End it at once, stopped or not."""
        self.failure = Status(self.role, "failed", why, 1)
        self._handle.send_signal(signal.SIGKILL)

    def wait(self) -> int:
        """Wait for the end of one that has ended or is about to; returns its exit code, or minus the signal. Once."""
        code = self._handle.wait()
        os.close(self.pidfd)
        return code

    def end(self, deadline: float) -> None:
        """Wait until `deadline` (of time.monotonic) for its own end, then kill it."""
        try:
            self._handle.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._handle.send_signal(signal.SIGKILL)
        self.wait()


def _memory_file_with(payload: bytes) -> int:
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
