"""Cheap speculators by name: what a missed row may verify without waiting for the draft (contract C6).

One is a class without constructor arguments, registered under the entry-point group `ssd.speculators`; the built-in
`ngram` is an entry point of this package, a plugin's are those of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import entry_points
from typing import Protocol

GROUP = "ssd.speculators"
MOST_EVIDENCE = 8
POLICIES = ("auto", "jit", "none")
"""Backups that are not speculators of this kind: choose, wait for the draft, go on without."""


class Speculator(Protocol):
    """Guesses about one sequence from its text alone.

    It may have an attribute `evidence`, an int: how much speaks for its last proposal. How far proposals are worth
    verifying is learned for each value from 0 to `MOST_EVIDENCE` apart.
    """

    def extend(self, tokens: Sequence[int]) -> None:
        """More committed tokens, the prompt first."""

    def propose(self, count: int) -> list[int]:
        """At most `count` tokens that may come next; [] for no idea."""


@cache
def names() -> list[str]:
    """Every value that `--backup` takes."""
    return sorted({*POLICIES, *(entry.name for entry in entry_points(group=GROUP))})


@cache
def load(name: str) -> Callable[[], Speculator] | None:
    """What makes the speculators of a backup; `auto` uses `ngram`; None where there is none. Raises what the import of
    a plugin raises."""
    wanted = "ngram" if name == "auto" else name
    found = [entry for entry in entry_points(group=GROUP) if entry.name == wanted and wanted not in POLICIES]
    return found[0].load() if found else None
