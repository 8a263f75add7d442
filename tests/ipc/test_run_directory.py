"""The directory of an engine's sockets: nobody else's, and gone when the engine is, at the latest with the next one."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ssd.ipc.run_directory import run_directories, run_directory

KILLED = """
import os, signal
from ssd.ipc.run_directory import run_directory
with run_directory() as directory:
    (directory / "client.sock").touch()
    print(directory, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        yield Path(directory)


def test_what_an_engine_has_left_whose_processes_were_all_killed_goes_with_the_next_start() -> None:
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True)
    left = Path(done.stdout.strip())
    assert run_directories() == [left]
    with run_directory() as directory:
        assert run_directories() == [directory]
    assert run_directories() == []


def files(parent: Path) -> set[str]:
    return {str(path.relative_to(parent)) for path in parent.rglob("*")}


def test_what_belongs_to_others_stays(parent: Path) -> None:
    """Each lacks one thing that marks a run directory."""
    magic = b"ssd run directory 1\n"
    for name, lock in {"ssd-experiments": magic, "ssd-projects": b"", "ssd-abcdefgh": magic + b"more"}.items():
        (parent / name).mkdir(mode=0o700)
        (parent / name / "lock").write_bytes(lock)
        (parent / name / "client.sock").touch()
    (parent / "ssd-readable").mkdir(mode=0o755)
    (parent / "ssd-readable" / "lock").write_bytes(magic)
    (parent / "ssd-withfifo").mkdir(mode=0o700)
    os.mkfifo(parent / "ssd-withfifo" / "lock")
    (parent / "linked").mkdir(mode=0o700)
    (parent / "linked" / "lock").write_bytes(magic)
    (parent / "ssd-linkedto").symlink_to(parent / "linked")
    (parent / "ssd-linklock").mkdir(mode=0o700)
    (parent / "ssd-linklock" / "lock").symlink_to(parent / "linked" / "lock")
    (parent / "ssd-justfile").touch()
    before = files(parent)
    with run_directory() as first, run_directory() as second:
        assert run_directories() == sorted([first, second])
    assert files(parent) == before


def test_what_another_user_has_made_is_no_engine_to_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """/tmp is shared: whoever listens there could show anything."""
    with run_directory() as directory:
        assert run_directories() == [directory]
        monkeypatch.setattr(os, "geteuid", lambda: directory.stat().st_uid + 1)
        assert run_directories() == []


def test_of_a_dead_engines_directory_only_what_it_has_made_goes(parent: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True)
    left = Path(done.stdout.strip())
    made = ("engine.sock", "supervisor.sock", "telemetry.sock", "rank-1.sock", "ranks-3", "about.json")
    for name in (*made, "notes", "my.sock"):
        (left / name).touch()
    with run_directory():
        assert {path.name for path in left.iterdir()} == {"notes", "my.sock"}


def test_a_directory_is_nobodys_until_it_is_locked(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another engine may start between its making and its locking."""
    flock = fcntl.flock

    def late(lock: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        with run_directory():
            pass
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with run_directory() as directory:
        assert run_directories() == [directory]
