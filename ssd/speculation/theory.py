"""Computes the predictions of the paper (arXiv 2603.03251) from measured values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol


class Cost(Protocol):
    """Seconds of a forward by its size."""

    def at(self, size: float) -> float: ...


class LinearCost(NamedTuple):
    fixed: float
    each: float

    def at(self, size: float) -> float:
        return self.fixed + self.each * size


def expected_tokens(acceptance: float, depth: int) -> float:
    """Return 1 + a + ... + a^`depth`, the tokens of a round (Leviathan et al., arXiv 2211.17192, eq. 1)."""
    return sum(acceptance**i for i in range(depth + 1))


def expected_tokens_by_position(acceptance: Sequence[float], depth: float) -> float:
    """Return the expected tokens of a round with `depth` draft tokens; a fraction counts a token in part.

    `acceptance[i]` is the rate of token i + 1 if all before it were accepted; the last rate also serves later
    tokens."""
    total, reached = 1.0, 1.0
    for index in range(math.ceil(depth)):
        reached *= acceptance[min(index, len(acceptance) - 1)]
        total += reached * min(1.0, depth - index)
    return total


def acceptance_rate(acceptance: Sequence[float], depth: int) -> float:
    """Return the accepted share of tested draft tokens in rounds of `depth` >= 1, from rates by position.

    This is the `a` of the closest geometric law: no token after a rejected one is tested."""
    accepted = expected_tokens_by_position(acceptance, depth) - 1
    return accepted / expected_tokens_by_position(acceptance, depth - 1)


def speedup_ssd(hit_rate: float, tokens_hit: float, tokens_miss: float, fill: float, backup: float) -> float:
    """Return the speed of `ssd` over `ar` (Theorem 7); T_p = `fill`, T_b = `backup`, in verifications."""
    tokens = hit_rate * tokens_hit + (1 - hit_rate) * tokens_miss
    time = hit_rate * max(1.0, fill) + (1 - hit_rate) * (1 + backup)
    return tokens / time


def speedup_sd(tokens: float, draft: float) -> float:
    """Return the speed of `sd` over `ar`: E_sd / (1 + T_sd), T_sd in verifications."""
    return tokens / (1 + draft)


class DraftWait(NamedTuple):
    """The draft tokens worth waiting for, 0 if none are, and the figures that decided.

    `weighed`, which is `depth` or the best depth above 0, brings `gain` tokens more than no wait, in `seconds` more. It
    pays above `speed` tokens per second."""

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
) -> DraftWait:
    """Return how many fresh draft tokens, 0 to `lookahead`, a batch should wait for, and why.

    `missed` rows have no draft tokens; the others have `ready` ones. `verify` is by the tokens of the batch. A drafted
    token takes `depth_s` seconds, the first `away_s` more. A missed row that does not wait brings `otherwise` tokens.

    Maximises tokens - `speed` x seconds, with `speed` the batch's long-run tokens per second (average-reward rule);
    with `speed` 0 the tokens per second of this round. With equal rows and free verification this is Theorem 17."""
    if missed == 0:
        return DraftWait(0)
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
    return DraftWait(depth, weighed, tokens - without, seconds - at_once, speed or without / at_once)


class Worth(NamedTuple):
    """The best number of tokens to verify, the accepted tokens expected, the gain beyond the price."""

    length: int
    accepted: float
    gain: float


_NOTHING = Worth(0, 0.0, 0.0)


def tokens_worth_verifying(chances: Iterable[float], most: int, price: Callable[[int], float]) -> Worth:
    """Return how many of the first `most` tokens bring most beyond their `price` in tokens.

    `chances[i]` is the chance that token i is right if all before it are."""
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
