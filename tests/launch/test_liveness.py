"""Which processes count as alive, told from their counters and the system's word."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from ssd.ipc.process import HEARTBEAT_BYTES, Heartbeats, memory_file
from ssd.launch import liveness
from ssd.launch.liveness import LOOK_S, Liveness, Stuck


@pytest.fixture
def heartbeats() -> Iterator[Heartbeats]:
    descriptor = memory_file("heartbeat", HEARTBEAT_BYTES)
    yield Heartbeats(descriptor)
    os.close(descriptor)


@pytest.fixture
def pid() -> Iterator[int]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process.pid
        process.kill()


def looks(
    watch: Liveness, processes: dict[str, int], seconds: float, start: float = 100.0, ready: bool = True
) -> dict[str, Stuck]:
    """What is found stuck when everybody has been looked at for so many seconds."""
    found: dict[str, Stuck] = {}
    for look in range(int(seconds / LOOK_S) + 1):
        found = watch.stuck({role: (pid, ready) for role, pid in processes.items()}, start + look * LOOK_S)
    return found


def test_a_counter_is_seen_by_everyone_who_has_its_memory() -> None:
    descriptor = memory_file("heartbeat", HEARTBEAT_BYTES)
    mine, theirs = Heartbeats(descriptor), Heartbeats(descriptor)
    mine.beat("draft")
    mine.beat("draft")
    assert (theirs.turns("draft"), theirs.turns("target")) == (2, 0)
    os.close(descriptor)


def test_a_loop_that_stands_still_is_stuck_after_the_time_out_and_one_that_turns_never(
    heartbeats: Heartbeats, pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "STEP_TIMEOUT_S", 5.0)
    watch = Liveness(heartbeats)
    assert looks(watch, {"target": pid, "draft": pid}, 4.5) == {}
    heartbeats.beat("target")
    assert set(looks(watch, {"target": pid, "draft": pid}, 2.0, start=105.0)) == {"draft"}


def test_a_new_process_begins_with_all_its_time(
    heartbeats: Heartbeats, pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "STEP_TIMEOUT_S", 2.0)
    watch = Liveness(heartbeats)
    looks(watch, {"target": pid}, 1.5)
    assert looks(watch, {"target": os.getpid()}, 1.5, start=102.0) == {}


def test_time_in_which_nobody_could_look_counts_for_nothing(
    heartbeats: Heartbeats, pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that was suspended wakes this process first, perhaps."""
    monkeypatch.setattr(liveness, "STEP_TIMEOUT_S", 5.0)
    watch = Liveness(heartbeats)
    assert watch.stuck({"target": (pid, True)}, 100.0) == {}
    assert watch.stuck({"target": (pid, True)}, 900.0) == {}


def test_a_stopped_process_is_stuck_soon_if_somebody_waits_for_it(heartbeats: Heartbeats, pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED)
    everyone = dict.fromkeys(("target", "target-1", "frontend", "draft"), pid)
    stuck = looks(Liveness(heartbeats), everyone, 5.5)
    assert set(stuck) == {"target", "target-1", "frontend"} and stuck["target"] == (
        "stopped by a signal for 5 s",
        False,
    )


def test_one_that_is_stopped_for_a_moment_is_not_stuck_however_long_it_has_loaded(
    heartbeats: Heartbeats, pid: int
) -> None:
    watch = Liveness(heartbeats)
    looks(watch, {"target": pid}, 30.0, ready=False)
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED)
    assert looks(watch, {"target": pid}, 4.5, start=130.25, ready=False) == {}
    assert set(looks(watch, {"target": pid}, 0.5, start=135.0, ready=False)) == {"target"}


def test_a_busy_process_is_not_taken_for_a_stopped_one(heartbeats: Heartbeats) -> None:
    with subprocess.Popen(["sh", "-c", "while :; do :; done"]) as process:
        time.sleep(0.05)
        assert looks(Liveness(heartbeats), {"target": process.pid}, 10.0) == {}
        process.kill()


def test_a_process_that_has_ended_is_somebody_elses_business(heartbeats: Heartbeats) -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert looks(Liveness(heartbeats), {"target": process.pid}, 2.0) == {}


def test_loading_takes_long_but_not_for_ever(heartbeats: Heartbeats, pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "STEP_TIMEOUT_S", 2.0)
    watch = Liveness(heartbeats)
    assert looks(watch, {"target": pid}, 599.0, ready=False) == {}
    assert looks(watch, {"target": pid}, 1.5, start=699.0) == {}, "its steps are counted from when it is ready"
    found = looks(Liveness(heartbeats), {"draft": pid}, 601.0, ready=False)
    assert found == {"draft": ("not ready in 600 s", True)}


def test_a_process_that_is_stopped_while_it_loads_is_stuck_too(heartbeats: Heartbeats, pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED)
    loading = dict.fromkeys(("frontend", "draft"), pid)
    assert set(looks(Liveness(heartbeats), loading, 5.5, ready=False)) == {"frontend", "draft"}
