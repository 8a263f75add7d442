"""When to launch a verification before the outcome of the one in front of it is known to the host.

Nothing lies between the two then. But a row that misses goes on with its bonus token alone: nobody waits for a fresh
draft any more. Theorem 7 (ALGORITHM 3) with measured parts says which is more.
"""

from __future__ import annotations

from ssd.speculation.learner import Mean

_SMOOTHING, _ENOUGH = 0.05, 8


class Worth:
    """Fed round by round; all rounds are of a decoding batch."""

    def __init__(self) -> None:
        self._hits, self._on_hit, self._on_miss = (Mean(0.0, _SMOOTHING) for _ in range(3))
        self._verify, self._between = Mean(0.0, _SMOOTHING), Mean(0.0, _SMOOTHING)

    def row(self, hit: bool, tokens: int, ahead: bool) -> None:
        """A row brought so many tokens; `ahead`: it was launched before the outcome before it was known."""
        self._hits.note(float(hit))
        if hit:
            self._on_hit.note(tokens)
        elif not ahead:
            self._on_miss.note(tokens)

    def round(self, verify_s: float, between_s: float) -> None:
        """A verification that was not launched ahead, and what lay between it and the one before: waiting too."""
        self._verify.note(verify_s)
        self._between.note(between_s)

    @property
    def ahead(self) -> bool:
        """Whether launching ahead brings more tokens in the same time."""
        if self._between.count < _ENOUGH:
            return False
        hits = self._hits.value
        on_hit = hits * self._on_hit.value
        waiting = (on_hit + (1 - hits) * self._on_miss.value) / (self._verify.value + self._between.value)
        return (on_hit + (1 - hits)) / self._verify.value > waiting
