"""The description of an option, beside its type, bounds and default at the field of a struct.

For example `Annotated[Budget, "Most outcomes prepared per round.", SPECULATION, ADVANCED]`: the help, then a heading if
not the struct's own `heading`, ADVANCED, and more flags. `ssd.cli.options` and `ssd.llm` read it."""

from __future__ import annotations

import inspect
from typing import NamedTuple, get_type_hints

import msgspec

MAIN, FILES, SPECULATION, SAMPLING = "Main options", "Input and output", "Speculation", "Sampling"
WEIGHTS, MEMORY, PROCESSORS = "Weights", "Memory and batches", "Processors"
CLIENTS, LIMITS, OTHER = "Clients", "Limits", "Other options"
HEADINGS = (MAIN, FILES, SPECULATION, SAMPLING, WEIGHTS, MEMORY, PROCESSORS, CLIENTS, LIMITS, OTHER)
"""The headings of the help, in their order."""
ADVANCED = "advanced"
"""Marks an option without a flag where an engine runs for one answer or one chat: only a file may set it there."""


class Option(NamedTuple):
    help: str
    heading: str
    flags: tuple[str, ...]
    advanced: bool


def described(options: type[msgspec.Struct]) -> dict[str, Option]:
    """Return the description of each field that has one; fields of a base come last."""
    hints, found = get_type_hints(options, include_extras=True), {}
    for kind in options.__mro__:
        for name in inspect.get_annotations(kind):
            help, *rest = [part for part in getattr(hints[name], "__metadata__", ()) if isinstance(part, str)] or [""]
            if help:
                heading = next((word for word in rest if word in HEADINGS), getattr(kind, "heading", OTHER))
                flags = tuple(word for word in rest if word.startswith("-"))
                found[name] = Option(help, heading, flags, ADVANCED in rest)
    return found
