"""Entry points: parts of the core, of plugins and of other packages, by name (docs/design.md, "Plugins")."""

from __future__ import annotations

import logging
import sys
import tomllib
from collections.abc import Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from ssd.errors import UsageError

TOOLS, REASONING = "ssd.tool_parsers", "ssd.reasoning_parsers"
DOORS, QUOTAS = "ssd.doors", "ssd.quotas"
COMMANDS, PROCESSES = "ssd.commands", "ssd.processes"
EXECUTORS, LINKS, TABLES = "ssd.executors", "ssd.links", "ssd.tables"
FALLBACKS = "ssd.fallbacks"
SIZES, ARCHITECTURES = "ssd.sizes", "ssd.gguf_architectures"
EMULATIONS, LOAD_FORMATS = "ssd.emulations", "ssd.load_formats"
DRAFTS = "ssd.drafts"
_NAME = "ssd-engine"
AUTO, NONE, DUMMY = "auto", "none", "dummy"
"""Values of the options beside names: what fits the chat template or the files, no parser, random weights."""
log = logging.getLogger("ssd")

_PACKAGE = Path(__file__).parents[1]
_PROJECT = _PACKAGE.parent / "pyproject.toml"


def entries(group: str) -> list[EntryPoint]:
    """Return the entry points of a group: those of this package, then those of other installed packages."""
    return [entry for entry in _known(group) if _is_here(entry)]


def removed(group: str) -> dict[str, str]:
    """Return the names in a group whose plugins were removed from this package, and the plugins."""
    return {entry.name: entry.module.split(".")[2] for entry in _known(group) if not _is_here(entry)}


def _known(group: str) -> list[EntryPoint]:
    """Return the entry points of a group; a checkout's own are those of its pyproject.toml, installed or not."""
    own = _own(group)
    others = _installed(group, tuple(sys.path))
    if own is not None:
        others = [entry for entry in others if entry.dist is None or entry.dist.name != _NAME]
    return [*(own or ()), *others]


@cache
def _installed(group: str, path: tuple[str, ...]) -> list[EntryPoint]:
    return list(entry_points(group=group))


@cache
def _own(group: str) -> list[EntryPoint] | None:
    try:
        project = tomllib.loads(_PROJECT.read_text())["project"]
    except (OSError, KeyError, tomllib.TOMLDecodeError):  # installed: its metadata has them
        return None
    if project.get("name") != _NAME:
        return None
    return [EntryPoint(name, value, group) for name, value in project.get("entry-points", {}).get(group, {}).items()]


def _is_here(entry: EntryPoint) -> bool:
    top, _, rest = entry.module.partition(".plugins.")
    return top != "ssd" or (_PACKAGE / "plugins" / rest.split(".")[0] / "__init__.py").is_file()


@cache
def names(group: str) -> list[str]:
    return sorted({entry.name for entry in entries(group)})


@cache
def load(group: str, name: str) -> Any:
    """Return what a group has under a name. Raises KeyError for an unknown name, UsageError if its import fails."""
    for entry in entries(group):
        if entry.name == name:
            try:
                return entry.load()
            except Exception as error:  # of another package's code
                owner = _NAME if entry.dist is None else entry.dist.name
                cause = f"{type(error).__name__}: {error}"
                raise UsageError(f"{name} of {owner} (entry points {group}) cannot be loaded: {cause}") from error
    raise KeyError(name)


def load_all(group: str) -> dict[str, Any]:
    """Return what a group has by its names, sorted; leave out what cannot be loaded, with one line in the log."""
    return {name: found for name in names(group) for found in _usable(group, name)}


@cache
def _usable(group: str, name: str) -> list[Any]:
    try:
        return [load(group, name)]
    except UsageError as error:
        log.warning("left out: %s", error)
        return []


def check(group: str, option: str, name: str, own: Sequence[str] = (AUTO, NONE)) -> None:
    """Raise UsageError if the value `name` of `option` is neither in a group nor one of the option's `own`."""
    if name not in own and name not in names(group):
        raise UsageError(f"{option} {name!r}: there are {', '.join([*own, *names(group)])}")


def emulation(name: str) -> Any:
    """Return what emulates a `runner`, a `model` or an `agreement`. Raises UsageError if nothing here does."""
    if name not in names(EMULATIONS):
        raise UsageError("emulated times and synthetic acceptance are not part of this installation")
    return load(EMULATIONS, name)


def fitting(group: str, template: str) -> str:
    """Return the name of the first parser that fits a chat template; "" if none does."""
    return next((name for name, parser in load_all(group).items() if parser.fits(template)), "")
