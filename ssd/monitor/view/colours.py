"""Every state has a colour and a letter, so that it can be told without colours too."""

from __future__ import annotations

from typing import NamedTuple

from ssd.monitor.lanes import State


class Look(NamedTuple):
    """`letter` on `style`."""

    letter: str
    style: str


_LOOKS = {
    State.VERIFY: Look("V", "white on blue"),
    State.PREFILL: Look("P", "black on cyan"),
    State.SAMPLE: Look("S", "black on magenta"),
    State.WAIT_FOR_DRAFT: Look("w", "white on red"),
    State.OTHER: Look("o", "black on yellow"),
    State.IDLE: Look(" ", "default"),
    State.PROMOTE: Look("p", "black on magenta"),
    State.WAIT_FOR_TARGET: Look(".", "bright_black"),
    State.LOADING: Look("L", "black on bright_cyan"),
    State.DOWN: Look("x", "bright_white on bright_red"),
    State.LOST: Look("?", "black on white"),
}
# A tree grows darker with every depth.
_DEPTHS = ("color(157)", "color(120)", "color(84)", "color(48)", "color(42)", "color(35)", "color(29)", "color(22)")

UP = {"UP": "bold green", "STARTING": "yellow", "STALE": "bold yellow", "DOWN": "bold red"}


def look(state: State, detail: int = 0) -> Look:
    if state is State.DEPTH:
        depth = max(1, detail)
        return Look(str(depth) if depth < 10 else "+", f"black on {_DEPTHS[min(depth, len(_DEPTHS)) - 1]}")
    return _LOOKS[state]


def named(name: str) -> Look:
    """By the name that shares have: `verify`, `depth 3`."""
    word, _, detail = name.partition(" ")
    return look(State[word.upper()], int(detail or 0))
