"""The description of an option, which stands beside its type, bounds and default at the field of a struct.

`ssd.cli.options` makes flags, variables and keys of the configuration file of it, `ssd.llm` the arguments of `LLM`."""

from __future__ import annotations

import inspect
from typing import NamedTuple, get_type_hints

import msgspec

MAIN, FILES, SPECULATION, SAMPLING = "Main options", "Input and output", "Speculation", "Sampling"
WEIGHTS, MEMORY, PROCESSORS = "Weights", "Memory and batches", "Processors"
CLIENTS, LIMITS, OTHER = "Clients", "Limits", "Other options"
HEADINGS = (MAIN, FILES, SPECULATION, SAMPLING, WEIGHTS, MEMORY, PROCESSORS, CLIENTS, LIMITS, OTHER)
"""The headings of the help, in their order."""


class Option(NamedTuple):
    """An option's `help`, its `heading` there, and the `flags` it has beside the field's name.

    An `advanced` option has no flag where an engine runs for one answer or one chat: only a file may set it there."""

    help: str
    heading: str = OTHER
    flags: tuple[str, ...] = ()
    advanced: bool = False


def described(options: type[msgspec.Struct]) -> dict[str, Option]:
    """Return the description of each field that has one; fields of a base come after the struct's own."""
    hints = get_type_hints(options, include_extras=True)
    return {
        name: part
        for kind in options.__mro__
        for name in inspect.get_annotations(kind)
        for part in getattr(hints[name], "__metadata__", ())
        if isinstance(part, Option)
    }
