"""Plant faults in copies of the working tree, and see that the tests find them.

\b
    python -m tools.plant                          # every fault, in minutes
    python -m tools.plant page-freed-twice         # one

A fault is a patch in tools/plant/faults. Before the diff it says in a sentence what is wrong, and names each test that
finds it in a line `Found by: TEST`. These tests must pass without the fault and fail with it. Exit status 1 if a test
fails without a fault, a patch does not apply, or a fault survives.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import click

from ssd.cli.outputs import console, grid
from ssd.system import interpreter
from ssd.system.files import cache_dir
from tools.processes import ROOT

FAULTS = Path(__file__).parent / "faults"
_FOUND_BY = "Found by: "
_SECONDS = 120  # of one test
_FAILED = 1  # pytest's exit status; 2 to 5 say that it could not run the tests


class Fault(NamedTuple):
    """A fault to plant: `wrong` says what its `patch` breaks, and the `tests` must find it."""

    name: str
    wrong: str
    tests: list[str]
    patch: Path


def faults(names: Sequence[str] = ()) -> list[Fault]:
    """Return the faults with these names, by default all of them. Raises click.BadParameter for an unknown name."""
    found = {patch.stem: _read(patch) for patch in sorted(FAULTS.glob("*.patch"))}
    if unknown := [name for name in names if name not in found]:
        raise click.BadParameter(f"there is no {unknown[0]} in {FAULTS}")
    return [found[name] for name in names or found]


def _read(patch: Path) -> Fault:
    wrong, *lines = patch.read_text().partition("\n--- ")[0].splitlines()
    tests = [line.removeprefix(_FOUND_BY) for line in lines if line.startswith(_FOUND_BY)]
    if not tests:
        raise click.ClickException(f"{patch} names no test")
    return Fault(patch.stem, wrong, tests, patch)


def apply(patch: Path, folder: Path, *options: str) -> bool:
    """Apply a patch to the files in `folder`; return whether it fits."""
    # Git looks for no repository above the folder, in which paths would have another beginning.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    command = ["git", "apply", "--recount", *options, str(patch)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True).returncode == 0


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
def main(names: tuple[str, ...]) -> None:
    planted = faults(names)
    with tempfile.TemporaryDirectory(prefix="ssd-plant-") as scratch, ThreadPoolExecutor(os.cpu_count()) as pool:
        clean = Path(scratch) / "clean"
        _copy_tree(clean)
        _own_cache(Path(scratch) / "cache")
        status, told = _pytest(clean, dict.fromkeys(test for fault in planted for test in fault.tests))
        if status != 0:
            raise click.ClickException(f"without a fault\n{told}")
        rows = list(pool.map(lambda fault: _row(fault, clean), planted))
    console().print(grid("", ("fault", "outcome", "what is wrong", "s"), rows, left=3))
    if any(outcome != "found" for _, outcome, _, _ in rows):
        raise SystemExit(1)


def _copy_tree(to: Path) -> None:
    """Copy the files of the working tree that git tracks, or would track."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in filter(None, subprocess.check_output(listed, cwd=ROOT, text=True).split("\0")):
        if (ROOT / name).is_file():  # it may be deleted and not committed
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def _own_cache(to: Path) -> None:
    """Make a cache folder that has the user's models, and keeps the kernels of faulty sources."""
    shutil.copytree(cache_dir() / "kernels", to / "kernels")
    (to / "models").symlink_to(cache_dir() / "models")


def _row(fault: Fault, clean: Path) -> tuple[str, str, str, str]:
    """Plant a fault in a copy of its own; return the row that says what its tests make of it."""
    began, own = time.monotonic(), clean.parent / fault.name
    shutil.copytree(clean, own)
    outcome = "no longer applies"
    if apply(fault.patch, own):
        status, _ = _pytest(own, fault.tests, "-x")
        outcome = {0: "SURVIVES", _FAILED: "found"}.get(status, f"pytest ends with {status}")
    shutil.rmtree(own)
    return fault.name, outcome, fault.wrong, f"{time.monotonic() - began:.0f}"


def _pytest(folder: Path, tests: Iterable[str], *options: str) -> tuple[int, str]:
    """Run tests of a copy of the tree; return pytest's exit status and the end of what it says."""
    options = ("-q", "--hypothesis-profile=unshrunk", "--timeout", str(_SECONDS), *options, *tests)
    ours = {"PYTHONPATH": str(folder), "SSD_CACHE": str(folder.parent / "cache")}
    command = [sys.executable, "-m", "pytest", *options]
    done = subprocess.run(command, cwd=folder, env=interpreter.environment() | ours, capture_output=True, text=True)
    return done.returncode, (done.stdout + done.stderr)[-4000:]


if __name__ == "__main__":
    main()
