"""Chooses by time how many cores a target uses while it has them to itself."""

from __future__ import annotations

import logging
from statistics import median

from ssd.execution.core_team import CoreTeam
from ssd.tuning.tuner import Tuning

log = logging.getLogger("ssd.target")

LITTLE = 1.1
"""The gain of a doubling of cores, as a factor, below which it is not worth it."""
_ENOUGH = 1.15  # the gain above which it is worth it again
# Rounds before the next trial: usually; after one that the other count won, which must win twice; while fewer are used.
_USUALLY, _TO_CONFIRM, _WHILE_FEWER = 512, 32, 128
# Rounds of a trial on either count, without the first, in which other programs move to the cores that became free; and
# rounds after which a trial is given up.
_EACH, _MOVING, _LONGEST = 5, 3, 64
_ALIKE = 2  # a count serves verifications of up to this many times the tokens that it was judged by


class CoreChoice:
    """Brings `CoreCount` to the cores of `team`; `tuning` learns nothing from rounds of a trial."""

    def __init__(self, team: CoreTeam, tuning: Tuning | None) -> None:
        self._team, self._tuning, self._count = team, tuning, CoreCount(team.all)

    def begin(self, tokens: int) -> None:
        """Choose the cores for `tokens` tokens, if the target has all of them."""
        if self._team.alone:
            self._team.limit(self._count.cores(tokens))
        if self._tuning is not None:
            self._tuning.try_cores(self._team.alone and self._count.trying)

    def end(self, seconds: float) -> None:
        if not self._team.alone:
            return
        before = self._count.count
        self._count.note(seconds)
        if self._count.count != before:
            log.info("computing on %d of %d cores, by time", self._count.count, self._team.all)


class CoreCount:
    """Owns the present `count` of at most `most` cores, which trials change.

    A trial compares rounds of one size on this count and on half or twice as many: it shows other programs' load on a
    core, and memory that fewer cores fill. A count must win twice. A prompt, or a much larger batch, has all cores."""

    def __init__(self, most: int) -> None:
        self.count = self._most = most
        self.trying = False  # True if the next verification belongs to a trial
        self._rounds, self._wait, self._judged = 0, _USUALLY, 0
        self._of_fewer, self._won_once = True, False
        self._trial: _Trial | None = None

    def cores(self, tokens: int) -> int:
        if self._trial is None and self._most > 1 and self._rounds >= self._wait:
            self._trial, self._rounds = _Trial(tokens, self.count, self._other()), 0
        self.trying = self._trial is not None and self._trial.tokens == tokens
        if self._trial is not None and self.trying:
            return self._trial.next
        return self.count if tokens <= _ALIKE * self._judged else self._most

    def note(self, seconds: float) -> None:
        self._rounds += 1
        if self._trial is None:
            return
        if self.trying:
            self._trial.note(seconds)
            if self._trial.over:
                self._judge(self._trial)
        elif self._rounds >= _LONGEST:
            self._trial, self._rounds = None, 0

    def _judge(self, trial: _Trial) -> None:
        fewer, more = trial.counts
        won = trial.gain < LITTLE if self._of_fewer else trial.gain > _ENOUGH
        if won and self._won_once:
            self.count, self._judged, won = fewer if self._of_fewer else more, trial.tokens, False
        self._won_once, self._trial, self._rounds = won, None, 0
        self._wait = _TO_CONFIRM if won else _WHILE_FEWER if self.count < self._most else _USUALLY

    def _other(self) -> int:
        if not self._won_once:
            self._of_fewer = self.count == self._most or (self.count > 1 and not self._of_fewer)
        return max(1, self.count // 2) if self._of_fewer else min(self._most, 2 * self.count)


class _Trial:
    """Rounds of `tokens` tokens on two counts of cores, first the lower."""

    def __init__(self, tokens: int, present: int, other: int) -> None:
        self.tokens, self.counts = tokens, (min(present, other), max(present, other))
        self._seconds: tuple[list[float], list[float]] = [], []

    @property
    def _turn(self) -> int:
        return len(self._seconds[0]) >= _MOVING + _EACH

    @property
    def next(self) -> int:
        return self.counts[self._turn]

    @property
    def over(self) -> bool:
        return len(self._seconds[1]) >= _MOVING + _EACH

    @property
    def gain(self) -> float:
        fewer, more = (median(seconds[_MOVING:]) for seconds in self._seconds)
        return fewer / max(1e-9, more)

    def note(self, seconds: float) -> None:
        self._seconds[self._turn].append(seconds)
