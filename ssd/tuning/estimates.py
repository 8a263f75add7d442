"""Remembers the pair on this machine: costs, agreement, recent speed. Nothing here reads a clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ssd.speculation.fan_out import miss_law
from ssd.speculation.theory import Cost, LinearCost, acceptance_rate, expected_tokens_by_position
from ssd.tuning.costs import Costs
from ssd.tuning.knowledge import Agreement, Knowledge
from ssd.tuning.plan import Plan

_SMOOTHING, _SLOPE = 0.01, 0.01
_POSITIONS, _RANKS = 8, 16
# Assumed until measured: an acceptance rate, the miss law (c, r) of the paper's pairs, and the accepted and verified
# tokens of prompt lookup, which count as `_LOOKUP_SAMPLES` rounds. `_EXPONENTS` bound r.
_ACCEPTANCE, _MISSES, _LOOKUP, _LOOKUP_SAMPLES, _EXPONENTS = 0.5, (0.4, 0.6), (0.05, 0.1), 64, (0.4, 1.2)
_FEW = 5
# The host's work for a chain in a round (10 to 25 us, EPYC of family 25); what it takes here the plans' errors learn.
_CHAIN_S = 15e-6
_RECALLED = 40  # most samples that a rate of an earlier process counts as
# Smoothing of the long-run speed, and of the means that decide about waits; the latter begin as so many rounds.
_LONG_RUN, _RECENT, _RECENT_ROUNDS = 0.03, 0.1, 10
_JUDGED_AT = 100  # rounds, which then show whether the cost tables were disturbed
_LONGEST_STEP_S = 60.0
# Upper bounds of the kinds greedy and cool; higher temperatures are warm. Acceptance is learned for each kind.
_BOUNDS = (0.0, 0.7)
KINDS = len(_BOUNDS) + 1


class DraftTelemetry(NamedTuple):
    """Counters: `progress` of the draft's loop, tree steps, their seconds, tokens appended to chains.

    `compiles`: kernels compiled since it is ready."""

    progress: int
    steps: int
    step_seconds: float
    grown: int
    compiles: int = 0


class DecodingRound(NamedTuple):
    """A round of `batch` decoding rows, without prefill.

    Verifying `tokens` tokens took `seconds` and brought `brought` new ones, after `waited` seconds for the draft.
    `beside`: the draft worked ahead meanwhile. `in_turn`: rows waited for all their draft tokens. `plan`: that of all
    rows, or None. `remembered`: the suffix memory brought over a quarter of the new tokens. `busy`: the draft may
    have worked meanwhile, so that the time says nothing of the target."""

    batch: int
    tokens: int
    seconds: float
    waited: float
    brought: int
    beside: bool
    in_turn: bool
    plan: Plan | None
    remembered: bool = False
    busy: bool = False


class AfterMiss(NamedTuple):
    """The mean round after a miss: tokens it brought, seconds it waited, draft tokens it verified."""

    tokens: float
    waited: float
    drafted: float


class LookupGain(NamedTuple):
    """Mean tokens of prompt lookup in a row's round."""

    accepted: float = 0.0
    verified: float = 0.0


NO_GAIN = LookupGain()


@dataclass(frozen=True)
class Measurements:
    """Measured seconds and tokens, from which the predictor computes speeds.

    `verify` is by the tokens of the batch, `step` (a tree step) by its chains, while both models work; `verify_alone`
    and `step_alone` in turn, None if equal. `overhead` is a round's time beside its forwards, `chain_s` a chain's.
    `acceptance[i]` is the rate of the (i + 1)-th draft token if all before it were accepted; the last rate also serves
    later tokens. `misses` is (c, r) of c F^-r. `ends`: in `sd` the draft ends the speculation of a single row where it
    is unsure."""

    verify: Cost
    step: Cost
    acceptance: tuple[float, ...]
    misses: tuple[float, float]
    overhead: float = 0.0
    verify_alone: Cost | None = None
    step_alone: Cost | None = None
    missed: AfterMiss | None = None
    lookup: LookupGain = NO_GAIN
    ends: bool = False
    chain_s: float = 0.0

    def round_s(self, tokens: float) -> float:
        return self.verify.at(tokens) + self.overhead

    def alone_s(self, tokens: float) -> float:
        return (self.verify_alone or self.verify).at(tokens)

    def rate(self, depth: int) -> float:
        """Return the acceptance rate of all tokens tested at `depth` >= 1."""
        return acceptance_rate(self.acceptance, depth)

    def tokens(self, depth: float) -> float:
        return expected_tokens_by_position(self.acceptance, depth)


class Mean:
    """An exponentially weighted mean, at first the plain one; `value` counts as `count` samples."""

    def __init__(self, value: float, smoothing: float = _SMOOTHING, count: int = 0) -> None:
        self.value, self.count, self._smoothing = value, count, smoothing

    def note(self, sample: float) -> None:
        self.count += 1
        self.value += max(self._smoothing, 1 / self.count) * (sample - self.value)

    def note_outcome(self, drafted: int, accepted: int) -> None:
        """Add a verification's samples to an acceptance rate; tokens after a rejected one were not tested."""
        for index in range(min(drafted, accepted + 1)):
            self.note(float(index < accepted))


def note_guesses(chances: Iterable[Mean], guesses: Iterable[int], tokens: Iterable[int]) -> None:
    """Learn for each place of a guess how often it is right if all before it are; `tokens` are the true ones."""
    for chance, guess, token in zip(chances, guesses, tokens, strict=False):
        chance.note(float(guess == token))
        if guess != token:
            return


class LinearFit:
    """Fits seconds to sizes by least squares; old points fade.

    The relative slope is updated when the variance of the sizes is above `spread`."""

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

    def cost(self) -> LinearCost:
        """Return the line through the mean point, never falling."""
        size, seconds = self._size.value, self._seconds.value
        slope = seconds * min(max(0.0, self._slope), 1 / max(1.0, size))
        return LinearCost(seconds - slope * size, slope)


def kind_of(temperature: float) -> int:
    """Return the kind of a sampling law by its temperature: 0 greedy, 1 cool, 2 warm."""
    return sum(temperature > bound for bound in _BOUNDS)


def recent(value: float) -> Mean:
    return Mean(value, _RECENT, _RECENT_ROUNDS)


def _recalled(rates: Sequence[tuple[float, int]], default: float, count: int) -> list[Mean]:
    known = [Mean(rate, count=min(_RECALLED, samples)) for rate, samples in rates[:count]]
    return known + [Mean(default) for _ in range(count - len(known))]


class Learner:
    """Learns how often the models and prompt lookup agree under one kind of sampling law."""

    def __init__(self) -> None:
        self._acceptance = [Mean(_ACCEPTANCE) for _ in range(_POSITIONS)]
        self._missed, self._waited, self._drafted = Mean(1.0), Mean(0.0), Mean(0.0)
        self._hazard = [Mean(0.0) for _ in range(_RANKS)]
        self._lookup = [Mean(tokens, count=_LOOKUP_SAMPLES) for tokens in _LOOKUP]

    def agreement(self) -> Agreement:
        acceptance, hits = (
            tuple((round(mean.value, 4), mean.count) for mean in each) for each in (self._acceptance, self._hazard)
        )
        return Agreement(acceptance, hits, self.lookup)

    def recall(self, *known: Agreement) -> None:
        """Begin with the first known rates and the first known gain.

        Rates count as few samples, since the next text may differ."""
        for law in known:
            if law.sampled:
                self._acceptance = _recalled(law.acceptance, _ACCEPTANCE, _POSITIONS)
                self._hazard = _recalled(law.hits, 0.0, _RANKS)
                break
        gain = next((law.lookup for law in known if law.lookup is not None), _LOOKUP)
        self._lookup = [Mean(tokens, count=_LOOKUP_SAMPLES) for tokens in gain]

    def outcome(self, drafted: int, accepted: int) -> None:
        for index in range(min(drafted, accepted + 1)):
            self._acceptance[min(index, _POSITIONS - 1)].note(float(index < accepted))

    def looked_up(self, fan_out: int, rank: int | None) -> None:
        """Learn that the bonus token was the `rank`-th, from 1, of `fan_out` prepared ones; None: no hit.

        Fan-outs differ by accepted length, which biases plain frequencies: the rate learned is the chance of a rank
        given that no rank before it hit (Kaplan and Meier, 1958)."""
        for tried in range(1, min(fan_out, rank or fan_out, _RANKS) + 1):
            self._hazard[tried - 1].note(float(tried == rank))

    def missed(self, tokens: int, waited: float, drafted: int) -> None:
        """Learn from a round after a miss that waited `waited` seconds."""
        self._missed.note(tokens)
        self._waited.note(waited)
        self._drafted.note(drafted)

    def prompt_lookup(self, verified: int, accepted: int) -> None:
        for mean, tokens in zip(self._lookup, (accepted, verified), strict=True):
            mean.note(tokens)

    @property
    def lookup(self) -> LookupGain:
        accepted, verified = self._lookup
        return LookupGain(accepted.value, verified.value)

    @property
    def after_miss(self) -> AfterMiss | None:
        if self._missed.count < 8:
            return None
        return AfterMiss(self._missed.value, self._waited.value, self._drafted.value)

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Return the rates by position that have enough samples; without any, a middling one."""
        return tuple(mean.value for mean in self._acceptance if mean.count >= 8) or (_ACCEPTANCE,)

    def misses(self) -> tuple[float, float]:
        """Return (c, r) of c F^-r, fitted to the ranks that were tried often enough."""
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


class Estimates:
    """Owns what is known of a pair. The proposer reports every round.

    Means of recent rounds: `acceptance`, seconds `token_s` of a draft token that the target waits for, `verify_s` of a
    verification. `works_ahead`: the draft works ahead of a row in the next verification."""

    def __init__(self) -> None:
        self.costs, self.rounds = Costs(), 0
        self.learners = [Learner() for _ in range(KINDS)]
        self.acceptance, self.token_s, self.verify_s = recent(0.5), recent(0.005), recent(0.02)
        self.last_verify_s, self.works_ahead, self.ends = 0.0, False, False
        self._long_run = 0, Mean(0.0), Mean(0.0)  # rows, their tokens and seconds a round
        self._telemetry = DraftTelemetry(0, 0, 0.0, 0)

    def recall(self, known: Knowledge, prior: Knowledge | None = None) -> None:
        """Begin with earlier knowledge, or with the pair's prior where there is none."""
        self.costs = Costs(known.tables, known.text)
        for kind, learner in enumerate(self.learners):
            learner.recall(*(each.law(kind) for each in (known, prior) if each is not None))

    def note(self, round_: DecodingRound | None, draft: DraftTelemetry) -> None:
        """Learn from a round; None if it was of another kind. `draft`: its present counters."""
        if round_ is not None:
            if not round_.busy:
                self._learn_costs(round_, draft)
            if self._long_run[0] != round_.batch:
                self._long_run = round_.batch, Mean(0.0, _LONG_RUN), Mean(0.0, _LONG_RUN)
            self._long_run[1].note(round_.brought)
            self._long_run[2].note(round_.seconds + round_.waited)
        self._telemetry = draft
        self.rounds += 1
        if self.rounds == _JUDGED_AT:
            self.costs.judge()

    def _learn_costs(self, round_: DecodingRound, draft: DraftTelemetry) -> None:
        self.costs.note("verify_beside" if round_.beside else "verify", round_.tokens, round_.seconds)
        before = self._telemetry
        steps, grown = draft.steps - before.steps, draft.grown - before.grown
        seconds = draft.step_seconds - before.step_seconds
        # The draft may write anything there: impossible figures are dropped.
        if steps > 0 and 0 <= grown <= steps * 2**16 and 0 < seconds < _LONGEST_STEP_S:
            self.costs.note("step" if round_.in_turn else "step_beside", max(1.0, grown / steps), seconds / steps)

    def speed(self, batch: int) -> float:
        """Return the batch's tokens per second in recent rounds; before any, of plain decoding; 0: unknown."""
        _, tokens, seconds = self._long_run
        if seconds.value > 0:
            return tokens.value / seconds.value
        verify = self.costs.of("verify")
        return 0.0 if verify is None else batch / verify.at(batch)

    @property
    def tokens_a_row(self) -> float:
        """Return a row's tokens in a recent round; 1 before any."""
        rows, tokens, _ = self._long_run
        return max(1.0, tokens.value / rows) if rows else 1.0

    def plain_s(self, batch: int) -> float | None:
        """Return the seconds of a verification of `batch` tokens; None: not measured."""
        cost = self.costs.of("verify") or self.costs.of("verify_beside")
        return None if cost is None else cost.at(batch)

    def measurements(self, kind: int, draft: bool, ends: bool = False) -> Measurements | None:
        """Return what the predictor reads; None until all times are measured, with `draft` a draft's too."""
        costs = self.costs
        alone = costs.of("verify") or costs.of("verify_beside")
        beside = costs.of("verify_beside") or costs.of("verify")
        in_turn, ahead = costs.of("step") or costs.of("step_beside"), costs.of("step_beside") or costs.of("step")
        if alone is None or beside is None:
            return None
        if in_turn is None or ahead is None:
            if draft:
                return None
            in_turn = ahead = alone  # no plan asks
        learner = self.learners[kind]
        return Measurements(
            verify=beside,
            step=ahead,
            acceptance=learner.acceptance,
            misses=learner.misses(),
            missed=learner.after_miss,
            verify_alone=alone,
            step_alone=in_turn,
            lookup=learner.lookup,
            ends=ends,
            chain_s=_CHAIN_S,
        )
