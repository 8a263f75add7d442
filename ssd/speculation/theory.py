"""Computes the predictions of the paper (arXiv 2603.03251) from measured values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

_HALVINGS = 50  # enough for a float's precision


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
    """Return the expected tokens of a round with `depth` draft tokens: 1 + a + ... + a^depth.

    a = `acceptance`. Source: Leviathan et al., arXiv 2211.17192, eq. 1."""
    return sum(acceptance**i for i in range(depth + 1))


def expected_tokens_by_position(acceptance: Sequence[float], depth: float) -> float:
    """Return the expected tokens of a round with `depth` draft tokens, from acceptance rates by position.

    `acceptance[i]` is the rate of token i + 1 if all before it were accepted; the last one also serves later tokens.
    `depth` need not be whole: then its fraction counts the token after it in part."""
    total, reached = 1.0, 1.0
    for index in range(math.ceil(depth)):
        reached *= acceptance[min(index, len(acceptance) - 1)]
        total += reached * min(1.0, depth - index)
    return total


def acceptance_rate(acceptance: Sequence[float], depth: int) -> float:
    """Return the accepted share of tested draft tokens in rounds of `depth` >= 1, from rates by position.

    A token after the first rejected one is not tested. This is the `a` of the closest geometric law."""
    accepted = expected_tokens_by_position(acceptance, depth) - 1
    return accepted / expected_tokens_by_position(acceptance, depth - 1)


def acceptance_for(tokens: float, depth: float) -> float:
    """Return the acceptance rate that gives `tokens` a round with `depth` draft tokens, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if expected_tokens_by_position((middle,), depth) < tokens:
            low = middle
        else:
            high = middle
    return high


def speedup_ssd(hit_rate: float, tokens_hit: float, tokens_miss: float, fill: float, backup: float) -> float:
    """Return the speed of `ssd` over `ar` (Theorem 7).

    `fill` (T_p) and `backup` (T_b) are in units of one verification."""
    tokens = hit_rate * tokens_hit + (1 - hit_rate) * tokens_miss
    time = hit_rate * max(1.0, fill) + (1 - hit_rate) * (1 + backup)
    return tokens / time


def speedup_sd(tokens: float, draft: float) -> float:
    """Return the speed of `sd` over `ar`: E_sd / (1 + T_sd).

    `draft` (T_sd) is in units of one verification."""
    return tokens / (1 + draft)


class Wait(NamedTuple):
    """The draft tokens worth waiting for, 0 if none are, and the figures that decided.

    `weighed` is that number, or the best one above 0. It brings `gain` tokens more than no wait, in `seconds` more. The
    wait pays if that is more than `speed` tokens per second."""

    depth: int
    weighed: int = 0
    gain: float = 0.0
    seconds: float = 0.0
    speed: float = 0.0


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
) -> Wait:
    """Return how many fresh draft tokens, 0 to `lookahead`, a batch should wait for with `missed` rows, and why.

    `ready` has the number of draft tokens of each row that need not wait; `missed` rows have none. `verify` is the time
    of a verification by the tokens of the whole batch. One drafted token takes `depth_s` seconds, the first one
    `away_s` more. A missed row that does not wait brings `otherwise` tokens: 1, or more with a backup that takes no
    time.

    Maximises expected tokens - `speed` x seconds, where `speed` is the batch's long-run tokens per second. This is the
    average-reward rule, which maximises the long-run speed. With `speed` 0 it maximises the tokens per second of this
    round. All rows wait, and fresh tokens are verified. With equal rows and free verification this is Theorem 17."""
    if missed == 0:
        return Wait(0)
    certain = sum(expected_tokens(acceptance, depth) for depth in ready)
    verified = len(ready) + sum(ready)

    def expects(depth: int) -> tuple[float, float]:
        fresh, row = (expected_tokens(acceptance, depth), 1 + depth) if depth else (otherwise, otherwise)
        waited = away_s + depth * depth_s if depth else 0.0
        seconds = max(1e-6, verify.at(verified + missed * row) + waited)  # a clock may see nothing
        return certain + missed * fresh, seconds

    def worth(depth: int) -> float:
        tokens, seconds = expects(depth)
        return tokens - speed * seconds if speed else tokens / seconds

    depth = max(range(lookahead + 1), key=worth)
    weighed = depth or max(range(1, lookahead + 1), key=worth, default=0)
    (tokens, seconds), (without, at_once) = expects(weighed), expects(0)
    return Wait(depth, weighed, tokens - without, seconds - at_once, speed or without / at_once)


class Worth(NamedTuple):
    """The best number of tokens to verify, how many should be accepted, and what that brings beyond the price."""

    length: int
    accepted: float
    gain: float


_NOTHING = Worth(0, 0.0, 0.0)


def tokens_worth_verifying(chances: Iterable[float], most: int, price: Callable[[int], float]) -> Worth:
    """Return how many of the first `most` tokens to verify: the number that brings most beyond its `price` in tokens.

    `chances[i]` is the chance that token i is right if all before it are. With the price at the long-run speed, this
    maximises the long-run speed (average-reward rule)."""
    reached, brought, best = 1.0, 0.0, _NOTHING
    for count, chance in zip(range(1, most + 1), chances, strict=False):
        reached *= chance
        brought += reached
        gain = brought - price(count)
        if gain > best.gain:
            best = Worth(count, brought, gain)
        elif gain + reached * (most - count) <= best.gain:
            break  # more tokens cost more, and bring no more than this
    return best
