"""What entry points name: parts of this package, and plugins'."""

from __future__ import annotations

import sys
import tomllib
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

_PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def entries(group: str) -> list[EntryPoint]:
    """Return the entry points of a group: those of installed packages, and those of this one.

    A checkout's own are read from its pyproject.toml. So it works if it was only unpacked, and if a part was added
    after it was installed."""
    found = _installed(group, tuple(sys.path))
    known = {(entry.name, entry.value) for entry in found}
    return found + [entry for entry in _own(group) if (entry.name, entry.value) not in known]


@cache
def _installed(group: str, path: tuple[str, ...]) -> list[EntryPoint]:
    """Those of the packages on the `path`: every package's file is read."""
    return list(entry_points(group=group))


@cache
def _own(group: str) -> list[EntryPoint]:
    try:
        project = tomllib.loads(_PROJECT.read_text())["project"]
    except (OSError, KeyError, tomllib.TOMLDecodeError):  # installed: its metadata has them
        return []
    if project.get("name") != "ssd-engine":
        return []
    return [EntryPoint(name, value, group) for name, value in project.get("entry-points", {}).get(group, {}).items()]
