"""What the paper predicts (arXiv 2603.03251), as functions of measured values."""

from __future__ import annotations

import math
from collections.abc import Sequence

_HALVINGS = 50  # as exact as a float is


def expected_tokens(acceptance: float, depth: int) -> float:
    """Tokens of a round that verifies `depth` draft tokens, each accepted with probability `acceptance`: the geometric
    sum 1 + a + ... + a^depth (Leviathan et al., arXiv 2211.17192, eq. 1)."""
    return sum(acceptance**i for i in range(depth + 1))


def expected_tokens_by_position(acceptance: Sequence[float], depth: float) -> float:
    """The same where `acceptance[i]` is the rate of the (i + 1)-th draft token, given that all before it were accepted;
    the last number serves beyond. `depth` is a whole number or between two."""
    total, reached = 1.0, 1.0
    for index in range(math.ceil(depth)):
        reached *= acceptance[min(index, len(acceptance) - 1)]
        total += reached * min(1.0, depth - index)
    return total


def acceptance_rate(acceptance: Sequence[float], depth: int) -> float:
    """Accepted draft tokens over those that were tested, in rounds of `depth` of them, at least 1: the `a` of the
    geometric law that comes closest to rates by position. (A token after the first refused one is not tested.)"""
    accepted = expected_tokens_by_position(acceptance, depth) - 1
    return accepted / expected_tokens_by_position(acceptance, depth - 1)


def acceptance_for(tokens: float, depth: float) -> float:
    """The acceptance rate that gives so many `tokens` a round with `depth` draft tokens, by bisection: they rise with
    it."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if expected_tokens_by_position((middle,), depth) < tokens:
            low = middle
        else:
            high = middle
    return high


def speedup_ssd(hit_rate: float, tokens_hit: float, tokens_miss: float, fill: float, backup: float) -> float:
    """Theorem 7: speed of `ssd` over `ar`. `fill` (T_p) and `backup` (T_b) are in units of one verification."""
    tokens = _tokens(hit_rate, tokens_hit, tokens_miss)
    time = hit_rate * max(1.0, fill) + (1 - hit_rate) * (1 + backup)
    return tokens / time


def speedup_sd(tokens: float, draft: float) -> float:
    """Speed of ordinary speculative decoding over `ar`: E_sd / (1 + T_sd), `draft` in units of one verification."""
    return tokens / (1 + draft)


def ssd_over_sd(hit_rate: float, tokens_hit: float, tokens_sd: float, draft: float) -> tuple[float, float]:
    """Corollary 9: the least and the most that `ssd` gains over `sd`, for a tree that fits into a verification."""
    most = (1 + draft) * tokens_hit / tokens_sd
    return most * hit_rate, most


def speedup_of_batch(
    hit_rate: float, tokens_hit: float, tokens_miss: float, fill: float, backup: float, batch: int
) -> float:
    """Corollary 16: `speedup_ssd` where one missed row of `batch` makes all of them wait for its backup."""
    all_hit = hit_rate**batch
    return _tokens(hit_rate, tokens_hit, tokens_miss) / (all_hit * max(1.0, fill) + (1 - all_hit) * (1 + backup))


def critical_batch(
    hit_rate: float, tokens_hit: float, tokens_neural: float, tokens_cheap: float, neural: float
) -> float:
    """Theorem 17: below this batch size the neural backup, which takes `neural` (T_n) and gives `tokens_neural`, beats
    one that takes no time and gives `tokens_cheap`; infinite where it always does, 0 where it never does."""
    if hit_rate >= 1:  # nobody ever waits
        return math.inf
    gain = _tokens(hit_rate, tokens_hit, tokens_neural) / _tokens(hit_rate, tokens_hit, tokens_cheap) - 1
    if gain >= neural:
        return math.inf
    if gain <= 0:
        return 0.0
    return math.log(1 - gain / neural) / math.log(hit_rate) if hit_rate > 0 else 0.0


def _tokens(hit_rate: float, hit: float, miss: float) -> float:
    return hit_rate * hit + (1 - hit_rate) * miss
