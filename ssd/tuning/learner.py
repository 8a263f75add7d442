"""Learns what rounds take and bring: exponentially weighted means and straight lines. Never reads a clock."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from ssd.speculation.fan_out import miss_law
from ssd.speculation.theory import LinearCost, expected_tokens_by_position

_SMOOTHING, _SPEED_SMOOTHING = 0.01, 0.03
_POSITIONS = 8
_RANKS = 16
# Assumed until measured: middling acceptance, and the misses of the paper's pairs.
_ACCEPTANCE, _MISSES, _EXPONENTS = 0.5, (0.4, 0.6), (0.4, 1.2)
_FEW, _ENOUGH_ROUNDS = 5, 16
_SLOPE = 0.01


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


@dataclass(frozen=True)
class Measurements:
    """What was measured, in seconds and tokens.

    `verify` is the time of a verification by the tokens of the whole batch, `step` that of a tree step by the chains of
    the whole batch, `plain` that of one token for every row without a draft at work. `acceptance[i]` is the rate of the
    (i + 1)-th draft token where all before it were accepted; its last number serves beyond. `rate` is the acceptance of
    all draft tokens. `misses` is (c, r) of the power law c F^-r. `missed` is None before the first misses. `speed` is
    the tokens per second of all rows while the draft worked ahead, None before enough rounds; `doubt` is its standard
    error as a share of it."""

    verify: LinearCost
    step: LinearCost
    plain: float
    acceptance: tuple[float, ...]
    rate: float
    misses: tuple[float, float]
    missed: AfterMiss | None = None
    speed: float | None = None
    doubt: float = 0.0

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


class _Speed:
    """Tokens per second of rounds, and how sure that figure is."""

    def __init__(self) -> None:
        self._tokens, self._square, self._seconds = (Mean(0.0, _SPEED_SMOOTHING) for _ in range(3))

    def note(self, tokens: float, seconds: float) -> None:
        self._tokens.note(tokens)
        self._square.note(tokens * tokens)
        self._seconds.note(seconds)

    @property
    def value(self) -> float | None:
        """Tokens per second; None after too few rounds."""
        if self._tokens.count < _ENOUGH_ROUNDS or self._seconds.value <= 0:
            return None
        return self._tokens.value / self._seconds.value

    @property
    def doubt(self) -> float:
        """The standard error of `value`, as a share of it."""
        mean, samples = self._tokens.value, min(self._tokens.count, 2 / _SPEED_SMOOTHING - 1)
        return math.sqrt(max(0.0, self._square.value - mean * mean) / samples) / mean if mean > 0 else 0.0


class Learner:
    """What is known of target and draft. The target feeds it round by round; the tuner reads `measurements`."""

    def __init__(self) -> None:
        # The time of a tree step varies for other reasons than its chains. So its slope is only learned from plans with
        # clearly different numbers of chains.
        self._verify, self._step = LinearFit(), LinearFit(spread=1.0)
        self._plain: dict[int, Mean] = {}
        self._acceptance = [Mean(_ACCEPTANCE) for _ in range(_POSITIONS)]
        self._rate = Mean(_ACCEPTANCE)
        self._missed, self._waited, self._drafted = Mean(1.0), Mean(0.0), Mean(0.0)
        self._hazard = [Mean(0.0) for _ in range(_RANKS)]
        self._speeds: dict[int, _Speed] = {}

    def round(self, batch: int, tokens: int, seconds: float, alone: bool) -> None:
        """Note a verification of `tokens` tokens of `batch` rows; `alone`: no draft was busy beside it."""
        if alone:
            self._plain.setdefault(batch, Mean(seconds)).note(seconds)
        else:
            self._verify.note(tokens, seconds)

    def brought(self, batch: int, tokens: int, seconds: float) -> None:
        """Note the new tokens of a round of `batch` rows with a draft ahead of them; `seconds` include waiting."""
        self._speeds.setdefault(batch, _Speed()).note(tokens, seconds)

    def forget_speeds(self) -> None:
        """Drop the speeds of `brought`: they belong to another plan."""
        self._speeds.clear()

    def steps(self, chains: float, seconds: float) -> None:
        """Note tree steps by their mean number of chains and mean duration."""
        self._step.note(chains, seconds)

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

    def measurements(self, batch: int) -> Measurements | None:
        """What is known for `batch` rows; None while no time was measured."""
        verify, step = self.verify, self.step
        if verify is None or step is None:
            return None
        known, speed = [mean for mean in self._acceptance if mean.count >= 8], self._speed(batch)
        missed = AfterMiss(self._missed.value, self._waited.value, self._drafted.value)
        return Measurements(
            verify=verify,
            step=step,
            plain=self._plain[batch].value if batch in self._plain else verify.at(batch),
            acceptance=tuple(mean.value for mean in known) or (self._rate.value,),
            rate=self._rate.value,
            misses=self.misses(),
            missed=missed if self._missed.count >= 8 else None,
            speed=speed.value,
            doubt=speed.doubt,
        )

    @property
    def verify(self) -> LinearCost | None:
        """Seconds of a verification by the tokens of the whole batch, None while no time was measured."""
        return self._verify.cost() if self._verify.known else None

    @property
    def step(self) -> LinearCost | None:
        """Seconds of a tree step by the chains of the whole batch, None while no time was measured."""
        return self._step.cost() if self._step.known else None

    def token_price(self, batch: int) -> float:
        """What verifying one more token takes, in tokens that the whole batch makes in that time; 0 while unknown."""
        return self._verify.cost().each * (self._speed(batch).value or 0.0)

    def _speed(self, batch: int) -> _Speed:
        return self._speeds.get(batch) or _Speed()

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
