"""A child process as its supervisor sees it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ssd.config.engine import EngineConfig
from ssd.ipc.process import Start
from ssd.launch.children import ChildProcess
from ssd.system import cgroups


def sleepers(count: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[ChildProcess]:
    """Start children that do nothing."""
    (folder / "sleeps.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    start = Start("frontend", 1, "", EngineConfig(target="t"), (), -1, -1)
    return [ChildProcess("sleeps", start) for _ in range(count)]


def cause_of(process: ChildProcess, number: signal.Signals) -> str:
    """End a child by a signal."""
    os.kill(process.pid, number)
    return process.cause(lambda seconds: None)


@pytest.mark.parametrize(
    ("number", "kills", "cause"),
    [
        (signal.SIGKILL, 4, "killed by SIGKILL: the kernel has killed for want of memory"),
        (signal.SIGKILL, 3, "killed by SIGKILL"),
        (signal.SIGSEGV, 4, "killed by SIGSEGV"),
    ],
)
def test_a_kill_is_told_as_want_of_memory_if_the_kernel_has_killed_for_it_meanwhile(
    number: signal.Signals, kills: int, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counter is a stand-in for the kernel's."""
    monkeypatch.setattr(cgroups, "oom_kills", lambda: 3)
    (process,) = sleepers(1, tmp_path, monkeypatch)
    monkeypatch.setattr(cgroups, "oom_kills", lambda: kills)
    assert cause_of(process, number) == cause
    assert process.code == -number


def test_a_kill_of_the_kernel_is_told_of_one_death_and_not_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "oom_kills", lambda: 3)
    first, second = sleepers(2, tmp_path, monkeypatch)
    monkeypatch.setattr(cgroups, "oom_kills", lambda: 4)
    assert "want of memory" in cause_of(first, signal.SIGKILL)
    assert cause_of(second, signal.SIGKILL) == "killed by SIGKILL"


def test_a_child_that_has_ended_leaves_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(os.listdir("/proc/self/fd"))
    for process in sleepers(2, tmp_path, monkeypatch):
        cause_of(process, signal.SIGKILL)
    assert set(os.listdir("/proc/self/fd")) <= before
