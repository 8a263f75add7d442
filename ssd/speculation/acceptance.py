"""The verification outcome (k, t*) of a speculation (ALGORITHM 1, 6)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Outcome(NamedTuple):
    """`accepted` draft tokens (0..K) and the bonus `token` that the target emits after them."""

    accepted: int
    token: int


def coupled(speculation: Sequence[int], own: Sequence[int]) -> Outcome:
    """Accept while the draft token equals the target's own sample; the first difference is the bonus token.

    `own` holds the target's samples y_1..y_{d+1} for the positions of the d speculated tokens and the one after.
    Greedy decoding is the same rule with argmax as the sample. The emitted tokens are `own[: accepted + 1]`, whatever
    the speculation was: that is the whole proof of exactness (Daliri, Musco, Suresh, arXiv 2408.07978).
    """
    for accepted, (guess, sample) in enumerate(zip(speculation, own, strict=False)):
        if guess != sample:
            return Outcome(accepted, sample)
    return Outcome(len(speculation), own[len(speculation)])
