"""Makes things go wrong around an engine: processes die or stop, a disk is full, the cores are busy."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tools.soak.processes import Host, descriptors, memory_mib

_EVERY_S = 1.0
_WARM_UP_S = 20.0  # of a process, in which its memory grows as it must
_MINUTE_S, _MOST_DEATHS = 60.0, 4  # of one role: an engine bears five in a minute (`ssd.launch.restarts`)
_STOPPED_PART, _STOPPED_S = 0.3, (0.2, 3.0)
_SPELL_S = (2.0, 8.0)  # of a full disk, and of busy cores
_DISK_MIB = 64
_BLOCK = bytes(2**20)


@dataclass
class Deaths:
    """What was done to processes, by role and signal."""

    injected: Counter[str] = field(default_factory=Counter)
    _recent: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def may_die(self, role: str, now: float) -> bool:
        """Return whether an engine must bear one more death of a role. Drafts may always die."""
        self._recent[role] = [then for then in self._recent[role] if then > now - _MINUTE_S]
        if role != "draft" and len(self._recent[role]) >= _MOST_DEATHS:
            return False
        self._recent[role].append(now)
        return True


async def kill_any(host: Host, every_s: float, seed: int, deaths: Deaths) -> None:
    """SIGKILL or SIGSTOP any process but the supervisor, after random pauses with the mean `every_s`.

    A stopped process is continued later, if it is still there. Runs until cancelled."""
    dice = random.Random(seed)
    while True:
        await asyncio.sleep(dice.expovariate(1 / every_s))
        children = {role: pid for role, pid in host.processes().items() if role != "supervisor"}
        if not children:
            continue
        role = dice.choice(sorted(children))
        if not deaths.may_die(role, time.monotonic()):
            continue
        stopped = dice.random() < _STOPPED_PART
        with suppress(ProcessLookupError):
            os.kill(children[role], signal.SIGSTOP if stopped else signal.SIGKILL)
            deaths.injected[f"{role} {'stopped' if stopped else 'killed'}"] += 1
            if stopped:
                await asyncio.sleep(dice.uniform(*_STOPPED_S))
                os.kill(children[role], signal.SIGCONT)


async def keep_cores_busy(seed: int, spells: Counter[str]) -> None:
    """Now and then keep every core busy with a process that counts. Runs until cancelled."""
    dice = random.Random(seed)
    while True:
        await asyncio.sleep(dice.uniform(*_SPELL_S))
        hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
        spells["busy cores"] += 1
        try:
            await asyncio.sleep(dice.uniform(*_SPELL_S))
        finally:
            for hog in hogs:
                hog.kill()
                hog.wait()


async def fill_disk(folder: Path, seed: int, spells: Counter[str]) -> None:
    """Now and then fill the file system of `folder`. Runs until cancelled."""
    dice = random.Random(seed)
    filler = folder / "filler"
    while True:
        await asyncio.sleep(dice.uniform(*_SPELL_S))
        try:
            await asyncio.to_thread(_fill, filler)
            spells["full disk"] += 1
            await asyncio.sleep(dice.uniform(*_SPELL_S))
        finally:
            filler.unlink(missing_ok=True)


def _fill(filler: Path) -> None:
    """Fill the file system to its last byte."""
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        for block in (_BLOCK, b"\0"):
            with suppress(OSError):
                while file.write(block):
                    pass


@contextmanager
def small_disk() -> Iterator[Path | None]:
    """Yield a folder on a file system of its own of 64 MiB; None if none may be mounted, which takes root."""
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_MIB}m,mode=700", "none", folder]
        if subprocess.run(mount, capture_output=True).returncode:
            yield None
            return
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)


@dataclass
class Life:
    """Resident MiB and open files of a process over time (monotonic seconds)."""

    seconds: list[float] = field(default_factory=list)
    mib: list[float] = field(default_factory=list)
    files: list[int] = field(default_factory=list)

    @property
    def settled(self) -> tuple[list[float], list[float]]:
        """Return (seconds, MiB) without the beginning, in which everything is loaded."""
        begin = next((n for n, now in enumerate(self.seconds) if now - self.seconds[0] > _WARM_UP_S), len(self.seconds))
        return self.seconds[begin:], self.mib[begin:]


Lives = dict[str, dict[int, Life]]


async def watch_lives(host: Host, lives: Lives) -> None:
    """Look at every process once a second, by role and process id, until cancelled."""
    while True:
        for role, pid in host.processes().items():
            with suppress(OSError):
                used, files = memory_mib(pid), descriptors(pid)
                life = lives.setdefault(role, {}).setdefault(pid, Life())
                life.seconds.append(time.monotonic())
                life.mib.append(used)
                life.files.append(files)
        await asyncio.sleep(_EVERY_S)
