"""Learns the time and the tokens of rounds, as exponentially weighted means and linear fits. Never reads a clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ssd.speculation.fan_out import miss_law
from ssd.speculation.theory import Cost, LinearCost, acceptance_rate, expected_tokens_by_position

_SMOOTHING = 0.01
_POSITIONS = 8
_RANKS = 16
# Assumed until measured: an acceptance rate, and the miss law (c, r) of the paper's pairs. `_EXPONENTS` bound r.
_ACCEPTANCE, _MISSES, _EXPONENTS = 0.5, (0.4, 0.6), (0.4, 1.2)
_FEW = 5
_SLOPE = 0.01
_RECALLED = 40  # most samples that a rate of an earlier process counts as


class DraftTelemetry(NamedTuple):
    """The draft's counters: `progress` of its loop, tree `steps`, seconds in them, and tokens appended to chains."""

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
    """The mean gain of a row's round from prompt lookup: `accepted` of `verified` tokens."""

    accepted: float = 0.0
    verified: float = 0.0


NO_GAIN = LookupGain()


@dataclass(frozen=True)
class Measurements:
    """Measured seconds and tokens, from which the predictor computes speeds.

    `verify` is the time of a verification by the tokens of the whole batch and `step` that of a tree step by the chains
    of the whole batch, while both models work. `verify_alone` and `step_alone` are the times while the models work in
    turn, None if equal. `overhead` is the time of a round with a draft beside its forwards. `acceptance[i]` is the rate
    of the (i + 1)-th draft token if all before it were accepted; the last one also serves later tokens. `misses` is
    (c, r) of the power law c F^-r. `missed` is None until enough misses were measured."""

    verify: Cost
    step: Cost
    acceptance: tuple[float, ...]
    misses: tuple[float, float]
    overhead: float = 0.0
    verify_alone: Cost | None = None
    step_alone: Cost | None = None
    missed: AfterMiss | None = None
    lookup: LookupGain = NO_GAIN

    def round_s(self, tokens: float) -> float:
        """Return the seconds of a round that verifies `tokens` tokens while the draft works ahead."""
        return self.verify.at(tokens) + self.overhead

    def alone_s(self, tokens: float) -> float:
        """Return the seconds of a verification of `tokens` tokens while the draft rests."""
        return (self.verify_alone or self.verify).at(tokens)

    def rate(self, depth: int) -> float:
        """Return the acceptance rate of all draft tokens that are tested in rounds of `depth` >= 1."""
        return acceptance_rate(self.acceptance, depth)

    def tokens(self, depth: float) -> float:
        """Return the expected tokens of a round with `depth` draft tokens, which need not be whole."""
        return expected_tokens_by_position(self.acceptance, depth)


class Mean:
    """An exponentially weighted mean, at first the plain mean. The initial `value` counts as `count` samples."""

    def __init__(self, value: float, smoothing: float = _SMOOTHING, count: int = 0) -> None:
        self.value, self.count, self._smoothing = value, count, smoothing

    def note(self, sample: float) -> None:
        """Add a sample."""
        self.count += 1
        self.value += max(self._smoothing, 1 / self.count) * (sample - self.value)

    def note_outcome(self, drafted: int, accepted: int) -> None:
        """Add a verification's samples to an acceptance rate. Tokens after the first rejected one were not tested."""
        for index in range(min(drafted, accepted + 1)):
            self.note(float(index < accepted))


class LinearFit:
    """Fits seconds to sizes by least squares; old points fade.

    The slope is relative: the share of the mean seconds that one more unit of size takes. It begins as `slope` and is
    updated whenever the variance of the sizes is above `spread`."""

    def __init__(self, slope: float = _SLOPE, spread: float = 0.25) -> None:
        self._slope, self._spread = slope, spread
        self._size, self._seconds, self._square, self._product = (Mean(0.0) for _ in range(4))

    @property
    def known(self) -> bool:
        """Return True if a point was added."""
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
        """Return the line through the mean point; its slope is never negative."""
        size, seconds = self._size.value, self._seconds.value
        slope = seconds * min(max(0.0, self._slope), 1 / max(1.0, size))
        return LinearCost(seconds - slope * size, slope)


def _recalled(rates: Sequence[tuple[float, int]], default: float, count: int) -> list[Mean]:
    known = [Mean(rate, count=min(_RECALLED, samples)) for rate, samples in rates[:count]]
    return known + [Mean(default) for _ in range(count - len(known))]


class Learner:
    """Learns how often target and draft agree under one kind of sampling law."""

    def __init__(self) -> None:
        self._acceptance = [Mean(_ACCEPTANCE) for _ in range(_POSITIONS)]
        self._missed, self._waited, self._drafted = Mean(1.0), Mean(0.0), Mean(0.0)
        self._hazard = [Mean(0.0) for _ in range(_RANKS)]

    def agreement(self) -> tuple[list[tuple[float, int]], list[tuple[float, int]]]:
        """Return acceptance rates by position and hit rates by rank, each with its samples, for `recall`."""
        acceptance, hits = ([(round(m.value, 4), m.count) for m in each] for each in (self._acceptance, self._hazard))
        return acceptance, hits

    def recall(self, acceptance: Sequence[tuple[float, int]], hits: Sequence[tuple[float, int]]) -> None:
        """Begin with rates of an earlier process. They count as few samples, since the next text may differ."""
        self._acceptance = _recalled(acceptance, _ACCEPTANCE, _POSITIONS)
        self._hazard = _recalled(hits, 0.0, _RANKS)

    def outcome(self, drafted: int, accepted: int) -> None:
        """Learn that `accepted` of `drafted` draft tokens were accepted in a verification."""
        for index in range(min(drafted, accepted + 1)):
            self._acceptance[min(index, _POSITIONS - 1)].note(float(index < accepted))

    def looked_up(self, fan_out: int, rank: int | None) -> None:
        """Learn that the bonus token was the `rank`-th, from 1, of `fan_out` prepared tokens; None: none of them.

        Fan-outs differ by accepted length, so plain frequencies would be biased. The learned rate is the chance of a
        rank given that no rank before it hit (Kaplan and Meier, 1958)."""
        for tried in range(1, min(fan_out, rank or fan_out, _RANKS) + 1):
            self._hazard[tried - 1].note(float(tried == rank))

    def missed(self, tokens: int, waited: float, drafted: int) -> None:
        """Learn from a round after a miss: its new tokens, the seconds it waited, its draft tokens."""
        self._missed.note(tokens)
        self._waited.note(waited)
        self._drafted.note(drafted)

    @property
    def after_miss(self) -> AfterMiss | None:
        """Return the mean round after a miss; None before enough of them."""
        if self._missed.count < 8:
            return None
        return AfterMiss(self._missed.value, self._waited.value, self._drafted.value)

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Return the acceptance rates by position that have enough samples; without any, the first one's."""
        return tuple(mean.value for mean in self._acceptance if mean.count >= 8) or (self._acceptance[0].value,)

    def misses(self) -> tuple[float, float]:
        """Return (c, r) of the power law c F^-r, fitted to the ranks that were tried often enough.

        `_EXPONENTS` bound r: the highest always, the lowest while few ranks were tried."""
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
