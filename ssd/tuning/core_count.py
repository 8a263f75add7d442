"""Chooses on how many cores a target computes while it has them to itself, by time. Nothing here reads a clock."""

from __future__ import annotations

from statistics import median

# Rounds before a trial: of fewer cores, of fewer ones again that won, of more. Rounds of a trial on either count, and
# rounds after which one is given up.
_EVERY, _AGAIN, _BACK, _EACH, _LONGEST = 512, 32, 128, 5, 64
# Gains of twice the cores, as a factor: below the first they are not worth it, above the second they are again.
LITTLE, _ENOUGH = 1.1, 1.15


class CoreCount:
    """Owns the present `count` of at most `most` cores.

    Now and then a trial of some ten rounds takes turns between this count and half or twice as many. Rounds of other
    sizes say nothing. Another program's load on a core shows here, and so does memory that fewer cores fill. Fewer
    cores must win twice, more cores once."""

    def __init__(self, most: int) -> None:
        self.count = self._most = most
        self._rounds, self._wait = 0, _EVERY
        self._smaller, self._won = True, False  # the last trial was of fewer cores, and they won
        self._trial: _Trial | None = None

    def note(self, tokens: int, seconds: float) -> int:
        """Learn that a verification of `tokens` tokens took `seconds` on the cores last returned; return the next."""
        self._rounds += 1
        if self._trial is None:
            if self._most > 1 and self._rounds >= self._wait:
                self._trial, self._rounds = _Trial(tokens, self.count, self._other()), 0
        else:
            self._trial.note(tokens, seconds)
            if self._trial.over:
                self._judge(self._trial)
            elif self._rounds >= _LONGEST:
                self._trial = None
        return self.count if self._trial is None else self._trial.next

    def _judge(self, trial: _Trial) -> None:
        fewer, more = trial.counts
        won = self._smaller and trial.gain < LITTLE
        if won and self._won:
            self.count, won = fewer, False
        elif not self._smaller and trial.gain > _ENOUGH:
            self.count = more
        self._won, self._trial, self._rounds = won, None, 0
        self._wait = _AGAIN if won else _BACK if self.count < self._most else _EVERY

    def _other(self) -> int:
        self._smaller = self._won or self.count == self._most or (self.count > 1 and not self._smaller)
        return max(1, self.count // 2) if self._smaller else min(self._most, 2 * self.count)


class _Trial:
    """Rounds of `tokens` tokens by turns on two counts of cores, fewer first."""

    def __init__(self, tokens: int, present: int, other: int) -> None:
        self.counts = min(present, other), max(present, other)
        self._tokens = tokens
        self._seconds: tuple[list[float], list[float]] = [], []

    @property
    def _turn(self) -> int:
        return len(self._seconds[0]) > len(self._seconds[1])

    @property
    def next(self) -> int:
        return self.counts[self._turn]

    @property
    def over(self) -> bool:
        return len(self._seconds[1]) >= _EACH

    @property
    def gain(self) -> float:
        """Return how many times faster the larger count was."""
        fewer, more = map(median, self._seconds)
        return fewer / max(1e-9, more)

    def note(self, tokens: int, seconds: float) -> None:
        if tokens == self._tokens:
            self._seconds[self._turn].append(seconds)
