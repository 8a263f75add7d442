"""What the paper (arXiv 2603.03251) predicts, as functions of measured values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

_HALVINGS = 50  # as exact as a float is


class Cost(Protocol):
    """Seconds of a forward by its size."""

    def at(self, size: float) -> float: ...


class LinearCost(NamedTuple):
    """Seconds as a function of a size: `fixed` + `each` x size."""

    fixed: float
    each: float

    def at(self, size: float) -> float:
        return self.fixed + self.each * size


def expected_tokens(acceptance: float, depth: int) -> float:
    """Expected tokens of a round with `depth` draft tokens: 1 + a + ... + a^depth with a = `acceptance`.

    Leviathan et al., arXiv 2211.17192, eq. 1."""
    return sum(acceptance**i for i in range(depth + 1))


def expected_tokens_by_position(acceptance: Sequence[float], depth: float) -> float:
    """The same with a rate by position: `acceptance[i]` is that of token i + 1 if all before it were accepted.

    The last number serves beyond. `depth` is a whole number or between two."""
    total, reached = 1.0, 1.0
    for index in range(math.ceil(depth)):
        reached *= acceptance[min(index, len(acceptance) - 1)]
        total += reached * min(1.0, depth - index)
    return total


def acceptance_rate(acceptance: Sequence[float], depth: int) -> float:
    """Returns the accepted share of tested draft tokens, from rates by position, in rounds of `depth` >= 1 tokens.

    A token after the first rejected one is not tested. This is the `a` of the closest geometric law."""
    accepted = expected_tokens_by_position(acceptance, depth) - 1
    return accepted / expected_tokens_by_position(acceptance, depth - 1)


def acceptance_for(tokens: float, depth: float) -> float:
    """Returns the acceptance rate that gives `tokens` a round with `depth` draft tokens, by bisection."""
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
    hit_rate: float, tokens_hit: float, tokens_neural: float, tokens_model_free: float, neural: float
) -> float:
    """Theorem 17: below this batch size a neural backup beats a model-free one, which takes no time.

    The neural one takes `neural` (T_n). Returns infinity where it always wins, 0 where it never does."""
    if hit_rate >= 1:  # nobody ever waits
        return math.inf
    gain = _tokens(hit_rate, tokens_hit, tokens_neural) / _tokens(hit_rate, tokens_hit, tokens_model_free) - 1
    if gain >= neural:
        return math.inf
    if gain <= 0:
        return 0.0
    return math.log(1 - gain / neural) / math.log(hit_rate) if hit_rate > 0 else 0.0


def _tokens(hit_rate: float, hit: float, miss: float) -> float:
    return hit_rate * hit + (1 - hit_rate) * miss


def depth_worth_waiting_for(
    ready: Sequence[int],
    missed: int,
    lookahead: int,
    acceptance: float,
    verify: Cost,
    depth_s: float,
    otherwise: float = 1.0,
    speed: float = 0.0,
    away_s: float = 0.0,
) -> int:
    """Returns how many fresh draft tokens, 0 to `lookahead`, a batch should wait for on behalf of its missed rows.

    `ready` has the number of draft tokens of each row that need not wait; `missed` rows have none. `verify` is the time
    of a verification by the tokens of the whole batch, `depth_s` that of one drafted token, in seconds; the first one
    takes `away_s` more. A missed row that does not wait brings `otherwise` tokens: 1, or more with a backup that takes
    no time.

    Maximises expected tokens less `speed` times seconds, with the tokens per second that the batch has in the long run:
    the average-reward rule, which maximises the long-run speed. Without a `speed` it maximises the tokens per second of
    this round. All rows pay for the waiting of one, and a fresh token has to be verified. With equal rows and verified
    tokens for nothing this is Theorem 17."""
    if missed == 0:
        return 0
    certain = sum(expected_tokens(acceptance, depth) for depth in ready)
    verified = len(ready) + sum(ready)

    def worth(depth: int) -> float:
        fresh, row = (expected_tokens(acceptance, depth), 1 + depth) if depth else (otherwise, otherwise)
        waited = away_s + depth * depth_s if depth else 0.0
        tokens, seconds = certain + missed * fresh, verify.at(verified + missed * row) + waited
        return tokens - speed * seconds if speed else tokens / max(1e-6, seconds)  # a clock may see nothing

    return max(range(lookahead + 1), key=worth)
