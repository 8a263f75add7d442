"""Which chains are worth their place and time when not all of them fit (DESIGN, "The outcome tree in the draft")."""

from __future__ import annotations

from collections.abc import Sequence

from ssd.speculation.tuner import Line


def outcome_probability(
    accepted: int, in_flight: int, rank: int, acceptance: float, misses: tuple[float, float]
) -> float:
    """How likely the outcome is that `accepted` of `in_flight` draft tokens are right and the bonus token is the
    `rank`-th candidate, from 1.

    Tokens are accepted independently with probability `acceptance` (arXiv 2603.03251, Section 4), and of `misses` c, r
    the first F candidates miss the bonus token with probability c F^-r.
    """
    c, r = misses
    reached = acceptance**accepted * (1 - acceptance if accepted < in_flight else 1.0)
    missed_before = 1.0 if rank == 1 else min(1.0, c * (rank - 1) ** -r)
    return reached * max(0.0, missed_before - min(1.0, c * rank**-r))


def gain(probability: float, depth: int, acceptance: float) -> float:
    """Expected tokens from making a chain of `depth` draft tokens one longer: the outcome comes true, and all of them
    are accepted."""
    return probability * acceptance ** (depth + 1)


def worth_growing(gains: Sequence[float], step: Line) -> int:
    """How many chains, those of the highest gain first, the next tree step should grow: as many as give the most
    expected tokens per second. `gains` fall; `step` is in chains. All of them where a chain costs nothing."""
    best, most, total = 0, 0.0, 0.0
    for count, more in enumerate(gains, 1):
        total += more
        rate = total / max(1e-9, step.at(count))
        if rate >= most:
            best, most = count, rate
    return best
