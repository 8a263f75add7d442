"""The times at which a process that died is started again. Pure: times are given, in seconds."""

from __future__ import annotations

from collections import deque

_FIRST_DELAY_S = 0.1
_WINDOW_S = 60.0


class Restarts:
    """Back-off of one process: 0.1 s, doubled with each death that counts, up to `longest` seconds.

    A death counts for a minute, and until the process comes up. After more than `per_minute` deaths the process stays
    off. `due`: time of the next start, or None."""

    def __init__(self, per_minute: float = 5, longest: float = 30.0) -> None:
        self.due: float | None = None
        self._per_minute, self._longest = per_minute, longest
        self._deaths: deque[float] = deque()
        self._came_up = False  # since its last death

    @property
    def deaths(self) -> int:
        return len(self._deaths)

    def came_up(self) -> None:
        self._came_up = True

    def died(self, now: float) -> float | None:
        """Note a death. Return the delay before the next start; None: it stays off."""
        self._deaths.append(now)
        while self._came_up and self._deaths[0] < now - _WINDOW_S:
            self._deaths.popleft()
        self._came_up = False
        if len(self._deaths) > self._per_minute:
            self.due = None
            return None
        doublings = min(len(self._deaths) - 1, 60)  # a float holds that
        delay = min(self._longest, _FIRST_DELAY_S * 2.0**doublings)
        self.due = now + delay
        return delay

    def replace(self, now: float) -> None:
        """Make the next start due at once, without counting a death."""
        self.due = now

    def taken(self, now: float) -> bool:
        """Return True once if it is time to start the process."""
        if self.due is None or now < self.due:
            return False
        self.due = None
        return True
