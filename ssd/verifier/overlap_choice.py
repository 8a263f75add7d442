"""Decides when overlap scheduling pays (`ssd.verifier.overlap`).

With overlap no time is lost between two verifications. But a row that misses goes on with its bonus token alone, as the
target does not wait for a fresh draft. Theorem 7 (arXiv 2603.03251) with measured values says which brings more tokens
per second."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ssd.config.params import Mode
from ssd.tuning.estimates import Mean

_SMOOTHING, _ENOUGH = 0.05, 8
_UNDRAFTED: tuple[Mode, ...] = ("ar",)


class OverlapPolicy:
    """Learns from rounds if overlap pays. All are of decoding batches in which some row may be looked up.

    Nothing is looked up for rows in the modes `boardless`: without draft tokens, or with a draft in this process."""

    def __init__(self, boardless: Collection[Mode] = _UNDRAFTED) -> None:
        self._boardless = boardless
        self._hits, self._on_hit, self._on_miss = (Mean(0.0, _SMOOTHING) for _ in range(3))
        self._verify, self._between = Mean(0.0, _SMOOTHING), Mean(0.0, _SMOOTHING)

    def note_row(self, hit: bool, tokens: int, overlapped: bool) -> None:
        """Note that a row brought `tokens` tokens.

        `overlapped`: it was launched before the previous outcome was known."""
        self._hits.note(float(hit))
        if hit:
            self._on_hit.note(tokens)
        elif not overlapped:
            self._on_miss.note(tokens)

    def note_round(self, verify_s: float, between_s: float) -> None:
        """Note the seconds of a verification that was not overlapped, and of the gap before it, waits included."""
        self._verify.note(verify_s)
        self._between.note(between_s)

    def allows(self, modes: Iterable[Mode]) -> bool:
        """Return True if a batch of requests in these modes may overlap.

        A batch in which nothing is looked up waits for nothing, so it loses nothing by overlap."""
        return not any(map(self.looks_up, modes)) or self.pays

    def looks_up(self, mode: Mode) -> bool:
        """Return True if rows in a mode are looked up."""
        return mode not in self._boardless

    @property
    def pays(self) -> bool:
        """Return True if overlap brings more tokens per second."""
        if self._between.count < _ENOUGH:
            return False
        hits = self._hits.value
        on_hit = hits * self._on_hit.value
        waiting = (on_hit + (1 - hits) * self._on_miss.value) / (self._verify.value + self._between.value)
        return (on_hit + (1 - hits)) / self._verify.value > waiting
