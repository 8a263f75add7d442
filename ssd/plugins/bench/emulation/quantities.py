"""Types of options: times with units."""

from __future__ import annotations

import re
from typing import Any

import click

from ssd.speculation.theory import LinearCost

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


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


def time_text(value: LinearCost | float) -> str:
    """Return a time, or a line of times, in the notation of the options above."""
    if isinstance(value, LinearCost):
        return f"{time_text(value.fixed)}+{time_text(value.each)}" if value.each else time_text(value.fixed)
    for unit, seconds in _SECONDS.items():
        if value >= seconds:
            return f"{value / seconds:.4g}{unit}"
    return f"{value / 1e-6:.4g}us" if value else "0"
