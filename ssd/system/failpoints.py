"""Named places in the protocol at which a test can make a process die, stop, hang or wait.

SSD_FAILPOINTS="draft.after_payload=kill@0.01,draft.step=delay:20"
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from typing import NamedTuple

from ssd.errors import UsageError

VARIABLE = "SSD_FAILPOINTS"

POINTS = {
    "draft.load": "before a model is loaded",
    "draft.hello": "before the handshake",
    "draft.read": "a message is taken from the socket, and nothing was done with it",
    "draft.rejoin": "asked to start over, everything is forgotten, and no hello was said yet",
    "draft.prefill": "pages are taken for a prompt, or more of a text than a round brings, that is not computed yet",
    "draft.step": "before a forward pass",
    "draft.mid_write": "entries of the board are invalid, and half of their words are the new ones",
    "draft.after_payload": "all words of the entries are written but the one that makes them valid",
    "draft.after_commit": "the entries are valid",
    "target.submit": "a request is read, and not queued yet",
    "target.step": "before a step",
    "rank.step": "a rank but the first is told what to run, and has not begun",
}
"""The failpoints, and the state of a process that reaches one."""

_LONGEST_DELAY_MS = 3_600_000
_GRAMMAR = re.compile(r"(?P<name>[^=]+)=(?P<action>[^:@]+)(:(?P<ms>[^@]+))?(@(?P<chance>.+))?")


class _Armed(NamedTuple):
    act: Callable[[], None]
    probability: float


_armed: dict[str, _Armed] = {}


def arm(text: str) -> None:
    """Arm the failpoints of `text` and disarm all others. Raises UsageError.

    `text` has `name=action[:milliseconds][@probability]`, with commas between them."""
    found = dict(_parsed(part.strip()) for part in text.split(",") if part.strip())
    _armed.clear()
    _armed.update(found)


def arm_from_environment(allowed: bool) -> None:
    if allowed:
        arm(os.environ.get(VARIABLE, ""))


def reach(name: str) -> None:
    if _armed and (armed := _armed.get(name)) is not None and random.random() < armed.probability:
        armed.act()


def is_armed(name: str) -> bool:
    """Return True if a point is armed, for work that only the point needs."""
    return name in _armed


def _parsed(part: str) -> tuple[str, _Armed]:
    match = _GRAMMAR.fullmatch(part)
    if match is None:
        raise UsageError(f"{VARIABLE}: {part!r} is not name=action[:milliseconds][@probability]")
    name, action, milliseconds, chance = match.group("name", "action", "ms", "chance")
    if name not in POINTS:
        raise UsageError(f"{VARIABLE}: no failpoint {name!r}; there are {', '.join(POINTS)}")
    if action not in (*_ACTIONS, "delay"):
        raise UsageError(f"{VARIABLE}: no action {action!r} (in {part!r}); there are {', '.join((*_ACTIONS, 'delay'))}")
    if (action == "delay") != (milliseconds is not None):
        raise UsageError(f"{VARIABLE}: {part!r}: delay takes milliseconds, as in delay:20, and no other action does")
    probability = 1.0 if chance is None else _number(part, chance, 1.0)
    if milliseconds is None:
        return name, _Armed(_ACTIONS[action], probability)
    seconds = _number(part, milliseconds, _LONGEST_DELAY_MS) / 1e3
    return name, _Armed(lambda: time.sleep(seconds), probability)


def _number(part: str, text: str, most: float) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= most:
        raise UsageError(f"{VARIABLE}: {part!r}: {text!r} is not a number from 0 to {most:g}")
    return number


def _hang() -> None:
    while True:
        pass


_ACTIONS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": _hang,
}
