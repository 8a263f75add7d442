"""Disturbs a load: kills drafts, and reads the memory of all other processes."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field

from tools.soak.processes import Host, memory_mib

_EVERY_S = 1.0


@dataclass
class Kills:
    """How many drafts were killed: after they joined the target, and while they were starting."""

    working: int = 0
    starting: int = 0

    @property
    def all(self) -> int:
        return self.working + self.starting


async def kill_drafts(host: Host, every_s: float, seed: int, kills: Kills) -> None:
    """SIGKILL the draft after random (exponential) pauses with the mean `every_s`, until cancelled.

    So it dies in every phase of its life."""
    dice = random.Random(seed)
    while True:
        await asyncio.sleep(dice.expovariate(1 / every_s))
        working = (await asyncio.to_thread(host.gauges))["draft_up"] > 0
        pid = host.processes().get("draft")
        if pid is None:
            continue  # between two lives
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            kills.working += working
            kills.starting += not working


@dataclass
class Memory:
    """Resident MiB of a process over time (monotonic seconds); of a role's newest process if it was restarted."""

    pid: int
    seconds: list[float] = field(default_factory=list)
    mib: list[float] = field(default_factory=list)


async def watch_memory(host: Host, memory: dict[str, Memory]) -> None:
    """Read the memory of every role but the draft once a second, until cancelled."""
    while True:
        for role, pid in host.processes().items():
            if role == "draft":
                continue
            with suppress(OSError):
                used = memory_mib(pid)
                if role not in memory or memory[role].pid != pid:
                    memory[role] = Memory(pid)
                memory[role].seconds.append(time.monotonic())
                memory[role].mib.append(used)
        await asyncio.sleep(_EVERY_S)
