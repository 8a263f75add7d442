"""Entry points: parts of this package and of plugins, by name."""

from __future__ import annotations

import sys
import tomllib
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

_PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def entries(group: str) -> list[EntryPoint]:
    """Return the entry points of a group: those of installed packages, and those of this one.

    A checkout's own entry points are read from its pyproject.toml. So a checkout works without installation, and with
    parts that were added after installation."""
    found = _installed(group, tuple(sys.path))
    known = {(entry.name, entry.value) for entry in found}
    return found + [entry for entry in _own(group) if (entry.name, entry.value) not in known]


@cache
def _installed(group: str, path: tuple[str, ...]) -> list[EntryPoint]:
    """Return the entry points of the packages on the `path`, from every package's file."""
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
