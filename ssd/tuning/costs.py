"""What forwards take on this machine: a table for each way in which target and draft may work.

A forward's time is a staircase of its rows (kernels take several rows at once), so tables are kept, not lines."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from statistics import fmean
from typing import Literal

from ssd.speculation.theory import Cost

Situation = Literal["verify", "verify_beside", "step", "step_beside"]
"""A verification while the draft rests, or works ahead beside it; a tree step while the target waits for it, or
verifies beside it."""

SITUATIONS: tuple[Situation, ...] = ("verify", "verify_beside", "step", "step_beside")

_OTHER: dict[Situation, Situation] = {
    "verify": "verify_beside",
    "verify_beside": "verify",
    "step": "step_beside",
    "step_beside": "step",
}
# How fast the factor of a table, and a single size in it, follow what is measured. A shared machine is faster and
# slower by turns, for all sizes alike. So the factor of the model's other situation follows too, but not as far: where
# that one has not changed, the tuner finds out by trying it.
_DRIFT, _POINT, _COMMON = 0.05, 0.02, 0.7
# A measurement counts as at most so many times what was expected, or as a part of it: a descheduled process says
# nothing of a forward.
_MOST = 3.0
# Two measurements of a table, or a table and later rounds, that differ by more than this logarithm disagree.
_DISTURBED = 0.25
_EACH, _EIGHTH = 32, 128  # sizes up to these are told apart; by eights; by 64ths beyond


class Scaled:
    """A cost times a factor."""

    def __init__(self, cost: Cost, factor: float) -> None:
        self._cost, self._factor = cost, factor

    def at(self, size: float) -> float:
        return self._factor * self._cost.at(size)


class CostTable:
    """Seconds by size. Between two sizes the cost is a straight line. Beyond the largest one it goes on as from the
    largest that is at most half of it. No line falls."""

    def __init__(self, seconds: Mapping[int, float] | None = None) -> None:
        self.seconds: dict[int, float] = {}
        self._sizes: list[int] = []
        for size, taken in (seconds or {}).items():
            self.set(size, taken)

    @property
    def known(self) -> bool:
        return bool(self._sizes)

    def set(self, size: int, seconds: float) -> None:
        """Measured: a forward of `size` rows takes so many `seconds`. What took longer before was disturbed."""
        self.seconds[size] = max(1e-9, min(seconds, self.seconds.get(size, math.inf)))
        self._sizes = sorted(self.seconds)

    def smooth(self) -> None:
        """Take back what a disturbance has added: more rows take no less time."""
        bound = math.inf
        for size in reversed(self._sizes):
            bound = self.seconds[size] = min(bound, self.seconds[size])

    def at(self, size: float) -> float:
        """Returns the seconds of a forward of `size` rows. Raises IndexError while nothing is known."""
        sizes, seconds = self._sizes, self.seconds
        if size <= sizes[0]:
            return seconds[sizes[0]]
        above = bisect_left(sizes, size)
        if above < len(sizes):
            low, high = sizes[above - 1], sizes[above]
            if size == high:
                return seconds[high]
        else:
            low, high = sizes[max(0, bisect_right(sizes, sizes[-1] / 2) - 1)], sizes[-1]
        begin = high if size > high else low
        slope = max(0.0, seconds[high] - seconds[low]) / max(1, high - low)
        return seconds[begin] + slope * (size - begin)

    def follow(self, size: float, log_ratio: float) -> None:
        """Move the nearest size towards a measurement `log_ratio` away."""
        size = _kept(size)
        if size not in self.seconds:
            self.set(size, self.at(size))
        self.seconds[size] *= math.exp(_POINT * log_ratio)


class Costs:
    """The tables of all situations, and the factors by which forwards are slower at present than they say."""

    def __init__(self, tables: Mapping[str, Mapping[int, float]] | None = None) -> None:
        self.tables: dict[Situation, CostTable] = {
            situation: CostTable((tables or {}).get(situation)) for situation in SITUATIONS
        }
        self.disturbed = False  # other work disturbed the measuring: the tables are not for a file
        self._drift = dict.fromkeys(SITUATIONS, 0.0)

    def of(self, situation: Situation) -> Cost | None:
        """Returns the cost in a situation; None while it is not known."""
        table = self.tables[situation]
        return Scaled(table, math.exp(self._drift[situation])) if table.known else None

    def note(self, situation: Situation, size: float, seconds: float) -> None:
        """A forward of `size` rows took `seconds`."""
        table = self.tables[situation]
        if not table.known:
            table.set(_kept(size), seconds * math.exp(-self._drift[situation]))
            return
        ratio = math.log(max(1e-9, seconds) / table.at(size)) - self._drift[situation]
        ratio = min(max(ratio, -math.log(_MOST)), math.log(_MOST))
        self._drift[situation] += _DRIFT * ratio
        self._drift[_OTHER[situation]] += _COMMON * _DRIFT * ratio
        table.follow(size, ratio)

    def agrees(self, other: Costs) -> bool:
        """Tell whether all tables of both say the same of the sizes that both have, but for usual noise."""
        for situation, table in self.tables.items():
            mine, others = table.seconds, other.tables[situation].seconds
            ratios = [math.log(mine[size] / others[size]) for size in mine.keys() & others.keys()]
            if ratios and abs(fmean(ratios)) > _DISTURBED:
                return False
        return True

    def judge(self) -> None:
        """Mark the tables as disturbed if forwards take far less time than they say: other work slowed the measuring.

        Longer times prove nothing: texts may be longer than those measured, or the machine busy now."""
        self.disturbed |= min(self._drift.values()) < -_DISTURBED

    def written(self, disturbed: bool = False) -> dict[str, dict[int, float]]:
        """Return the tables for a file; none unless they are `disturbed` as asked for."""
        tables = self.tables if self.disturbed == disturbed else {}
        return {situation: dict(table.seconds) for situation, table in tables.items()}


def _kept(size: float) -> int:
    """The size that a table keeps in place of `size`."""
    grain = 1 if size <= _EACH else 8 if size <= _EIGHTH else 64
    return max(1, grain * round(size / grain))
