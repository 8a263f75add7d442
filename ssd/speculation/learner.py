"""From what rounds show to a `Profile`: exponentially weighted means and straight lines. No clock in here."""

from __future__ import annotations

import math

from ssd.speculation.fan_out import miss_law
from ssd.speculation.tuner import Line, Missed, Profile

_SMOOTHING, _SPEED_SMOOTHING = 0.01, 0.03
_POSITIONS = 8
_RANKS = 16
# What is taken for granted until it is seen: middling acceptance, the misses of the paper's pairs (ALGORITHM 4).
_ACCEPTANCE, _MISSES, _EXPONENTS = 0.5, (0.4, 0.6), (0.4, 1.2)
_FEW, _ENOUGH_ROUNDS = 5, 16
_SLOPE = 0.01


class Mean:
    """An exponentially weighted mean that begins as the plain one; `value` counts as `count` samples."""

    def __init__(self, value: float, smoothing: float = _SMOOTHING, count: int = 0) -> None:
        self.value, self.count, self._smoothing = value, count, smoothing

    def note(self, sample: float) -> None:
        self.count += 1
        self.value += max(self._smoothing, 1 / self.count) * (sample - self.value)

    def note_outcome(self, drafted: int, accepted: int) -> None:
        """As an acceptance rate: of so many draft tokens the first `accepted` were right; those after a wrong one were
        not tried."""
        for index in range(min(drafted, accepted + 1)):
            self.note(float(index < accepted))


class LineFit:
    """Seconds by size, least squares with old points fading. The slope, as a share of the height for one more unit, is
    the last one that was seen while the variance of the sizes was above `spread`, before that `slope`."""

    def __init__(self, slope: float = _SLOPE, spread: float = 0.25) -> None:
        self._slope, self._spread = slope, spread
        self._size, self._seconds, self._square, self._product = (Mean(0.0) for _ in range(4))

    @property
    def known(self) -> bool:
        return self._size.count > 0

    def note(self, size: float, seconds: float) -> None:
        self._size.note(size)
        self._seconds.note(seconds)
        self._square.note(size * size)
        self._product.note(size * seconds)
        size, seconds = self._size.value, self._seconds.value
        spread = self._square.value - size * size
        if spread > self._spread and seconds > 0:
            self._slope = (self._product.value - size * seconds) / (spread * seconds)

    def line(self) -> Line:
        """Through the mean; the slope is never negative."""
        size, seconds = self._size.value, self._seconds.value
        slope = seconds * min(max(0.0, self._slope), 1 / max(1.0, size))
        return Line(seconds - slope * size, slope)


class _Speed:
    """Tokens per second of rounds: `value`, None while there were few, and its standard error, `doubt`, as a share."""

    def __init__(self) -> None:
        self._tokens, self._square, self._seconds = (Mean(0.0, _SPEED_SMOOTHING) for _ in range(3))

    def note(self, tokens: float, seconds: float) -> None:
        self._tokens.note(tokens)
        self._square.note(tokens * tokens)
        self._seconds.note(seconds)

    @property
    def value(self) -> float | None:
        if self._tokens.count < _ENOUGH_ROUNDS or self._seconds.value <= 0:
            return None
        return self._tokens.value / self._seconds.value

    @property
    def doubt(self) -> float:
        mean, samples = self._tokens.value, min(self._tokens.count, 2 / _SPEED_SMOOTHING - 1)
        return math.sqrt(max(0.0, self._square.value - mean * mean) / samples) / mean if mean > 0 else 0.0


class Learner:
    """Fed by the target, round by round; `profile` says what is known so far, None while no time was measured."""

    def __init__(self) -> None:
        # A tree step takes long for other reasons than its chains, too: its slope is seen while plans of many and of
        # few chains take turns.
        self._verify, self._step = LineFit(), LineFit(spread=1.0)
        self._plain: dict[int, Mean] = {}
        self._acceptance = [Mean(_ACCEPTANCE) for _ in range(_POSITIONS)]
        self._rate = Mean(_ACCEPTANCE)
        self._missed, self._waited, self._drafted = Mean(1.0), Mean(0.0), Mean(0.0)
        self._hazard = [Mean(0.0) for _ in range(_RANKS)]
        self._speeds: dict[int, _Speed] = {}

    def round(self, batch: int, tokens: int, seconds: float, alone: bool) -> None:
        """A verification of `tokens` tokens of `batch` rows; `alone`: no draft was busy beside it."""
        if alone:
            self._plain.setdefault(batch, Mean(seconds)).note(seconds)
        else:
            self._verify.note(tokens, seconds)

    def brought(self, batch: int, tokens: int, seconds: float) -> None:
        """A round of `batch` rows with a draft ahead of them brought so many tokens in so many seconds, waiting too."""
        self._speeds.setdefault(batch, _Speed()).note(tokens, seconds)

    def forget_speeds(self) -> None:
        """The plan is another now, and these are not its own."""
        self._speeds.clear()

    def steps(self, chains: float, seconds: float) -> None:
        """Tree steps of so many chains, and so long, on average."""
        self._step.note(chains, seconds)

    def outcome(self, drafted: int, accepted: int) -> None:
        """A verification of `drafted` tokens of the draft."""
        for index in range(min(drafted, accepted + 1)):
            self._acceptance[min(index, _POSITIONS - 1)].note(float(index < accepted))
        self._rate.note_outcome(drafted, accepted)

    def looked_up(self, fan_out: int, rank: int | None) -> None:
        """An outcome for whose accepted length `fan_out` tokens were prepared was the `rank`-th of them, from 1.

        Lists are not of one length, and the long ones belong to other accepted lengths than the short ones: as with
        lives that are watched for different times, what is estimated is the chance of each rank given none before it
        (Kaplan and Meier, 1958).
        """
        for tried in range(1, min(fan_out, rank or fan_out, _RANKS) + 1):
            self._hazard[tried - 1].note(float(tried == rank))

    def missed(self, tokens: int, waited: float, drafted: int) -> None:
        """The round after a miss waited so many seconds, verified so many draft tokens, and brought so many tokens."""
        self._missed.note(tokens)
        self._waited.note(waited)
        self._drafted.note(drafted)

    def profile(self, batch: int) -> Profile | None:
        verify, step = self.verify, self.step
        if verify is None or step is None:
            return None
        known, speed = [mean for mean in self._acceptance if mean.count >= 8], self._speed(batch)
        return Profile(
            verify=verify,
            step=step,
            plain=self._plain[batch].value if batch in self._plain else verify.at(batch),
            acceptance=tuple(mean.value for mean in known) or (self._rate.value,),
            rate=self._rate.value,
            misses=self.misses(),
            missed=self._after_a_miss(),
            speed=speed.value,
            doubt=speed.doubt,
        )

    @property
    def verify(self) -> Line | None:
        """Seconds of a verification by the tokens of the whole batch, None while no time was measured."""
        return self._verify.line() if self._verify.known else None

    @property
    def step(self) -> Line | None:
        """Seconds of a tree step by the chains of the whole batch, None while no time was measured."""
        return self._step.line() if self._step.known else None

    def token_price(self, batch: int) -> float:
        """What verifying one more token takes, in tokens that the whole batch makes in that time; 0 while unknown."""
        return self._verify.line().each * (self._speed(batch).value or 0.0)

    def _speed(self, batch: int) -> _Speed:
        return self._speeds.get(batch) or _Speed()

    def _after_a_miss(self) -> Missed | None:
        known = self._missed.count >= 8
        return Missed(self._missed.value, self._waited.value, self._drafted.value) if known else None

    def misses(self) -> tuple[float, float]:
        """(c, r) of the power law, as far as ranks were tried; from a few ranks only, the exponent is kept within what
        is known of pairs of models."""
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
