"""The processes of an engine as the system sees them: who they are, what they hold, what they leave behind."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from ssd.config.engine import EngineConfig
from ssd.errors import SsdError
from tools import processes

_PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20
_PATIENCE_S = 60.0


class Host:
    """A running engine in a process of its own (`tools.soak.host`), which is its supervisor and writes to `log`."""

    def __init__(self, config: EngineConfig, log: Path, environment: Mapping[str, str], most_files: int | None) -> None:
        """Start the engine and wait until it serves. Raises SsdError with its last words if it does not.

        Its processes may have `most_files` descriptors each, if that is given."""
        self._log = log
        with log.open("w") as stderr:
            self._handle = subprocess.Popen(
                processes.command("tools.soak.host"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=processes.environment() | environment,
            )
        if most_files is not None:
            resource.prlimit(self._handle.pid, resource.RLIMIT_NOFILE, (most_files, most_files))
        assert self._handle.stdin is not None and self._handle.stdout is not None
        self._handle.stdin.write(msgspec.json.encode(config) + b"\n")
        self._handle.stdin.flush()
        line = self._handle.stdout.readline()
        if not line:
            self.stop()
            raise SsdError(f"the engine did not start:\n{self.said()}")
        self.address: str
        self.url: str
        self.address, self.url = json.loads(line).values()

    def processes(self) -> dict[str, int]:
        """Return process ids by role: `supervisor`, and its children."""
        return {"supervisor": self._handle.pid, **roles(self._handle.pid)}

    def gauges(self) -> dict[str, float]:
        """Return the engine's gauges and counters by name, without prefix; labels are added up."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=_PATIENCE_S) as response:
            families = text_string_to_metric_families(response.read().decode())
        return {
            family.name.removeprefix("ssd:"): sum(sample.value for sample in family.samples)
            for family in families
            if family.type in ("gauge", "counter")
        }

    def said(self) -> str:
        """Return the last lines of its log."""
        return "\n".join(self._log.read_text().splitlines()[-20:])

    def stop(self) -> int:
        """End it. Returns its exit status."""
        assert self._handle.stdin is not None
        with suppress(BrokenPipeError):
            self._handle.stdin.close()
        try:
            return self._handle.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._handle.kill()
            return self._handle.wait()


@contextmanager
def hosted(
    config: EngineConfig, environment: Mapping[str, str] = MappingProxyType({}), most_files: int | None = None
) -> Iterator[Host]:
    """Yield an engine that runs while the block lasts."""
    with tempfile.TemporaryDirectory() as folder:
        host = Host(config, Path(folder) / "log", environment, most_files)
        try:
            yield host
        finally:
            host.stop()


def roles(supervisor: int) -> dict[str, int]:
    """Return the process ids of an engine's children, by the end of the package that they run; the target's is
    "target"."""
    found = {}
    for pid in children(supervisor):
        with suppress(OSError):  # it has just ended
            if package := re.search(rb"\0ssd\.(?:\w+\.)*(\w+)\0\d+\0", Path(f"/proc/{pid}/cmdline").read_bytes()):
                role = package[1].decode()
                found["target" if role == "verifier" else role] = pid
    return found


def children(pid: int) -> list[int]:
    """Return the processes that any thread of `pid` started and nobody has waited for."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, file.read_text().split())
    return found


def running(pids: set[int]) -> set[int]:
    """Return the processes that are still there, zombies not among them."""
    found = set()
    for pid in pids:
        with suppress(OSError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z":
                found.add(pid)
    return found


def memory_mib(pid: int) -> float:
    """Return resident MiB. Raises OSError if the process is gone."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_MIB


def descriptors(pid: int) -> int:
    """Return the number of open files. Raises OSError if the process is gone."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def shared_memory() -> set[str]:
    """Return the names in /dev/shm."""
    return set(os.listdir("/dev/shm"))
