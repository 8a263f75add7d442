"""Types of options: numbers, times with units, rates, and lists of whole numbers."""

from __future__ import annotations

import math
import re
from typing import Any

import click

from ssd.speculation.theory import LinearCost

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_MOST_VALUES = 64


class Real(click.FloatRange):
    """A number in a range; nan is refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


class Duration(click.ParamType):
    """A time such as "18.3ms", "64us", "0.02s" or "0"; the value is in seconds."""

    name = "TIME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(us|ms|s)\s*|\s*0\s*", value)
        if not found:
            self.fail(f"{value!r} is not a time of at least 0 such as 18.3ms, 64us or 0.02s", param, ctx)
        return float(found[1]) * _SECONDS[found[2]] if found[1] else 0.0


class Times(click.ParamType):
    """A time, and optionally what each token or chain adds: "18.2ms+64us"."""

    name = "TIME[+EACH]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> LinearCost:
        if isinstance(value, LinearCost):
            return value
        parts = [Duration().convert(part, param, ctx) for part in value.split("+")]
        if len(parts) > 2:
            self.fail(f"{value!r} has more than two parts", param, ctx)
        return LinearCost(parts[0], parts[1] if len(parts) == 2 else 0.0)


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


class Wholes(click.ParamType):
    """Whole numbers from `least` to `most`, such as "1-8", "1,2,4" or "1-3,6"; the value is sorted, each once."""

    name = "N|N-M|N,N,..."

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        numbers: set[int] = set()
        for part in value.split(","):
            found = re.fullmatch(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", part)
            if not found:
                self.fail(f"{value!r} is neither a number, a range such as 1-8, nor a list such as 1,2,4", param, ctx)
            first, last = int(found[1]), int(found[2] or found[1])
            if not self._least <= first <= last <= self._most:
                self.fail(f"{value!r}: numbers go from {self._least} to {self._most}, upwards", param, ctx)
            numbers.update(range(first, last + 1))
        if len(numbers) > _MOST_VALUES:
            self.fail(f"{value!r} has {len(numbers)} numbers; at most {_MOST_VALUES} are worked out", param, ctx)
        return tuple(sorted(numbers))


def time_text(value: LinearCost | float) -> str:
    """Return a time, or a line of times, in the notation of the options above."""
    if isinstance(value, LinearCost):
        return f"{time_text(value.fixed)}+{time_text(value.each)}" if value.each else time_text(value.fixed)
    for unit, seconds in _SECONDS.items():
        if value >= seconds:
            return f"{value / seconds:.4g}{unit}"
    return f"{value / 1e-6:.4g}us" if value else "0"
