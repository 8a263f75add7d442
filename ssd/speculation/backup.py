"""What a missed row does: go now, or wait for a fresh draft (DESIGN, "Misses are a cost model, not a flag")."""

from __future__ import annotations

from collections.abc import Sequence

from ssd.speculation.theory import expected_tokens
from ssd.speculation.tuner import Line


def depth_worth_waiting_for(
    ready: Sequence[int],
    missed: int,
    lookahead: int,
    acceptance: float,
    verify: Line,
    depth_s: float,
    cheap: float = 1.0,
) -> int:
    """How many fresh draft tokens (0..lookahead) the batch should wait for on behalf of its missed rows.

    `ready` holds the draft tokens of the rows that have some, `missed` counts the rows without; `verify` is the time of
    a verification by the tokens of the whole batch and `depth_s` that of one drafted token, in seconds. Maximises
    expected tokens per second of the whole batch: the waiting of one row is paid by all, and a fresh token is verified
    as well. `cheap` is what a missed row brings that does not wait: 1 token, or more with a backup that takes no time.
    With rows all alike, and verified tokens for nothing, this is Theorem 17.
    """
    if missed == 0:
        return 0
    certain = sum(expected_tokens(acceptance, depth) for depth in ready)
    verified = len(ready) + sum(ready)

    def rate(depth: int) -> float:
        fresh, row = (expected_tokens(acceptance, depth), 1 + depth) if depth else (cheap, cheap)
        seconds = verify.at(verified + missed * row) + depth * depth_s
        return (certain + missed * fresh) / max(1e-6, seconds)  # a clock may see nothing

    return max(range(lookahead + 1), key=rate)
