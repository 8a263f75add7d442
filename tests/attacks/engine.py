"""An engine under attack: `ssd launch` of the mock with every door open, and what the system knows of its processes."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from ssd.ipc import keys
from tests.attacks.innocents import Innocents
from tests.attacks.registry import PATIENCE_S, Site
from tests.cli.launched import command
from tests.mock import MOCK, ROUND_VARIABLE
from tools.soak.processes import children, descriptors, roles

_FILES = 1024  # descriptors that each process may have: few enough to be used up
_ADDRESSES = 12 * 2**30  # bytes of each process: what grows without bound shall not take the machine with it
_ROUND_MS = "10"  # of the mock: streams last, and short answers are short
_READY_S = 60.0
_PEAK, _NOW = "VmHWM", "VmRSS"


@dataclass
class AttackedEngine:
    site: Site
    process: subprocess.Popen[str]
    log: Path
    innocents: Innocents

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of target and frontend."""
        found = roles(self.process.pid)
        return {role: found[role] for role in ("mock", "frontend") if role in found}

    def forget_peak(self) -> None:
        """Take the frontend's memory now for the most that it ever had."""
        Path(f"/proc/{self.pids['frontend']}/clear_refs").write_text("5")

    @property
    def peak_mib(self) -> float:
        return self._memory_mib(_PEAK)

    @property
    def resident_mib(self) -> float:
        return self._memory_mib(_NOW)

    def _memory_mib(self, line: str) -> float:
        status = Path(f"/proc/{self.pids['frontend']}/status").read_text()
        found = re.search(rf"^{line}:\s+(\d+) kB$", status, re.MULTILINE)
        assert found is not None
        return int(found[1]) / 1024

    def settled_mib(self, most: float) -> float:
        """The resident MiB once they are at most so many, or after a while: freed memory goes back when it is quiet."""
        until = time.monotonic() + PATIENCE_S
        while (mib := self.resident_mib) > most and time.monotonic() < until:
            time.sleep(0.05)
        return mib

    @property
    def descriptors(self) -> int:
        """Of the frontend."""
        return descriptors(self.pids["frontend"])

    def settled_descriptors(self, most: int) -> int:
        """How many there are once there are at most so many, or after a while."""
        until = time.monotonic() + PATIENCE_S
        while (count := self.descriptors) > most and time.monotonic() < until:
            time.sleep(0.05)
        return count


@contextmanager
def attacked_engine(folder: Path, *arguments: str | Path, api_key: str = "") -> Iterator[AttackedEngine]:
    """One with innocent clients; `folder` is for its keys and its log. The attacker may have many connections."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    made = folder / "keys"
    keys.new_server(made)
    keys.new_client(made, "innocent")
    if api_key:
        (folder / "api-keys").touch(0o600)
        (folder / "api-keys").write_text(api_key)
        arguments = (*arguments, "--api-key-file", folder / "api-keys")
    tcp = f"tcp://127.0.0.1:{_free_port()}"
    options = ("--port", "0", "--zmq-bind", tcp, "--zmq-keys", made, "--slow-reader-seconds", "2")
    lengths = ("--max-model-len", "8192", "--max-num-seqs", "256")
    log = folder / "log"
    with launched(log, *options, *lengths, "--served-model-name", "mock", *arguments) as (process, said):
        port = urlsplit(said["http"]).port
        assert port is not None
        site = Site(port, said["ready"], "mock", tcp, str(made), api_key)
        innocents = Innocents(site, roles(process.pid)["frontend"])
        try:
            yield AttackedEngine(site, process, log, innocents)
        finally:
            innocents.close()


@contextmanager
def launched(log: Path, *arguments: str | Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """The process, and what it said when it was ready: name -> address. Its log is a file, which is never full."""
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command(*arguments, engine=MOCK),
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, ROUND_VARIABLE: _ROUND_MS},
            preexec_fn=_limit,
        )
    said: dict[str, str] = {}
    too_long = threading.Timer(_READY_S, _kill, [process])
    too_long.start()
    try:
        assert process.stdout is not None
        while "ready" not in said:
            line = process.stdout.readline()
            assert line, f"the engine did not start: {log.read_text()[-2000:]}"
            name, _, address = line.strip().partition(": ")
            said[name] = address
        too_long.cancel()
        yield process, said
    finally:
        too_long.cancel()
        process.terminate()
        try:
            process.communicate(timeout=_READY_S)
        except subprocess.TimeoutExpired:
            _kill(process)
            process.communicate()


def _kill(process: subprocess.Popen[str]) -> None:
    """With its children, of which one may be too busy to see that it is alone."""
    for pid in children(process.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.kill()


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (_FILES, _FILES))
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESSES, _ADDRESSES))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])
