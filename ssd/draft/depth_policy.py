"""How many depths of the tree a step computes before its tokens are read."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection

from ssd.config.params import MAX_LOOKAHEAD
from ssd.draft.tree import Tree
from ssd.tuning.learner import Mean

_ROUNDS = 8


class DepthPolicy:
    """Chooses the depths of each step of a draft on a device.

    More depths save the host's work between two of them. But tokens are published, and the target is heard, only after
    the last. So a step ends before the next outcome may come: a round is as long as the shortest of the last eight, and
    a depth takes what it took beside a verification. On one GPU that is several times its time alone."""

    def __init__(self) -> None:
        self._rounds: deque[float] = deque(maxlen=_ROUNDS)
        self._began = -math.inf
        self._depth_s = Mean(0.0)
        self._alone = False  # the target waits, so nothing else computes

    def note_outcome(self, now: float) -> None:
        """A verification has ended."""
        if self._began > -math.inf:
            self._rounds.append(now - self._began)
        self._began = now

    def note_step(self, seconds: float, depths: int) -> None:
        """A step that read no prompt took so long."""
        if not self._alone:
            self._depth_s.note(seconds / depths)

    def depths(self, trees: Collection[Tree], now: float) -> int:
        """Returns how many depths the next step should compute, at least 1.

        A target that waits takes whole trunks in `sd`, and otherwise as few tokens as pay."""
        waiting = [tree for tree in trees if tree.answers is not None]
        self._alone = bool(waiting)
        if waiting:
            return MAX_LOOKAHEAD if all(tree.speculation.mode == "sd" for tree in waiting) else 1
        if not self._rounds or not self._depth_s.count:
            return 1
        left_s = self._began + min(self._rounds) - now
        return max(1, min(int(left_s / max(1e-9, self._depth_s.value)), MAX_LOOKAHEAD))
