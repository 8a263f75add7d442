"""Option types: levels of a cascade, and rates."""

from __future__ import annotations

from typing import Any

import click

from ssd.bench.quantities import Times
from ssd.errors import UsageError
from tools.simulate.cascade import Level


class LevelOf(click.ParamType):
    """STEP,BY_TARGET for the largest draft; STEP,K,BY_NEXT,BY_TARGET for a smaller one."""

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


class Rates(click.ParamType):
    """A list of numbers such as ".9,.8": `count` of them, each from 0 to `most`, if these are given."""

    name = "N,N,..."

    def __init__(self, count: int = 0, most: float | None = None) -> None:
        self._count, self._most = count, most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(float(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers", param, ctx)
        if self._count and len(numbers) != self._count:
            self.fail(f"{value!r} has {len(numbers)} numbers, not {self._count}", param, ctx)
        if self._most is not None and not all(0 <= number <= self._most for number in numbers):
            self.fail(f"{value!r}: each number must be from 0 to {self._most:g}", param, ctx)
        return numbers
