"""Computes each verification on as many cores as pay, and learns from its time."""

from __future__ import annotations

import logging

from ssd.execution.core_team import CoreTeam
from ssd.tuning.core_count import CoreCount
from ssd.tuning.tuner import Tuning

log = logging.getLogger("ssd.target")


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
