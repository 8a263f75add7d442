from __future__ import annotations

import subprocess
import tracemalloc
from pathlib import Path

import pytest

from ssd.system.files import cache_dir, read_bounded
from ssd.system.interpreter import command, environment


def test_the_tests_and_their_children_have_a_cache_folder_of_their_own() -> None:
    """Only models and data sets that were fetched, and compiled kernels, are the user's: no table and no checkpoint."""
    own = cache_dir()
    assert own.name.startswith("ssd-tests-")
    assert {entry.name for entry in own.iterdir() if entry.is_symlink()} == {
        "datasets",
        "downloads",
        "kernels",
        "models",
    }
    ask = command("-c", "from ssd.system.files import cache_dir; print(cache_dir())")
    for known in (environment(), None):
        child = subprocess.run(ask, env=known, cwd=Path(__file__).parents[1], capture_output=True, text=True)
        assert child.stdout.strip() == str(own), child.stderr


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.setenv("SSD_CACHE", "/s")
    assert cache_dir() == Path("/s")
    monkeypatch.delenv("SSD_CACHE")
    assert cache_dir() == Path("/x/ssd")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "ssd"


def test_a_bound_takes_no_memory(tmp_path: Path) -> None:
    file = tmp_path / "small"
    file.write_bytes(b"x" * 3_000_000)
    tracemalloc.start()
    try:
        assert read_bounded(file, 2**30) == b"x" * 3_000_000
        assert tracemalloc.get_traced_memory()[1] < 2**25
    finally:
        tracemalloc.stop()
