"""Numbers as people read them."""

from __future__ import annotations

from collections.abc import Sequence

_TICKS = " ▁▂▃▄▅▆▇█"


def seconds(value: float) -> str:
    """As 0.25 ms, 12.3 ms, 123 ms, 1.20 s; a dash for none."""
    number, unit = (1e3 * value, "ms") if value < 1 else (value, "s")
    digits = 2 if number < 10 else 1 if number < 100 else 0
    return f"{number:.{digits}f} {unit}" if value else "-"


def size(value: int) -> str:
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def share(value: float) -> str:
    return f"{value:.0%}" if value >= 0.1 or not value else f"{value:.1%}"


def sparkline(values: Sequence[float], width: int) -> str:
    """The newest `width` values, from nothing to the largest of them."""
    shown = values[-width:] if width > 0 else []
    most = max(shown, default=0.0)
    return "".join(_TICKS[round((len(_TICKS) - 1) * value / most)] if most else _TICKS[0] for value in shown)


def bar(part: float, width: int) -> str:
    full = round(part * width)
    return "█" * full + "░" * (width - full)
