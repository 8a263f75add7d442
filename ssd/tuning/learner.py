"""Learns what rounds take and bring: exponentially weighted means and straight lines. Never reads a clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ssd.speculation.fan_out import miss_law
from ssd.speculation.theory import Cost, LinearCost, acceptance_rate, expected_tokens_by_position

_SMOOTHING = 0.01
_POSITIONS = 8
_RANKS = 16
# Assumed until measured: middling acceptance, and the misses of the paper's pairs.
_ACCEPTANCE, _MISSES, _EXPONENTS = 0.5, (0.4, 0.6), (0.4, 1.2)
_FEW = 5
_SLOPE = 0.01
_USUAL_LOOKAHEAD = 4
_RECALLED = 40  # samples that a rate of an earlier process counts as


class DraftTelemetry(NamedTuple):
    """The draft's own counters: `progress` of its loop, tree `steps`, seconds in them, tokens by which chains grew."""

    progress: int
    steps: int
    step_seconds: float
    grown: int


class AfterMiss(NamedTuple):
    """The mean round after a miss: the tokens it brought, the seconds it waited, the draft tokens it verified."""

    tokens: float
    waited: float
    drafted: float


class LookupGain(NamedTuple):
    """What prompt lookup adds to a row's round, on average: `accepted` tokens for `verified` ones."""

    accepted: float = 0.0
    verified: float = 0.0


NO_GAIN = LookupGain()


@dataclass(frozen=True)
class Measurements:
    """What was measured, in seconds and tokens.

    `verify` is the time of a verification by the tokens of the whole batch and `step` that of a tree step by the chains
    of the whole batch, while both models work; `verify_alone` and `step_alone` are those of models that work in turn,
    if they differ. `plain` is the time of one token for every row without a draft at work. `acceptance[i]` is the rate
    of the (i + 1)-th draft token where all before it were accepted; its last number serves beyond. `rate` is the
    acceptance of all draft tokens. `misses` is (c, r) of the power law c F^-r. `missed` is None before the first
    misses."""

    verify: Cost
    step: Cost
    plain: float
    acceptance: tuple[float, ...]
    rate: float
    misses: tuple[float, float]
    missed: AfterMiss | None = None
    verify_alone: Cost | None = None
    step_alone: Cost | None = None
    lookup: LookupGain = NO_GAIN

    def tokens(self, depth: float) -> float:
        """Expected tokens of a round with `depth` draft tokens, a whole number or between two."""
        return expected_tokens_by_position(self.acceptance, depth)


class Mean:
    """An exponentially weighted mean that begins as the plain one; `value` counts as `count` samples."""

    def __init__(self, value: float, smoothing: float = _SMOOTHING, count: int = 0) -> None:
        self.value, self.count, self._smoothing = value, count, smoothing

    def note(self, sample: float) -> None:
        """Add a sample."""
        self.count += 1
        self.value += max(self._smoothing, 1 / self.count) * (sample - self.value)

    def note_outcome(self, drafted: int, accepted: int) -> None:
        """Add a verification's samples to an acceptance rate. Tokens after the first wrong one were not tested."""
        for index in range(min(drafted, accepted + 1)):
            self.note(float(index < accepted))


class LinearFit:
    """Fits seconds to sizes by least squares; old points fade.

    The slope is a share of the mean seconds for one more unit of size. It is updated while the variance of the sizes is
    above `spread`; before that it is `slope`."""

    def __init__(self, slope: float = _SLOPE, spread: float = 0.25) -> None:
        self._slope, self._spread = slope, spread
        self._size, self._seconds, self._square, self._product = (Mean(0.0) for _ in range(4))

    @property
    def known(self) -> bool:
        """Whether there was a point."""
        return self._size.count > 0

    def note(self, size: float, seconds: float) -> None:
        """Add a point."""
        self._size.note(size)
        self._seconds.note(seconds)
        self._square.note(size * size)
        self._product.note(size * seconds)
        size, seconds = self._size.value, self._seconds.value
        spread = self._square.value - size * size
        if spread > self._spread and seconds > 0:
            self._slope = (self._product.value - size * seconds) / (spread * seconds)

    def cost(self) -> LinearCost:
        """Returns the line through the mean point; its slope is never negative."""
        size, seconds = self._size.value, self._seconds.value
        slope = seconds * min(max(0.0, self._slope), 1 / max(1.0, size))
        return LinearCost(seconds - slope * size, slope)


def _recalled(rates: Sequence[tuple[float, int]], default: float, count: int) -> list[Mean]:
    known = [Mean(rate, count=min(_RECALLED, samples)) for rate, samples in rates[:count]]
    return known + [Mean(default) for _ in range(count - len(known))]


class Learner:
    """What is known of how often target and draft agree, for one kind of sampling law."""

    def __init__(self) -> None:
        self._acceptance = [Mean(_ACCEPTANCE) for _ in range(_POSITIONS)]
        self._rate = Mean(_ACCEPTANCE)
        self._missed, self._waited, self._drafted = Mean(1.0), Mean(0.0), Mean(0.0)
        self._hazard = [Mean(0.0) for _ in range(_RANKS)]

    def agreement(self) -> tuple[list[tuple[float, int]], list[tuple[float, int]]]:
        """Rates of acceptance by position and of hits by rank, each with its number of samples: what `recall` takes."""
        acceptance, hits = ([(round(m.value, 4), m.count) for m in each] for each in (self._acceptance, self._hazard))
        return acceptance, hits

    def recall(self, acceptance: Sequence[tuple[float, int]], hits: Sequence[tuple[float, int]]) -> None:
        """Begin with rates that were learned before; they count as few samples, as the next text may be another."""
        self._acceptance = _recalled(acceptance, _ACCEPTANCE, _POSITIONS)
        self._hazard = _recalled(hits, 0.0, _RANKS)
        if self._acceptance[0].count:
            self._rate = Mean(acceptance_rate(self.acceptance, _USUAL_LOOKAHEAD), count=self._acceptance[0].count)

    def outcome(self, drafted: int, accepted: int) -> None:
        """Note a verification of `drafted` tokens of the draft."""
        for index in range(min(drafted, accepted + 1)):
            self._acceptance[min(index, _POSITIONS - 1)].note(float(index < accepted))
        self._rate.note_outcome(drafted, accepted)

    def looked_up(self, fan_out: int, rank: int | None) -> None:
        """Note that the bonus token was the `rank`-th, from 1, of `fan_out` prepared tokens; None: none of them.

        Long lists belong to other accepted lengths than short ones, so plain frequencies would be biased. Learned is
        the chance of each rank given none before it (Kaplan and Meier, 1958)."""
        for tried in range(1, min(fan_out, rank or fan_out, _RANKS) + 1):
            self._hazard[tried - 1].note(float(tried == rank))

    def missed(self, tokens: int, waited: float, drafted: int) -> None:
        """Note the round after a miss: its new tokens, the seconds it waited, its draft tokens."""
        self._missed.note(tokens)
        self._waited.note(waited)
        self._drafted.note(drafted)

    @property
    def after_miss(self) -> AfterMiss | None:
        """The mean round after a miss; None before enough of them."""
        if self._missed.count < 8:
            return None
        return AfterMiss(self._missed.value, self._waited.value, self._drafted.value)

    @property
    def acceptance(self) -> tuple[float, ...]:
        """The rates by position that are known well enough; at least one number."""
        return tuple(mean.value for mean in self._acceptance if mean.count >= 8) or (self._rate.value,)

    @property
    def rate(self) -> float:
        """The acceptance of all draft tokens."""
        return self._rate.value

    def misses(self) -> tuple[float, float]:
        """(c, r) of the power law c F^-r, fitted to the ranks that were tried often enough.

        With few ranks the exponent stays within what is known of pairs of models."""
        rates, missed = {}, 1.0
        for index, hazard in enumerate(self._hazard):
            if hazard.count < 16:
                break
            missed *= 1 - hazard.value
            rates[index + 1] = missed
        if not rates:
            return _MISSES
        try:
            c, r = miss_law(rates)
        except ValueError:
            c, r = rates[1], _MISSES[1]
        least = _EXPONENTS[0] if len(rates) < _FEW else 0.0
        return min(1.0, c), min(max(least, r), _EXPONENTS[1])
