"""Backups by name: what a row may do after a miss, built in or from a plugin.

A plugin registers a class without constructor arguments under one of two entry-point groups. In `ssd.speculators` it is
a `Speculator`, which guesses from a text alone; the built-in `ngram` is one. In `ssd.backups` it is a whole policy
(`ssd.verifier.misses.MissPolicy`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

from ssd.system.registered import entries

SPECULATORS, BACKUPS = "ssd.speculators", "ssd.backups"
MOST_EVIDENCE = 8
BUILT_IN = ("auto", "jit", "none")
"""Policies of this package: choose, wait for the draft, go on without. No plugin replaces them."""


class Speculator(Protocol):
    """Guesses about one sequence from its text alone.

    It may have an attribute `evidence`, an int: how much speaks for its last proposal. How far proposals are worth
    verifying is learned separately for each value from 0 to `MOST_EVIDENCE`."""

    def extend(self, tokens: Sequence[int]) -> None:
        """More committed tokens, the prompt first."""

    def propose(self, count: int) -> list[int]:
        """Returns at most `count` tokens that may come next; [] for no idea."""


@cache
def names() -> list[str]:
    """Every value that `--backup` takes."""
    return sorted({*BUILT_IN, *(entry.name for group in (SPECULATORS, BACKUPS) for entry in entries(group))})


@cache
def load(group: str, name: str) -> Callable[[], Any] | None:
    """Returns the class that a group has under a name, or None. Raises what the import of a plugin raises."""
    found = [entry for entry in entries(group) if entry.name == name]
    return found[0].load() if found else None
