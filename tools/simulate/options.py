"""The option types for levels of a cascade, and for fan-outs with zeros."""

from __future__ import annotations

from typing import Any

import click

from ssd.bench.quantities import Times
from ssd.cli.option_types import FanOut
from ssd.config.params import MAX_FAN_OUT
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


class Chains(FanOut):
    """Take a fan-out of the engine, zeros in a list, or "pearl" for the single chain of PEARL."""

    name = "auto|theorem|pearl|N|list"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "pearl":
            return value
        numbers = value.strip("[] ").split(",") if isinstance(value, str) else ()
        if len(numbers) > 1 and all(number.strip().isdecimal() and int(number) <= MAX_FAN_OUT for number in numbers):
            return tuple(map(int, numbers))
        return super().convert(value, param, ctx)
