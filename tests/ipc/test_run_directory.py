"""The directory of an engine's sockets: nobody else's, and gone when the engine is, at the latest with the next one."""

from __future__ import annotations

import fcntl
import shutil
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


def test_what_belongs_to_others_stays(parent: Path) -> None:
    notes, linked = parent / "ssd-notes", parent / "linked"
    for directory in (notes, linked):
        directory.mkdir()
        (directory / "text").touch()
    (linked / "lock").touch()
    (parent / "ssd-link").symlink_to(linked)
    with run_directory() as first, run_directory() as second:
        assert first.exists()
        assert second.exists()
    assert (notes / "text").exists()
    assert (linked / "text").exists()


def test_a_directory_that_is_taken_for_a_dead_engines_is_made_again(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another engine may start between its making and its locking."""
    flock = fcntl.flock

    def too_late(lock: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        (early,) = parent.iterdir()
        shutil.rmtree(early)
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", too_late)
    with run_directory() as directory:
        assert run_directories() == [directory]
