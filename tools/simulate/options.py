"""The option type for levels of a cascade."""

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
