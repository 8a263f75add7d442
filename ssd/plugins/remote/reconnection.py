"""The pauses before a lost connection is made again."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

_FIRST_S, _LONGEST_S = 0.1, 5.0


class Reconnection:
    """Doubles the pause after each loss, from 0.1 s to 5 s; a connection that served more than 5 s resets it.

    `tell` gets a cause once, even if the cause repeats."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell, self._trouble = tell, ""
        self._served_since = math.inf
        self._next_s = self.pause_s = _FIRST_S

    def served(self) -> None:
        """Note that the connection serves from now on."""
        self._served_since = time.monotonic()

    def lost(self, why: str) -> float:
        """Return the pause in seconds before the next attempt."""
        if time.monotonic() > self._served_since + _LONGEST_S:
            self._next_s, self._trouble = _FIRST_S, ""
        self._served_since = math.inf
        if why != self._trouble:
            self._trouble = why
            self._tell(f"{why}; trying again")
        self.pause_s, self._next_s = self._next_s, min(2 * self._next_s, _LONGEST_S)
        return self.pause_s
