"""A child process as its supervisor sees it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ssd.config import cgroups
from ssd.config.engine import EngineConfig
from ssd.ipc.process import Start
from ssd.launch.children import ChildProcess


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
    (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = ChildProcess("sleeps", Start("frontend", 1, "", EngineConfig(target="t"), (), -1, -1))
    monkeypatch.setattr(cgroups, "oom_kills", lambda: kills)
    os.kill(process.pid, number)
    assert process.cause(lambda seconds: None) == cause
    assert process.code == -number
