"""Finds backups by name: policies for rows after a miss, built in or from a plugin.

A plugin registers a class without constructor arguments: in `ssd.speculators` a `Speculator` (the built-in `ngram` is
one), in `ssd.backups` a whole `ssd.verifier.misses.MissPolicy`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

from ssd.system.registered import entries

SPECULATORS, BACKUPS = "ssd.speculators", "ssd.backups"
MOST_EVIDENCE = 8
BUILT_IN = ("auto", "jit", "none")
"""Built-in policies: choose by cost, wait for the draft, continue without draft tokens. No plugin replaces them."""


class Speculator(Protocol):
    """Proposes tokens of one sequence from its text alone.

    An optional int `evidence` from 0 to `MOST_EVIDENCE` says how reliable the last proposal is. The engine learns for
    each value how many tokens are worth verifying."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Take more committed tokens; the first call brings the prompt."""

    def propose(self, count: int) -> list[int]:
        """Return at most `count` tokens that may come next."""


@cache
def names() -> list[str]:
    return sorted({*BUILT_IN, *(entry.name for group in (SPECULATORS, BACKUPS) for entry in entries(group))})


@cache
def load(group: str, name: str) -> Callable[[], Any] | None:
    """Return the class that a group has under a name, or None. Raises the errors of its import."""
    found = [entry for entry in entries(group) if entry.name == name]
    return found[0].load() if found else None
