"""Finds when a device for the draft pays: `ssd` on both devices against the other modes on the target's alone.

Each mode is taken at the best setting of a grid, per device. Bisection finds where two are equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from ssd.planning.grid import Forecast, Grid, Pair, forecast
from ssd.speculation.fan_out import MOST, hit_rate

# The engine runs no larger batches.
MAX_BATCH = 256
_PIECES, _HALVINGS = 16, 24
# Rates are kept this far from 0 and 1, which no power changes.
_LEAST = 1e-3

Ranges = tuple[tuple[float, float], ...]


class BreakEven(NamedTuple):
    """The break-even points of one batch size.

    `worth`: devices that the draft may take before `ssd` per device falls to the better of `ar` and `sd`; 0: `ssd` is
    slower even if the draft takes none. The ranges are those in which `ssd` per device is not below that mode.
    `acceptance_*`: of the acceptance rate over the grid's longest K, all positions changed alike. `hits_*`: of the hit
    rate, with the fan-out list that is best at the present one; only the c of c F^-r changes."""

    batch: int
    pays: bool
    worth: float
    acceptance_over_sd: Ranges
    acceptance_over_ar: Ranges
    hits_over_sd: Ranges


def break_even(pair: Pair, found: Forecast, grid: Grid) -> BreakEven:
    """Return the break-even points for the forecast of a batch, `found`."""
    speeds, batch = found.speeds, found.batch
    rival = max(speeds["ar"], speeds["sd"])
    worth = max(0.0, pair.target_gpus * (speeds["ssd"] / rival - 1))
    per_gpu = found.per_gpu(pair)

    @cache
    def accepting(level: float) -> Forecast:
        return forecast(with_acceptance(pair, level), batch, grid)

    @cache
    def hitting(level: float) -> Forecast:
        return forecast(with_misses(pair, level), batch, grid)

    def rate(level: float) -> float:
        return with_acceptance(pair, level).rate(max(grid.lookaheads))

    def hits(level: float) -> float:
        best = found.best
        return hit_rate(pair.rate(best.lookahead), best.fan_out, with_misses(pair, level).misses)

    def named(ranges: Ranges, name: Callable[[float], float]) -> Ranges:
        return tuple((name(first), name(last)) for first, last in ranges)

    return BreakEven(
        batch,
        per_gpu["ssd"] > max(per_gpu["ar"], per_gpu["sd"]),
        worth,
        named(where(lambda level: _lead(pair, accepting(level), "sd"), _LEVELS), rate),
        named(where(lambda level: _lead(pair, accepting(level), "ar"), _LEVELS), rate),
        named(where(lambda level: _lead(pair, hitting(level), "sd"), _LEVELS), hits),
    )


def paying_batches(pair: Pair, grid: Grid) -> Ranges:
    """Return the batch sizes up to MAX_BATCH at which `ssd` per device is not below the better of the others."""

    def lead(batch: float) -> float:
        found = forecast(pair, int(batch), grid)
        return min(_lead(pair, found, "ar"), _lead(pair, found, "sd"))

    sizes = [2**power for power in range(MAX_BATCH.bit_length())]
    return where(lead, sizes, whole=True)


def with_acceptance(pair: Pair, level: float) -> Pair:
    """Return the pair with each rate to the power (1 - level) / level: 0 at `level` 0, unchanged at 0.5, 1 at 1."""
    power = (1 - level) / max(level, 1e-9)
    rates = (min(max(rate, _LEAST), 1 - _LEAST) for rate in pair.acceptance)
    return replace(pair, acceptance=tuple(rate**power for rate in rates))


def with_misses(pair: Pair, level: float) -> Pair:
    """Return the pair with another c of the miss rate c F^-r: at `level` 0 all outcomes miss, at 1 none."""
    _, r = pair.misses
    return replace(pair, misses=((1 - level) * MOST**r, r))


def where(lead: Callable[[float], float], points: Sequence[float], whole: bool = False) -> Ranges:
    """Return the ranges between the first and the last of the rising `points` in which `lead` is at least 0.

    `lead` must be monotone between neighbouring points. Bisection finds the ends, among whole numbers if `whole`; they
    belong to the range."""
    signs = [lead(point) >= 0 for point in points]
    starts = [points[0]] if signs[0] else []
    ends: list[float] = []
    for (low, before), (high, after) in pairwise(zip(points, signs, strict=True)):
        if before == after:
            continue
        outside, inside = (low, high) if after else (high, low)
        for _ in range(_HALVINGS):
            middle = (outside + inside) // 2 if whole else (outside + inside) / 2
            if middle in (outside, inside):
                break
            if lead(middle) >= 0:
                inside = middle
            else:
                outside = middle
        (starts if after else ends).append(inside)
    if signs[-1]:
        ends.append(points[-1])
    return tuple(zip(starts, ends, strict=True))


def _lead(pair: Pair, found: Forecast, mode: str) -> float:
    per_gpu = found.per_gpu(pair)
    return per_gpu["ssd"] / per_gpu[mode] - 1


_LEVELS = tuple(piece / _PIECES for piece in range(_PIECES + 1))
