"""Chooses how many depths of the tree a step computes before the host reads its tokens."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection

from ssd.config.params import MAX_LOOKAHEAD
from ssd.draft.tree import Tree
from ssd.tuning.estimates import Mean

_ROUNDS = 8
# Seconds that a draft may at most neither hear its target nor show that it works.
_LONGEST_S = 0.1


class DepthPolicy:
    """Chooses how many depths each step of a draft computes.

    More depths save the host's work, but the draft publishes tokens and reads messages only after the last. So a step
    should end before the next outcome, expected after the shortest of the last eight rounds. `ends`: a step ends by
    itself where the target wants no more tokens."""

    def __init__(self, ends: bool) -> None:
        self._ends = ends
        self._rounds: deque[float] = deque(maxlen=_ROUNDS)
        self._began = -math.inf
        self._depth_s, self._alone_s = Mean(0.0), Mean(0.0)
        self._alone = False  # the target waits, so nothing else computes

    def note_outcome(self, now: float) -> None:
        if self._began > -math.inf:
            self._rounds.append(now - self._began)
        self._began = now

    def note_step(self, seconds: float, depths: int) -> None:
        """Learn that a step without prompt tokens took `seconds` for `depths` depths."""
        (self._alone_s if self._alone else self._depth_s).note(seconds / depths)

    def depths(self, trees: Collection[Tree], now: float) -> int:
        """Return how many depths the next step should compute.

        For a waiting target it is the whole trunk in `sd`, as far as it is probably right, else one depth. No step
        should take longer than _LONGEST_S or half a round: the target may wait no longer for a token."""
        waiting = [tree for tree in trees if tree.answers is not None]
        self._alone = bool(waiting)
        if waiting:
            if not self._rounds or not self._alone_s.count or any(tree.speculation.mode != "sd" for tree in waiting):
                return 1
            most = _within(min(_LONGEST_S, min(self._rounds) / 2), self._alone_s.value)
            return most if self._ends else min([most, *(_likely(tree) for tree in waiting if tree.least)])
        if not self._rounds or not self._depth_s.count:
            return 1
        left_s = self._began + min(self._rounds) - now
        return _within(left_s, self._depth_s.value)


def _likely(tree: Tree) -> int:
    rate = min(max(tree.acceptance.value, 0.01), 0.99)
    return max(1, int(math.log(min(1.0, tree.least / max(1e-9, tree.reached))) / math.log(rate)))


def _within(seconds: float, depth_s: float) -> int:
    return max(1, min(int(seconds / max(1e-9, depth_s)), MAX_LOOKAHEAD))
