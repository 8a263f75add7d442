"""Computes the gain of more draft tokens in chains."""

from __future__ import annotations

from collections.abc import Sequence

from ssd.speculation.theory import LinearCost


def outcome_probability(
    accepted: int, in_flight: int, rank: int, acceptance: float, misses: tuple[float, float]
) -> float:
    """Return the probability of `accepted` right tokens of `in_flight`, then the `rank`-th candidate.

    Ranks begin at 1. Tokens are accepted independently with probability `acceptance` (arXiv 2603.03251, Section 4). The
    first F candidates miss the bonus token with probability c F^-r, `misses` = (c, r)."""
    c, r = misses
    reached = acceptance**accepted * (1 - acceptance if accepted < in_flight else 1.0)
    missed_before = 1.0 if rank == 1 else min(1.0, c * (rank - 1) ** -r)
    return reached * max(0.0, missed_before - min(1.0, c * rank**-r))


def gain(probability: float, depth: int, acceptance: float) -> float:
    """Return the expected tokens from a chain's next token."""
    return probability * acceptance ** (depth + 1)


def worth_growing(gains: Sequence[float], step: LinearCost) -> int:
    """Return how many chains the next tree step should grow for the most expected tokens per second.

    `gains` fall. `step` is the seconds of a step by its chains. Chains that cost nothing all grow."""
    best, most, total = 0, 0.0, 0.0
    for count, more in enumerate(gains, 1):
        total += more
        rate = total / max(1e-9, step.at(count))
        if rate >= most:
            best, most = count, rate
    return best
