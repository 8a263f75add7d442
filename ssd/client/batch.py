"""In which order the requests of a batch are sent and followed, as plain numbers."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

_WINDOW = 1024  # requests of one batch that are open at once: more than an engine runs


class Batch:
    """The requests 0 to `size` - 1: which one to send next, and which one to follow.

    So many are open at once as the engine has been seen to take: where it refuses one because too many are open, it
    has taken those of this batch that had been sent before, and the one refused is sent again when one of them has
    ended.
    """

    def __init__(self, size: int) -> None:
        self._window = _WINDOW
        self._unsent = list(range(size))  # a heap
        self._open = deque[int]()
        self._before: dict[int, int] = {}

    def send(self) -> int | None:
        """The next request to send now; None where an open one has to end first, or all have been sent."""
        if not self._unsent or len(self._open) >= self._window:
            return None
        request = heappop(self._unsent)
        self._before[request] = len(self._open)
        self._open.append(request)
        return request

    def follow(self) -> int:
        """The next request to follow to its end: the one sent first, so that refusals are soon known."""
        return self._open.popleft()

    def refused(self, request: int) -> bool:
        """Send a request again later, which was refused because too many are open. False where none of them is of this
        batch, so that its own ends make no room."""
        if self._before[request] == 0:
            return False
        self._window = min(self._window, self._before[request])
        heappush(self._unsent, request)
        return True
