"""From what rounds show to a `Profile`: exponentially weighted means and straight lines. No clock in here."""

from __future__ import annotations

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
    """Seconds by size, least squares with old points fading. `slope` is taken, as a share of the height for one more
    unit, until sizes have varied."""

    def __init__(self, slope: float = _SLOPE) -> None:
        self._slope = slope
        self._size, self._seconds, self._square, self._product = (Mean(0.0) for _ in range(4))

    @property
    def known(self) -> bool:
        return self._size.count > 0

    def note(self, size: float, seconds: float) -> None:
        self._size.note(size)
        self._seconds.note(seconds)
        self._square.note(size * size)
        self._product.note(size * seconds)

    def line(self) -> Line:
        """Through the mean; the slope is never negative."""
        size, seconds = self._size.value, self._seconds.value
        spread = self._square.value - size * size
        slope = self._slope * seconds
        if spread > 0.25:
            slope = (self._product.value - size * seconds) / spread
        slope = min(max(0.0, slope), seconds / max(1.0, size))
        return Line(seconds - slope * size, slope)


class Learner:
    """Fed by the target, round by round; `profile` says what is known so far, None while no time was measured."""

    def __init__(self) -> None:
        self._verify, self._step = LineFit(), LineFit()
        self._plain: dict[int, Mean] = {}
        self._acceptance = [Mean(_ACCEPTANCE) for _ in range(_POSITIONS)]
        self._rate = Mean(_ACCEPTANCE)
        self._missed, self._waited, self._drafted = Mean(1.0), Mean(0.0), Mean(0.0)
        self._hazard = [Mean(0.0) for _ in range(_RANKS)]
        self._speeds: dict[int, tuple[Mean, Mean]] = {}

    def round(self, batch: int, tokens: int, seconds: float, alone: bool) -> None:
        """A verification of `tokens` tokens of `batch` rows; `alone`: no draft was busy beside it."""
        if alone:
            self._plain.setdefault(batch, Mean(seconds)).note(seconds)
        else:
            self._verify.note(tokens, seconds)

    def brought(self, batch: int, tokens: int, seconds: float) -> None:
        """A round of `batch` rows with a draft ahead of them brought so many tokens in so many seconds, waiting too."""
        fresh = Mean(0.0, _SPEED_SMOOTHING), Mean(0.0, _SPEED_SMOOTHING)
        for mean, sample in zip(self._speeds.setdefault(batch, fresh), (tokens, seconds), strict=True):
            mean.note(sample)

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
        if not self._verify.known or not self._step.known:
            return None
        verify = self._verify.line()
        known = [mean for mean in self._acceptance if mean.count >= 8]
        return Profile(
            verify=verify,
            step=self._step.line(),
            plain=self._plain[batch].value if batch in self._plain else verify.at(batch),
            acceptance=tuple(mean.value for mean in known) or (self._rate.value,),
            rate=self._rate.value,
            misses=self.misses(),
            missed=self._after_a_miss(),
            speed=self._speed(batch),
        )

    def token_price(self, batch: int) -> float:
        """What verifying one more token takes, in tokens that the whole batch makes in that time; 0 while unknown."""
        return self._verify.line().each * (self._speed(batch) or 0.0)

    def _speed(self, batch: int) -> float | None:
        tokens, seconds = self._speeds.get(batch, (None, None))
        if tokens is None or seconds is None or tokens.count < _ENOUGH_ROUNDS or seconds.value <= 0:
            return None
        return tokens.value / seconds.value

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
