"""What entry points name: parts of this package, and plugins'."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

_PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def entries(group: str) -> list[EntryPoint]:
    """Return the entry points of a group: those of what is installed, and this package's own.

    In a checkout its own are those of pyproject.toml, so that one works that was only unpacked, or installed before a
    part was added."""
    found = list(entry_points(group=group))
    known = {(entry.name, entry.value) for entry in found}
    return found + [entry for entry in _own(group) if (entry.name, entry.value) not in known]


@cache
def _own(group: str) -> list[EntryPoint]:
    try:
        project = tomllib.loads(_PROJECT.read_text())["project"]
    except (OSError, KeyError, tomllib.TOMLDecodeError):  # installed: its metadata has them
        return []
    if project.get("name") != "ssd":
        return []
    return [EntryPoint(name, value, group) for name, value in project.get("entry-points", {}).get(group, {}).items()]
