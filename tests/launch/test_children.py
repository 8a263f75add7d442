"""A child process as its supervisor sees it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ssd.config.engine import EngineConfig
from ssd.ipc.process import Start
from ssd.launch import children
from ssd.launch.children import ChildProcess


@pytest.mark.parametrize(
    ("number", "kills", "cause"),
    [
        (signal.SIGKILL, 4, "killed by SIGKILL, perhaps for want of memory"),
        (signal.SIGKILL, 3, "killed by SIGKILL"),
        (signal.SIGSEGV, 4, "killed by SIGSEGV"),
    ],
)
def test_a_kill_may_be_for_want_of_memory_if_the_kernel_has_killed_for_it_meanwhile(
    number: signal.Signals, kills: int, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counter is a stand-in for the kernel's."""
    counters = tmp_path / "vmstat"
    monkeypatch.setattr(children, "_COUNTERS", counters)
    (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    counters.write_text("pgfault 7\noom_kill 3\n")
    process = ChildProcess("sleeps", Start("frontend", 1, "", EngineConfig(target="t"), (), -1, -1))
    counters.write_text(f"pgfault 9\noom_kill {kills}\n")
    os.kill(process.pid, number)
    assert process.cause(lambda seconds: None) == cause
    assert process.code == -number
