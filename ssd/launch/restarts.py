"""When a process that died is started again. Pure: times are given, in seconds."""

from __future__ import annotations

from collections import deque

_FIRST_DELAY_S = 0.1
_WINDOW_S = 60.0


class Restarts:
    """Back-off of one process: 0.1 s, doubled with each death in the last minute, up to `longest` seconds.

    After more than `per_minute` deaths in a minute the process stays off. `due` is when to start it; None: not at all.
    """

    def __init__(self, per_minute: float = 5, longest: float = 30.0) -> None:
        self.due: float | None = None
        self._per_minute, self._longest = per_minute, longest
        self._deaths: deque[float] = deque()

    def died(self, now: float) -> float | None:
        """Note a death. Returns the delay before the next start; None: it stays off."""
        self._deaths.append(now)
        while self._deaths[0] < now - _WINDOW_S:
            self._deaths.popleft()
        if len(self._deaths) > self._per_minute:
            self.due = None
            return None
        doublings = min(len(self._deaths) - 1, 60)  # a float holds that
        delay = min(self._longest, _FIRST_DELAY_S * 2.0**doublings)
        self.due = now + delay
        return delay

    def replace(self, now: float) -> None:
        """Have it started at once, without counting a death."""
        self.due = now

    def taken(self, now: float) -> bool:
        """Tell, once, that it is time to start it."""
        if self.due is None or now < self.due:
            return False
        self.due = None
        return True
