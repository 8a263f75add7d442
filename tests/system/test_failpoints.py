"""Failpoints: what may be armed, where, and what it does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from ssd.errors import UsageError
from ssd.ipc.board import BoardReader, BoardWriter, Key, size_bytes
from ssd.ipc.process import memory_file
from ssd.system import failpoints
from tests.boards import lookup, prepared

KEY = Key(1, 2, 3, 4, 0, 5)
REACH = """
import sys
from ssd.system import failpoints
failpoints.arm_from_environment(sys.argv[1] == "allowed")
print("before", flush=True)
for _ in range(1000):
    failpoints.reach("draft.read")
print("after", flush=True)
"""


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoints.arm("")


def reached(spec: str, allowed: str = "allowed") -> subprocess.Popen[str]:
    """A process that comes by `draft.read` a thousand times."""
    environment = os.environ | {failpoints.VARIABLE: spec}
    command = [sys.executable, "-c", REACH, allowed]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "before\n"
    return process


@pytest.mark.parametrize("spec", ["draft.read=kill", "draft.read=kill@0.02, draft.hello=hang"])
def test_kill(spec: str) -> None:
    with reached(spec) as process:
        assert process.wait(60) == -signal.SIGKILL
        assert process.stdout is not None and process.stdout.read() == ""


def test_stop_and_go_on() -> None:
    with reached("draft.read=stop@0.01") as process:
        while process.poll() is None:
            _, status = os.waitpid(process.pid, os.WUNTRACED | os.WNOHANG)
            if os.WIFSTOPPED(status):
                process.send_signal(signal.SIGCONT)
                break
        process.kill()
        assert os.WIFSTOPPED(status) and os.WSTOPSIG(status) == signal.SIGSTOP


def test_a_hang_is_busy() -> None:
    with reached("draft.read=hang") as process:
        before = _cpu_ticks(process.pid)
        while _cpu_ticks(process.pid) < before + 5:
            assert process.poll() is None
        process.kill()


def _cpu_ticks(pid: int) -> int:
    """User time of a process."""
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[11])


def test_a_delay_takes_its_time_and_goes_on() -> None:
    failpoints.arm("draft.step=delay:20")
    began = time.monotonic()
    failpoints.reach("draft.step")
    failpoints.reach("draft.read")
    assert time.monotonic() - began >= 0.02


@pytest.mark.parametrize(("spec", "allowed"), [("draft.read=kill", "forbidden"), ("draft.read=kill@0", "allowed")])
def test_nothing_happens(spec: str, allowed: str) -> None:
    with reached(spec, allowed) as process:
        assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("draft.raed=kill", "no failpoint 'draft.raed'; there are draft.load, draft.hello"),
        ("draft.read=kil", r"no action 'kil' .*; there are kill, stop, hang, delay"),
        ("draft.read", "is not name=action"),
        ("draft.read=delay", "delay takes milliseconds"),
        ("draft.read=kill:5", "delay takes milliseconds"),
        ("draft.read=delay:soon", "'soon' is not a number from 0 to"),
        ("draft.read=kill@2", "'2' is not a number from 0 to 1"),
        ("draft.read=kill@nan", "'nan' is not a number"),
    ],
)
def test_what_is_misspelt_is_named(spec: str, message: str) -> None:
    failpoints.arm("draft.step=delay:0")
    with pytest.raises(UsageError, match=message):
        failpoints.arm(spec)
    assert failpoints.is_armed("draft.step"), "what was armed stays so"


class _Here(Exception):
    pass


@pytest.mark.parametrize(
    ("point", "found"), [("draft.mid_write", None), ("draft.after_payload", None), ("draft.after_commit", [7, 8])]
)
def test_what_the_board_shows_at_each_point_of_a_write(
    point: str, found: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry that was there is not seen any more, and the new one not before it is whole."""

    def leave() -> None:
        raise _Here

    descriptor = memory_file("board", size_bytes(1))
    writer, reader = BoardWriter(descriptor, 1), BoardReader(descriptor, 1, 64)
    os.close(descriptor)
    writer.publish(0, prepared([0], [KEY], [[1, 2, 3]]))
    monkeypatch.setitem(failpoints._ACTIONS, "stop", leave)
    failpoints.arm(f"{point}=stop")
    with pytest.raises(_Here):
        writer.publish(0, prepared([0], [KEY], [[7, 8]]))
    assert lookup(reader, 0, KEY) == found
    assert reader.rejected == 0
