"""Formats states and numbers for the screen. A state has a colour, and a letter for screens without colours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ssd.ipc.trace_ring import State


class StateStyle(NamedTuple):
    letter: str
    style: str


_LOOKS = {
    State.VERIFY: StateStyle("V", "white on blue"),
    State.PREFILL: StateStyle("P", "black on cyan"),
    State.SAMPLE: StateStyle("S", "black on magenta"),
    State.WAIT_FOR_DRAFT: StateStyle("w", "white on red"),
    State.OTHER: StateStyle("o", "black on yellow"),
    State.IDLE: StateStyle(" ", "default"),
    State.PROMOTE: StateStyle("p", "black on magenta"),
    State.WAIT_FOR_TARGET: StateStyle(".", "bright_black"),
    State.LOADING: StateStyle("L", "black on bright_cyan"),
    State.DOWN: StateStyle("x", "bright_white on bright_red"),
    State.LOST: StateStyle("?", "black on white"),
}
# A tree grows darker with every depth.
_DEPTHS = ("color(157)", "color(120)", "color(84)", "color(48)", "color(42)", "color(35)", "color(29)", "color(22)")

_TICKS = " ▁▂▃▄▅▆▇█"

UP = {"UP": "bold green", "STARTING": "yellow", "STALE": "bold yellow", "DOWN": "bold red", "PARKED": "bright_black"}


def state_style(state: State, detail: int = 0) -> StateStyle:
    if state is State.DEPTH:
        depth = max(1, detail)
        return StateStyle(str(depth) if depth < 10 else "+", f"black on {_DEPTHS[min(depth, len(_DEPTHS)) - 1]}")
    return _LOOKS[state]


def named_style(name: str) -> StateStyle:
    """Return the style of a state by its name, such as `verify` or `depth 3`."""
    word, _, detail = name.partition(" ")
    return state_style(State[word.upper()], int(detail or 0))


def seconds(value: float) -> str:
    """Format a time as 0.25 ms, 12.3 ms, 123 ms or 1.20 s; 0 is a dash."""
    number, unit = (1e3 * value, "ms") if value < 1 else (value, "s")
    digits = 2 if number < 10 else 1 if number < 100 else 0
    return f"{number:.{digits}f} {unit}" if value else "-"


def size(value: int) -> str:
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def share(value: float) -> str:
    return f"{value:.0%}" if value >= 0.1 or not value else f"{value:.1%}"


def sparkline(values: Sequence[float], width: int) -> str:
    shown = values[-width:] if width > 0 else []
    most = max(shown, default=0.0)
    return "".join(_TICKS[round((len(_TICKS) - 1) * value / most)] if most else _TICKS[0] for value in shown)


def bar(part: float, width: int) -> str:
    full = round(part * width)
    return "█" * full + "░" * (width - full)
