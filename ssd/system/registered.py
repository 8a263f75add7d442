"""Entry points: parts of this package and of plugins, by name.

Parsers of a model's answers are such parts. In `ssd.tool_parsers` a name stands for an
`ssd.frontend.parsers.tools.ToolParser`, in `ssd.reasoning_parsers` for an
`ssd.frontend.parsers.reasoning.ReasoningParser`."""

from __future__ import annotations

import sys
import tomllib
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from ssd.errors import UsageError

TOOLS, REASONING = "ssd.tool_parsers", "ssd.reasoning_parsers"
AUTO, NONE = "auto", "none"
"""Values of the options beside names: the parser that fits the chat template, and no parser."""
_PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def entries(group: str) -> list[EntryPoint]:
    """Return the entry points of a group: those of installed packages, and those of this one.

    A checkout's own entry points are read from its pyproject.toml and come first. So a checkout works without
    installation, and with parts that were added or moved after installation."""
    own = _own(group)
    known = {(entry.name, entry.value) for entry in own}
    return own + [entry for entry in _installed(group, tuple(sys.path)) if (entry.name, entry.value) not in known]


@cache
def _installed(group: str, path: tuple[str, ...]) -> list[EntryPoint]:
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


# -- parsers -----------------------------------------------------------------------------------------------------------


@cache
def names(group: str) -> list[str]:
    """Return the names of a group's parsers."""
    return sorted({entry.name for entry in entries(group)})


@cache
def load(group: str, name: str) -> Any:
    """Return the class that a group has under a name. Raises any error of a plugin's import."""
    return next(entry for entry in entries(group) if entry.name == name).load()


def check(group: str, option: str, name: str) -> None:
    """Raise UsageError if the value `name` of `option` is not a parser's."""
    if name not in (AUTO, NONE, *names(group)):
        raise UsageError(f"{option} {name!r}: there are {', '.join([AUTO, NONE, *names(group)])}")


def fitting(group: str, template: str) -> str:
    """Return the name of the first parser that fits a chat template; "" if none does."""
    return next((name for name in names(group) if load(group, name).fits(template)), "")
