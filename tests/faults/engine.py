"""Starts real engines for the process tests, and looks at what they leave behind."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.launch.supervisor import Engine


@contextmanager
def running_engine(**options: Any) -> Iterator[Engine]:
    """The built-in pair, up and ready; stopped at the end."""
    engine = Engine(resolve(EngineOptions(**options)))
    engine.start()
    try:
        yield engine
    finally:
        engine.stop(drain=0)


def gone(pid: int, within_s: float) -> bool:
    """Whether a process (also one that is not our child) has ended within so many seconds."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        readable, _, _ = select.select([descriptor], [], [], within_s)
        return bool(readable)
    finally:
        os.close(descriptor)


def shared_memory() -> set[str]:
    """Names in /dev/shm."""
    return {entry.name for entry in Path("/dev/shm").iterdir()}


def descriptors() -> int:
    """How many file descriptors this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))
