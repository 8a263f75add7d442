"""Run the core's tests without plugins: `python -m tools.without_plugins [PLUGIN ...] [-- PYTEST_ARGUMENTS]`.

Each plugin is removed in turn, from a copy of the checkout; with the name `all`, all of them together. Prints a line
for each, and ends with status 1 if tests failed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
ALL = "all"
_DEFAULT = ("-q", "-n", "3", "--dist", "loadfile", "--no-loadscope-reorder", "-m", "not thorough")


def plugins() -> list[str]:
    """Return the names of the plugins that this checkout has."""
    return sorted(path.parent.name for path in (ROOT / "ssd" / "plugins").glob("*/__init__.py"))


def copy_without(names: Sequence[str], folder: Path) -> Path:
    """Copy the checkout to `folder` without these plugins and their tests, and return the copy."""
    copy = folder / "checkout"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    gone = tuple(f"{top}/plugins/{name}/" for top in ("ssd", "tests") for name in names)
    for file in filter(None, files.decode().split("\0")):
        if not file.startswith(gone) and (ROOT / file).is_file():
            (copy / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, copy / file)
    for command in (["init", "-q"], ["add", "-A"]):  # tests ask git for the files
        subprocess.run(["git", *command], cwd=copy, check=True)
    return copy


def run(names: Sequence[str], arguments: Sequence[str]) -> bool:
    """Run the core's tests without these plugins, print their last line, and return True if they passed."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ssd-without-") as folder:
        copy = copy_without(names, Path(folder))
        command = [sys.executable, "-m", "pytest", "--ignore", "tests/plugins", *(arguments or _DEFAULT)]
        done = subprocess.run(
            command, cwd=copy, env=os.environ | {"PYTHONPATH": str(copy)}, capture_output=True, text=True, check=False
        )
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()]
    if done.returncode:
        print(*lines[-40:], sep="\n")
    print(f"without {', '.join(names)}: {lines[-1]} ({time.monotonic() - began:.0f} s)", flush=True)
    return done.returncode == 0


def main(given: list[str]) -> int:
    end = given.index("--") if "--" in given else len(given)
    names, arguments = given[:end] or plugins(), given[end + 1 :]
    if unknown := [name for name in names if name not in (ALL, *plugins())]:
        print(f"no plugin {', '.join(unknown)}: there are {', '.join(plugins())}", file=sys.stderr)
        return 2
    return int(not all([run(plugins() if name == ALL else [name], arguments) for name in names]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
