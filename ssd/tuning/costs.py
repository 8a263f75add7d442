"""Cost tables: seconds of a forward by its size and the texts before it, for each situation.

Kernels take several rows at once, so the time rises in steps with the rows; with the text read it rises in
proportion."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from statistics import fmean
from typing import Literal, NamedTuple

from ssd.speculation.theory import Cost

Situation = Literal["verify", "verify_beside", "step", "step_beside"]
"""`verify`: a verification while the draft rests; `verify_beside`: while it works ahead. `step`: a tree step while the
target waits for it; `step_beside`: while the target verifies."""

SITUATIONS: tuple[Situation, ...] = ("verify", "verify_beside", "step", "step_beside")

NEAR, FAR, ROW = 256, 1280, 8
"""Tokens of text before a row in the tables, and in the forwards that show what text costs; most tokens of a row."""
_MOST_SHARE = 1 / NEAR  # then all of a row's time behind NEAR tokens is reading

_OTHER: dict[Situation, Situation] = {
    "verify": "verify_beside",
    "verify_beside": "verify",
    "step": "step_beside",
    "step_beside": "step",
}
# Learning rates of a table's factor and of a single size, and the share of the first for the model's other situation.
# A shared machine slows all sizes alike, so the other situation probably changed, too; trying it corrects that.
_DRIFT, _POINT, _COMMON = 0.05, 0.02, 0.7
# A measurement counts as at most this many times the expected time, and at least as 1 / this of it: a descheduled
# process says nothing about a forward.
_MOST = 3.0
# Two measurements of a table, or a table and later rounds, disagree if their logarithms differ by more than this.
_DISTURBED = 0.25
_EACH, _EIGHTH = 32, 128  # up to the first every size is kept, up to the second multiples of 8, beyond of 64


class Texts(NamedTuple):
    """The texts of a batch of `rows` rows, of `tokens` tokens on average."""

    rows: int = 1
    tokens: float = NEAR


class Scaled:
    """A cost behind `texts`, times a factor; a token of text adds the `share` of its row's time alone.

    The table's forwards had rows of up to `tokens_a_row` tokens behind NEAR tokens each. Behind short texts a forward
    takes less, but at least half."""

    def __init__(self, cost: Cost, factor: float, texts: Texts, share: float, tokens_a_row: float) -> None:
        self._cost, self._factor, self._texts = cost, factor, texts
        self._share, self._tokens_a_row = share, tokens_a_row

    def at(self, size: float) -> float:
        seconds, rows = self._cost.at(size), self._texts.rows
        if self._share:
            read = rows * self._texts.tokens * self._cost.at(size / rows)
            in_table = NEAR * max(1.0, size / self._tokens_a_row) * self._cost.at(min(size, self._tokens_a_row))
            seconds = max(seconds / 2, seconds + self._share * (read - in_table))
        return self._factor * seconds


class CostTable:
    """Seconds of a forward by its size.

    Between sizes it is interpolated; beyond the largest it follows the line through that and the largest size up to
    half of it. No slope is negative."""

    def __init__(self, seconds: Mapping[int, float] | None = None) -> None:
        self.seconds: dict[int, float] = {}
        self._sizes: list[int] = []
        for size, taken in (seconds or {}).items():
            self.set(size, taken)

    @property
    def known(self) -> bool:
        return bool(self._sizes)

    def set(self, size: int, seconds: float) -> None:
        """Keep the least of `seconds` measured for `size` rows: longer ones were disturbed."""
        self.seconds[size] = max(1e-9, min(seconds, self.seconds.get(size, math.inf)))
        self._sizes = sorted(self.seconds)

    def smooth(self) -> None:
        """Lower disturbed measurements: no size takes longer than a larger one."""
        bound = math.inf
        for size in reversed(self._sizes):
            bound = self.seconds[size] = min(bound, self.seconds[size])

    def at(self, size: float) -> float:
        """Return the seconds of a forward of `size` rows. Raises IndexError while nothing is known."""
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
        """Move the nearest kept size towards a measurement by log(measured / expected)."""
        size = _kept(size)
        if size not in self.seconds:
            self.set(size, self.at(size))
        self.seconds[size] *= math.exp(_POINT * log_ratio)


class Costs:
    """The cost tables, each with a factor that follows the machine's present speed.

    `text`: the share of a row's time that a token of text beyond `NEAR` adds, for "verify" and "step" once measured."""

    def __init__(
        self, tables: Mapping[str, Mapping[int, float]] | None = None, text: Mapping[str, float] | None = None
    ) -> None:
        self.tables: dict[Situation, CostTable] = {
            situation: CostTable((tables or {}).get(situation)) for situation in SITUATIONS
        }
        self.text = {name: min(share, _MOST_SHARE) for name, share in (text or {}).items()}
        self._texts = Texts()
        self.inline: Cost | None = None  # of a draft in the target's process, which works in turn instead of the other
        self.disturbed = False  # other work slowed the measuring; `written` keeps such tables apart
        self._drift = dict.fromkeys(SITUATIONS, 0.0)

    def learn_text(self, situation: Situation, share: float) -> None:
        self.text[situation] = min(max(0.0, share), _MOST_SHARE)

    def situate(self, rows: int, tokens: float) -> None:
        """Set the present batch: `rows` rows behind `tokens` tokens on average."""
        self._texts = Texts(max(1, rows), tokens)

    def of(self, situation: Situation) -> Cost | None:
        """Return the cost behind the present texts; None while it is not known."""
        if situation == "step" and self.inline is not None:
            return self.inline
        return self._scaled(situation, math.exp(self._drift[situation])) if self.tables[situation].known else None

    def _scaled(self, situation: Situation, factor: float) -> Scaled:
        model = situation.removesuffix("_beside")
        return Scaled(
            self.tables[situation],
            factor,
            self._texts,
            self.text.get(model, 0.0),
            ROW if model == "verify" else math.inf,  # all chains of a tree step have one text
        )

    def note(self, situation: Situation, size: float, seconds: float) -> None:
        table = self.tables[situation]
        if not table.known:
            table.set(_kept(size), seconds * math.exp(-self._drift[situation]))
            return
        ratio = math.log(max(1e-9, seconds) / self._scaled(situation, 1.0).at(size)) - self._drift[situation]
        ratio = min(max(ratio, -math.log(_MOST)), math.log(_MOST))
        self._drift[situation] += _DRIFT * ratio
        self._drift[_OTHER[situation]] += _COMMON * _DRIFT * ratio
        table.follow(size, ratio)

    def agrees(self, other: Costs) -> bool:
        """Return True if tables differ by no more than usual noise."""
        for situation, table in self.tables.items():
            mine, others = table.seconds, other.tables[situation].seconds
            ratios = [math.log(mine[size] / others[size]) for size in mine.keys() & others.keys()]
            if ratios and abs(fmean(ratios)) > _DISTURBED:
                return False
        return True

    def judge(self) -> None:
        """Mark the tables as disturbed if forwards are much faster now; slower ones prove nothing."""
        self.disturbed |= min(self._drift.values()) < -_DISTURBED

    def written(self, disturbed: bool = False) -> dict[str, dict[int, float]]:
        """Return the tables for a file; {} unless `self.disturbed` equals `disturbed`."""
        tables = self.tables if self.disturbed == disturbed else {}
        return {situation: dict(table.seconds) for situation, table in tables.items()}


def _kept(size: float) -> int:
    grain = 1 if size <= _EACH else 8 if size <= _EIGHTH else 64
    return max(1, grain * round(size / grain))
