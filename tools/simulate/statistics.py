"""A pair of models in numbers: accepted lengths, misses, and reproducible draws from both."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise

import numpy as np
from scipy.optimize import brentq
from scipy.stats import qmc

from ssd.errors import UsageError
from ssd.speculation.fan_out import fan_out_at, hit_chance
from ssd.speculation.theory import acceptance_rate, expected_tokens_by_position


class Source(Enum):
    """Where the speculation of a row came from.

    A `MISS` waited for a fresh draft (the neural backup) or has nothing. `CHEAP` took what costs no time. `PLAIN` is
    ordinary speculative decoding, where no outcome is foreseen."""

    PLAIN = "plain"
    HIT = "hit"
    MISS = "miss"
    CHEAP = "cheap"


@dataclass(frozen=True)
class AcceptanceLaw:
    """The acceptance rates by position: `rates[i]` is that of draft token i + 1 if all before it were accepted.

    The last number serves beyond. Greedy accepted lengths have two peaks, so one number would not do."""

    rates: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.rates or not all(0 <= rate <= 1 for rate in self.rates):
            raise UsageError(f"acceptance rates must be one or more numbers from 0 to 1, not {self.rates}")

    @classmethod
    def from_shares(cls, shares: Sequence[float]) -> AcceptanceLaw:
        """Return the law whose rounds accepted 0, 1, ... K tokens in these shares (in any unit)."""
        reaching = [sum(shares[length:]) for length in range(len(shares))]
        return cls(tuple(more / here for here, more in pairwise(reaching)))

    def survivals(self, depth: int) -> list[float]:
        """Return the chance that at least 1, 2, ... `depth` tokens are accepted."""
        found, reached = [], 1.0
        for index in range(depth):
            reached *= self.rates[min(index, len(self.rates) - 1)]
            found.append(reached)
        return found

    def shares(self, depth: int) -> list[float]:
        """Return the chances that exactly 0, 1, ... `depth` tokens are accepted."""
        return [here - more for here, more in pairwise([1.0, *self.survivals(depth), 0.0])]

    def accepted(self, uniform: float, depth: int) -> int:
        """Return the accepted length of `depth` draft tokens for a uniform number in [0, 1)."""
        length, reached = 0, 1.0
        while length < depth:
            reached *= self.rates[min(length, len(self.rates) - 1)]
            if uniform >= reached:
                break
            length += 1
        return length

    def tokens(self, depth: int) -> float:
        """Return the expected tokens of a round with `depth` draft tokens."""
        return expected_tokens_by_position(self.rates, depth)

    def rate(self, depth: int) -> float:
        """Return accepted over tested tokens: the `a` of the closest geometric law."""
        return acceptance_rate(self.rates, depth)

    def power(self, exponent: float) -> AcceptanceLaw:
        """Return every rate to the power of `exponent`: the same shape, with more (< 1) or less (> 1) accepted."""
        return AcceptanceLaw(tuple(rate**exponent for rate in self.rates))


def mixed(share: float, first: AcceptanceLaw, second: AcceptanceLaw, depth: int) -> AcceptanceLaw:
    """Return the law of rounds of which `share` follow the first law and the others the second.

    A share above 1 takes rounds of the second law out of the first. Raises UsageError if there are too few."""
    pairs = zip([1.0, *first.survivals(depth), 0.0], [1.0, *second.survivals(depth), 0.0], strict=True)
    reached = [share * one + (1 - share) * two for one, two in pairs]
    if any(more > here + 1e-9 for here, more in pairwise(reached)):
        raise UsageError("there are more misses than these accepted lengths on a miss leave room for")
    return AcceptanceLaw(tuple(min(1.0, b / a) if a > 0 else 0.0 for a, b in pairwise(reached[:-1])))


def solve_exponent(tokens: Callable[[float], float], wanted: float) -> float:
    """Return the exponent at which `tokens(exponent)`, which falls with it, is `wanted`."""
    return math.exp(brentq(lambda log: tokens(math.exp(log)) - wanted, -8.0, 8.0, xtol=1e-12))


@dataclass(frozen=True)
class Statistics:
    """Accepted lengths by where the speculation came from, and the power law (c, r) of misses by fan-out."""

    plain: AcceptanceLaw
    hit: AcceptanceLaw
    miss: AcceptanceLaw
    misses: tuple[float, float]
    cheap: AcceptanceLaw = AcceptanceLaw((0.0,))

    def __post_init__(self) -> None:
        if min(self.misses) < 0:
            raise UsageError(f"the law of misses c F^-r needs c and r of at least 0, not {self.misses}")

    @classmethod
    def alike(cls, law: AcceptanceLaw, misses: tuple[float, float]) -> Statistics:
        """Return statistics with the same accepted lengths for every neural speculation."""
        return cls(law, law, law, misses)

    def foreseeing(self, fan_out: Sequence[int], depth: int) -> Statistics:
        """Return statistics with the accepted lengths on hits that go with `fan_out`.

        What is drafted does not depend on what was foreseen, so hits and misses together are `plain`. Those on a miss
        are taken to be the same for every fan-out. Raises UsageError if the misses would accept more than there is."""
        lengths = enumerate(self.plain.shares(depth))
        hits = sum(share * self.hit_chance(accepted, depth, fan_out) for accepted, share in lengths)
        return replace(self, hit=mixed(1 / hits, self.plain, self.miss, depth) if hits else self.plain)

    def scaled(self, tokens: float, depth: int) -> Statistics:
        """Return statistics with `tokens` per round of ordinary speculative decoding: one exponent for all laws."""
        x = solve_exponent(lambda exponent: self.plain.power(exponent).tokens(depth), tokens)
        return replace(self, plain=self.plain.power(x), hit=self.hit.power(x), miss=self.miss.power(x))

    def law(self, source: Source) -> AcceptanceLaw:
        laws: dict[Source, AcceptanceLaw] = {
            Source.PLAIN: self.plain,
            Source.HIT: self.hit,
            Source.MISS: self.miss,
            Source.CHEAP: self.cheap,
        }
        return laws[source]

    def hit_chance(self, accepted: int, in_flight: int, fan_out: Sequence[int]) -> float:
        """Return the chance that the outcome with `accepted` of `in_flight` tokens was prepared for."""
        return hit_chance(fan_out_at(accepted, in_flight, fan_out), self.misses)


class Draws:
    """Uniform numbers for each row and round, the same for a seed; after `rounds` rounds they repeat.

    They are spread evenly (Halton points in random order), so that means settle in few rounds. The two coordinates are
    the outcome of a round and the acceptance of the next, which depends on it."""

    def __init__(self, seed: int, rows: int, rounds: int) -> None:
        random = np.random.default_rng(seed)
        spread = [random.permutation(qmc.Halton(2, seed=random).random(rounds)) for _ in range(rows)]
        self._outcomes = [points[:, 0].tolist() for points in spread]
        self._acceptances = [np.roll(points[:, 1], 1).tolist() for points in spread]
        self._rounds = rounds

    def acceptance(self, row: int, index: int) -> float:
        number: float = self._acceptances[row][index % self._rounds]
        return number

    def outcome(self, row: int, index: int) -> float:
        number: float = self._outcomes[row][index % self._rounds]
        return number
