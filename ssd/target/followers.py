"""The requests that the draft was told of, and what it has shown of each. Pure."""

from __future__ import annotations

from dataclasses import dataclass

# A request is given up after so many waits in vain in a row; a round in which the draft showed nothing of it, without
# having been waited for, is a part of one. It is tried again after so many rounds, and then has one wait.
_IN_VAIN, _UNSEEN, _PAUSE = 4.0, 0.05, 32


@dataclass
class _Standing:
    doubt: float
    awaited: bool  # also before anything was seen
    seen: bool = False


class Followers:
    def __init__(self) -> None:
        self._known: dict[int, _Standing] = {}
        self._given_up: dict[int, int] = {}  # request -> the round from which on it may be tried again

    def __contains__(self, request: int) -> bool:
        return request in self._known

    def __len__(self) -> int:
        return len(self._known)

    @property
    def reading(self) -> bool:
        """Whether there is one of which nothing was shown yet: the draft may be computing its text."""
        return not all(standing.seen for standing in self._known.values())

    def add(self, request: int, awaited: bool) -> None:
        """The draft was told of it. `awaited`: also before the draft has shown anything of it, though it may be busy
        with a long text meanwhile."""
        doubt = _IN_VAIN - 1 if self._given_up.pop(request, None) is not None else 0.0
        self._known[request] = _Standing(doubt, awaited)

    def remove(self, request: int) -> bool:
        """The draft need not follow it any more. Whether it did."""
        return self._known.pop(request, None) is not None

    def forget(self, request: int) -> bool:
        """It has ended. Whether the draft followed it."""
        self._given_up.pop(request, None)
        return self.remove(request)

    def clear(self) -> list[int]:
        """The draft follows none any more; returns those it did."""
        known, self._known = list(self._known), {}
        return known

    def may_return(self, request: int, now: int) -> bool:
        """Whether the draft, in round `now`, might be told of it."""
        return request not in self._known and self._given_up.get(request, now) <= now

    def worth_waiting(self, request: int) -> bool:
        """Whether it may be waited for."""
        standing = self._known.get(request)
        return standing is not None and (standing.seen or standing.awaited)

    def showed(self, request: int, anything: bool, waited: bool, now: int) -> bool:
        """What the draft had for it in round `now`. False when it is given up, which the draft must be told."""
        standing = self._known[request]
        standing.seen |= anything
        standing.doubt = 0.0 if anything else standing.doubt + (1.0 if waited else _UNSEEN)
        if standing.doubt < _IN_VAIN:
            return True
        del self._known[request]
        self._given_up[request] = now + _PAUSE
        return False
