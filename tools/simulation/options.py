"""What the command line accepts: times with units, lines of times, lists of rates, levels of a cascade."""

from __future__ import annotations

import re
from typing import Any

import click

from simulation.cascade import Level
from ssd.errors import UsageError
from ssd.speculation.tuner import Line

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


class Duration(click.ParamType):
    """ "18.3ms", "64us", "0.02s" or "0" in seconds."""

    name = "TIME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(us|ms|s)\s*|\s*0\s*", value)
        if not found:
            self.fail(f"{value!r} is not a time of at least 0 such as 18.3ms, 64us or 0.02s", param, ctx)
        return float(found[1]) * _SECONDS[found[2]] if found[1] else 0.0


class Times(click.ParamType):
    """ "18.2ms+64us": a time, and what each token or chain adds; the second part may be left out."""

    name = "TIME[+EACH]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Line:
        if isinstance(value, Line):
            return value
        parts = [Duration().convert(part, param, ctx) for part in value.split("+")]
        if len(parts) > 2:
            self.fail(f"{value!r} has more than two parts", param, ctx)
        return Line(parts[0], parts[1] if len(parts) == 2 else 0.0)


class Rates(click.ParamType):
    """ ".9,.8" as a tuple of numbers; `count` of them where it is given. Their range is checked where they are used."""

    name = "N,N,..."

    def __init__(self, count: int = 0) -> None:
        self._count = count

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(float(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers", param, ctx)
        if self._count and len(numbers) != self._count:
            self.fail(f"{value!r} has {len(numbers)} numbers, not {self._count}", param, ctx)
        return numbers


class LevelOf(click.ParamType):
    """STEP,BY_TARGET of the largest draft; STEP,K,BY_NEXT,BY_TARGET of a smaller one."""

    name = "STEP[,K,BY_NEXT],BY_TARGET"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Level:
        if isinstance(value, Level):
            return value
        step, *rest = value.split(",")
        try:
            numbers = [float(part) for part in rest]
            lookahead, by_next, by_target = numbers if len(numbers) == 3 else (0.0, 0.0, *numbers)
            return Level(Times().convert(step, param, ctx), int(lookahead), by_next, by_target)
        except (ValueError, UsageError) as error:
            self.fail(f"{value!r} is not {self.name}: {error}", param, ctx)
