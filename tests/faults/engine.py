"""Starts real engines for the process tests, and looks at what they leave behind."""

from __future__ import annotations

import math
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.launch.supervisor import Engine
from tests.scripted_engine import PATIENCE_S


@contextmanager
def running_engine(**options: Any) -> Iterator[Engine]:
    """The built-in pair, up and ready; stopped at the end."""
    engine = Engine(resolve(EngineOptions(**options)))
    engine.start()
    try:
        yield engine
    finally:
        engine.stop(drain=0)


@contextmanager
def sending(engine: Engine, role: str, number: signal.Signals, most: float = math.inf) -> Iterator[Callable[[], int]]:
    """Send a signal to the processes that take a role, `most` of them at most. Yield how many got one."""
    sent, done = set[int](), threading.Event()

    def send() -> None:
        while len(sent) < most and not done.wait(0.002):
            if (pid := engine.pids.get(role)) is not None and pid not in sent:
                os.kill(pid, number)
                sent.add(pid)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield lambda: len(sent)
    finally:
        done.set()
        thread.join()


def gone(pid: int, within_s: float = PATIENCE_S) -> bool:
    """Whether a process (also one that is not our child) has ended within so many seconds: shorter than the engine's
    own limits, and longer than a child that was just forked takes on a busy machine to see its parent's death."""
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
