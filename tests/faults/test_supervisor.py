"""The supervisor itself: what it reads may be anything, what it owns may vanish, and its end is certain."""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ssd.client import Client
from ssd.config.params import SamplingParams
from ssd.ipc import trace_ring
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.launch.supervisor import Engine
from ssd.monitor.publisher import SnapshotPublisher
from tests.faults.engine import gone
from tests.scripted_engine import PATIENCE_S, SMALL

FEW = SamplingParams(max_tokens=3, ignore_eos=True)


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine(resolve(EngineOptions(**SMALL)))
    engine.start()
    yield engine
    engine.stop(drain=0)


def test_wild_lanes_do_not_keep_a_dead_process_from_being_replaced(engine: Engine) -> None:
    descriptor = next(
        fd for fd in Path("/proc/self/fd").iterdir() if "memfd:ssd-trace" in os.readlink(fd)
    )  # which every child has, too
    with descriptor.open("r+b") as file, mmap.mmap(file.fileno(), trace_ring.SIZE_BYTES) as memory:
        memory[:] = b"\xff" * 7 + b"\x7f" + b"\xff" * (trace_ring.SIZE_BYTES - 8)
    target = engine.pids["target"]
    os.kill(target, signal.SIGKILL)
    assert gone(target)
    deadline = time.monotonic() + PATIENCE_S
    while engine.pids.get("target", target) == target:
        assert time.monotonic() < deadline and not engine.wait(0.01), engine.failure


def test_whatever_the_supervisor_stumbles_over_the_engine_ends_with_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stumble(self: SnapshotPublisher, role: str) -> None:
        raise KeyboardInterrupt(f"over the {role}")

    monkeypatch.setattr(SnapshotPublisher, "ended", stumble)
    pids, directory = engine.pids, Path(engine.address.removeprefix("ipc://")).parent
    os.kill(pids["target"], signal.SIGKILL)
    assert engine.wait(PATIENCE_S)
    assert "over the target" in str(engine.failure)
    assert all(gone(pid, within_s=0) for pid in pids.values())
    assert not directory.exists()


def test_an_engine_whose_run_directory_is_removed_says_so_and_serves_until_a_process_dies(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    with Client(engine.address) as client:
        shutil.rmtree(Path(engine.address.removeprefix("ipc://")).parent)
        deadline = time.monotonic() + PATIENCE_S
        while "was removed: HTTP and open connections go on" not in caplog.text:
            assert time.monotonic() < deadline
            client.generate([[1, 2, 3]], FEW)
        os.kill(engine.pids["target"], signal.SIGKILL)
        assert engine.wait(PATIENCE_S)
    assert "killed by SIGKILL; the run directory was removed" in str(engine.failure)
    assert len(caplog.records) == 1
