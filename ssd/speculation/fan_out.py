"""Chooses the outcomes to prepare: Theorem 12 of arXiv 2603.03251, or PEARL's single chain (arXiv 2408.11850)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ssd.speculation.acceptance import Outcome

MOST = 16  # candidates prepared for one accepted length


def optimal_fan_out(acceptance: float, exponent: float, lookahead: int, budget: int) -> tuple[int, ...]:
    """Return F_0..F_K with the most hits, for B = `budget` chains. Raises ValueError for B <= K.

    A token is accepted with probability a = `acceptance`; F candidates miss with probability c F^-r, r = `exponent`.
    Then F_k = F_0 a^(k/(1+r)) for k < K and F_K = F_0 a^(K/(1+r)) (1-a)^(-1/(1+r)), rounded by largest remainder, at
    least 1."""
    if budget <= lookahead:
        raise ValueError(f"{budget} chains do not cover the {lookahead + 1} accepted lengths of K = {lookahead}")
    a = min(max(acceptance, 1e-3), 1 - 1e-3)
    shares = [a ** (k / (1 + exponent)) for k in range(lookahead + 1)]
    shares[-1] *= (1 - a) ** (-1 / (1 + exponent))
    return _rounded(shares, budget)


def _rounded(shares: Sequence[float], budget: int) -> tuple[int, ...]:
    """Return whole numbers of at least 1 that sum to `budget`, in proportion to `shares`."""
    wanted = dict(enumerate(shares))
    ones: set[int] = set()
    while True:  # a share below 1 becomes 1, at the expense of the others
        scale = (budget - len(ones)) / sum(wanted.values())
        small = {k for k, share in wanted.items() if share * scale < 1}
        if not small or len(small) == len(wanted):
            break
        ones |= small
        wanted = {k: share for k, share in wanted.items() if k not in small}
    counts = {k: max(1, math.floor(share * scale)) for k, share in wanted.items()} | dict.fromkeys(ones, 1)
    by_remainder = sorted(wanted, key=lambda k: wanted[k] * scale % 1, reverse=True)
    for k in by_remainder[: budget - sum(counts.values())]:
        counts[k] += 1
    return tuple(counts[k] for k in range(len(shares)))


def single_chain(lookahead: int) -> tuple[int, ...]:
    """Return PEARL's F_0..F_K: one chain, for full acceptance."""
    return (0,) * lookahead + (1,)


def fan_out_at(accepted: int, in_flight: int, fan_out: Sequence[int]) -> int:
    """Return F_k for k = `accepted` of `in_flight` tokens; one number serves every k, none gives 0.

    F_K is for full acceptance, or F_k if that is more and fewer than K are in flight. More may be in flight after K was
    lowered."""
    if not fan_out:
        return 0
    last = len(fan_out) - 1
    if accepted < in_flight:
        return fan_out[min(accepted, max(0, last - 1))]
    return max(fan_out[-1], fan_out[min(in_flight, last)])


def forks(
    accepted: int, speculation: Sequence[int], candidates: Sequence[int], fan_out: Sequence[int]
) -> list[Outcome]:
    """Return the outcomes to prepare with exactly `accepted` draft tokens: the F_k likeliest bonus tokens.

    `candidates`: the next tokens, likeliest first, without the one in flight: as the target's own it would be
    accepted."""
    excluded = speculation[accepted] if accepted < len(speculation) else -1
    wanted = fan_out_at(accepted, len(speculation), fan_out)
    return [Outcome(accepted, token) for token in candidates if token != excluded][:wanted]


def most_candidates(fan_out: Sequence[int]) -> int:
    """Return the largest F_k for any number of tokens in flight; `MOST` if no fan-out is fixed."""
    return max(fan_out, default=MOST)


def miss_law(miss_rates: Mapping[int, float]) -> tuple[float, float]:
    """Fit 1 - p_hit(F) = c F^-r to miss rates by fan-out; return (c, r), by least squares of logarithms.

    Raises ValueError if fewer than two fan-outs have misses."""
    points = [(math.log(fan_out), math.log(rate)) for fan_out, rate in miss_rates.items() if rate > 0]
    if len(points) < 2:
        raise ValueError("a power law needs the miss rates of two fan-outs")
    x, y = (sum(column) / len(points) for column in zip(*points, strict=True))
    slope = sum((u - x) * (v - y) for u, v in points) / sum((u - x) ** 2 for u, _ in points)
    return math.exp(y - slope * x), -slope


def hit_chance(fan_out: int, law: tuple[float, float]) -> float:
    """Return the chance that one of F candidates is the bonus token: 1 - c F^-r; 0 for F = 0."""
    c, r = law
    return 1 - min(1.0, c * fan_out**-r) if fan_out else 0.0


def hit_rate(acceptance: float, fan_out: Sequence[int], law: tuple[float, float]) -> float:
    """Return the share of outcomes that F_0..F_K prepare."""
    lookahead = len(fan_out) - 1
    reached = [acceptance**k * (1 - acceptance) for k in range(lookahead)] + [acceptance**lookahead]
    return min(1.0, sum(p * hit_chance(f, law) for p, f in zip(reached, fan_out, strict=True)))  # rounding may exceed 1
