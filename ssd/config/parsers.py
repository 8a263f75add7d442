"""Parsers of a model's answers, by name: built in or from a plugin, registered under an entry-point group.

In `ssd.tool_parsers` a name stands for an `ssd.frontend.parsers.tools.ToolParser`, in `ssd.reasoning_parsers` for an
`ssd.frontend.parsers.reasoning.ReasoningParser`."""

from __future__ import annotations

from functools import cache
from typing import Any

from ssd.errors import UsageError
from ssd.system.registered import entries

TOOLS, REASONING = "ssd.tool_parsers", "ssd.reasoning_parsers"
AUTO, NONE = "auto", "none"
"""Values of the options beside names: the parser that fits the chat template, and no parser."""


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
