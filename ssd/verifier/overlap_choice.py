"""Decides when overlap scheduling pays (`ssd.verifier.overlap`).

It saves time between verifications, but a row that misses goes on with its bonus token alone. Theorem 7 (arXiv
2603.03251) compares the speeds."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ssd.config.params import Mode
from ssd.tuning.estimates import Mean

_SMOOTHING, _ENOUGH = 0.05, 8
_UNDRAFTED: tuple[Mode, ...] = ("ar",)


class OverlapPolicy:
    """Learns from decoding rounds if overlap pays.

    Rows in the modes `boardless` are not looked up: without draft tokens, or with a draft in this process."""

    def __init__(self, boardless: Collection[Mode] = _UNDRAFTED) -> None:
        self._boardless = boardless
        self._hits, self._on_hit, self._on_miss = (Mean(0.0, _SMOOTHING) for _ in range(3))
        self._verify, self._between = Mean(0.0, _SMOOTHING), Mean(0.0, _SMOOTHING)

    def note_row(self, hit: bool, tokens: int, overlapped: bool) -> None:
        """Note that a row brought `tokens` tokens; `overlapped`: launched before the last outcome was known."""
        self._hits.note(float(hit))
        if hit:
            self._on_hit.note(tokens)
        elif not overlapped:
            self._on_miss.note(tokens)

    def note_round(self, verify_s: float, between_s: float) -> None:
        """Note the seconds of a verification without overlap, and of the gap before it."""
        self._verify.note(verify_s)
        self._between.note(between_s)

    def allows(self, modes: Iterable[Mode]) -> bool:
        """Return True if a batch in these modes may overlap; one without look-ups loses nothing by it."""
        return not any(map(self.looks_up, modes)) or self.pays

    def looks_up(self, mode: Mode) -> bool:
        return mode not in self._boardless

    @property
    def pays(self) -> bool:
        if self._between.count < _ENOUGH:
            return False
        hits = self._hits.value
        on_hit = hits * self._on_hit.value
        waiting = (on_hit + (1 - hits) * self._on_miss.value) / (self._verify.value + self._between.value)
        return (on_hit + (1 - hits)) / self._verify.value > waiting
