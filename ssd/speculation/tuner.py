"""Which K, fan-out list and waiting serve best, from what was measured (ALGORITHM 5.3): pure values in, a plan out.

The speed of a plan is Theorem 7's, with Corollary 16's batch term, over tokens and times taken from a `Profile`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ssd.speculation.fan_out import MOST, fan_out_at, hit_rate, optimal_fan_out
from ssd.speculation.theory import expected_tokens_by_position

# A plan must promise this much more than the one in force to replace it: figures are noisy, predictions some 5 % off
# (docs/planning.md), and a change has a cost.
# Going back to plain decoding takes little: a draft should not make anyone slower. But the draft forgets everything, so
# while its speed is only predicted (as when a batch drains, whose sizes last a few rounds each) it takes more.
_HYSTERESIS, _TO_PLAIN, _TO_PLAIN_UNMEASURED = 0.08, 0.005, 0.15
# A draft that was tried needs less of a promise to be taken up than one plan needs to replace another.
_TO_DRAFT = 0.03
# Plans this close are alike, and the one with the fewest chains is best. Where both models share a memory bus, chains
# take from the target what no figure here shows: there more counts as alike.
ALIKE, ALIKE_ON_ONE_BUS = 0.003, 0.03
# Rounds are not all of one length: some have room for more tree steps than the mean, some for less.
_SPREAD = (0.75, 1.0, 1.25)


class Missed(NamedTuple):
    """What the rounds after a miss were like, on average: the tokens they brought, the seconds they waited, the draft
    tokens they verified."""

    tokens: float
    waited: float
    drafted: float


class Line(NamedTuple):
    """Seconds as a function of a size: `fixed` + `each` x size."""

    fixed: float
    each: float

    def at(self, size: float) -> float:
        return self.fixed + self.each * size


@dataclass(frozen=True)
class Profile:
    """What was measured. `acceptance[i]` is the rate of the (i + 1)-th draft token where all before it were accepted
    (the last number serves beyond), `rate` that of all draft tokens, `misses` the power law (c, r) of outcomes by
    fan-out, `missed` is None before there was a miss, `speed` the tokens per second of all rows in rounds with a draft
    ahead of them, None before there were some, and `doubt` its standard error as a share of it. `verify` is in tokens
    of the whole batch, `step` in chains of the whole batch, `plain` the time of a token for every row without a draft
    beside it; all in seconds."""

    verify: Line
    step: Line
    plain: float
    acceptance: tuple[float, ...]
    rate: float
    misses: tuple[float, float]
    missed: Missed | None = None
    speed: float | None = None
    doubt: float = 0.0

    def tokens(self, depth: float) -> float:
        """Expected tokens of a round with `depth` draft tokens, a whole number or between two."""
        return expected_tokens_by_position(self.acceptance, depth)


class Plan(NamedTuple):
    """K and F_0..F_K; K = 0 is plain decoding. `speed` is in tokens per second of the whole batch, as predicted."""

    lookahead: int
    fan_out: tuple[int, ...]
    speed: float


def predicted(profile: Profile, batch: int, lookahead: int, fan_out: Sequence[int]) -> float:
    """Tokens per second of `batch` sequences with K = `lookahead` and one fan-out, or F_0..F_K."""
    chains = sum(fan_out_at(k, lookahead, fan_out) for k in range(lookahead + 1))
    step = max(1e-6, profile.step.at(batch * chains))  # a clock may see nothing
    steps = profile.verify.at(2 * batch) / step  # no longer than it takes with one draft token: more must be earned
    # An unfinished step gives nothing, and the first one of a round often has the path to catch up with.
    depths = [min(float(lookahead), steps * spread - 0.5) if steps * spread >= 1 else 0.0 for spread in _SPREAD]
    depth = sum(depths) / len(depths)
    shares = {d: depths.count(d) / len(depths) for d in depths}
    on_hit = sum(share * profile.tokens(d) for d, share in shares.items())
    hits = sum(share * _hits(profile, fan_out, d) for d, share in shares.items()) if depth > 0 else 0.0
    any_miss = 1 - hits**batch

    def speed(missed: Missed) -> float:
        verified = batch * (1 + hits * depth + (1 - hits) * missed.drafted)
        tokens = batch * (hits * on_hit + (1 - hits) * missed.tokens)
        return tokens / (profile.verify.at(verified) + any_miss * missed.waited)

    # What a missed row got was measured beside rows with hits, partly from chains for other outcomes: where there is no
    # time for a single step there are none of those.
    if profile.missed is not None and depth > 0:
        return speed(profile.missed)
    fresh = profile.step.at(batch)
    return max(speed(Missed(profile.tokens(wait), wait * fresh, wait)) for wait in range(lookahead + 1))


def _hits(profile: Profile, fan_out: Sequence[int], depth: float) -> float:
    """The hit rate of rounds with `depth` tokens in flight."""
    in_flight = round(depth)
    lists = [fan_out_at(k, in_flight, fan_out) for k in range(in_flight + 1)]
    return hit_rate(profile.rate, lists, profile.misses)


def predicted_sd(profile: Profile, batch: int, lookahead: int) -> float:
    """The same for ordinary speculative decoding: draft K tokens, then verify them."""
    time = profile.verify.at(batch * (1 + lookahead)) + lookahead * profile.step.at(batch)
    return batch * profile.tokens(lookahead) / time


class Choices(NamedTuple):
    """What may be chosen: K among `lookaheads` (0: plain decoding), and fan-outs of at most `chains` chains a sequence
    unless `fan_out` is given, one number or a list. Without `ahead` the draft works in
    turn with the target (`sd`). Speeds that differ by less than the share `alike` do not count as different."""

    lookaheads: tuple[int, ...]
    fan_out: tuple[int, ...] = ()
    chains: int = 32
    ahead: bool = True
    alike: float = ALIKE


def best_plan(
    profile: Profile, batch: int, choices: Choices, present: Plan | None = None, measured: Plan | None = None
) -> Plan:
    """The plan with the highest predicted speed for `batch` sequences; `present` stays unless another is clearly
    better. How far predictions are off is known where `profile.speed` is that of the plan `measured`: by that they are
    corrected before they are compared with plain decoding, whose time is no prediction.
    """

    def planned(lookahead: int, fan_out: tuple[int, ...]) -> Plan:
        if lookahead == 0:
            return Plan(0, (), batch / profile.plain)
        return Plan(lookahead, fan_out, correction * uncorrected(lookahead, fan_out))

    def uncorrected(lookahead: int, fan_out: tuple[int, ...]) -> float:
        if not choices.ahead:
            return predicted_sd(profile, batch, lookahead)
        return predicted(profile, batch, lookahead, fan_out)

    correction = 1.0
    if choices.ahead and profile.speed is not None and measured is not None:
        correction = profile.speed / uncorrected(measured.lookahead, measured.fan_out)
    plans = [planned(k, fan_out) for k in choices.lookaheads for fan_out in _fan_outs(profile, choices, k)]
    fastest = max(plan.speed for plan in plans)
    alike = [plan for plan in plans if plan.speed >= (1 - choices.alike) * fastest]
    best = min(alike, key=lambda plan: sum(plan.fan_out))
    if present is not None and present.lookahead in choices.lookaheads:
        kept = planned(present.lookahead, present.fan_out)
        if best.lookahead and kept.lookahead:
            margin = _HYSTERESIS
        elif best.lookahead:
            margin = _TO_DRAFT
        else:
            known = profile.speed is not None or not choices.ahead
            margin = _TO_PLAIN + profile.doubt if known else _TO_PLAIN_UNMEASURED
        if best.speed < (1 + margin) * kept.speed:
            return kept
    return best


def _fan_outs(profile: Profile, choices: Choices, lookahead: int) -> list[tuple[int, ...]]:
    """The lists worth considering for one K."""
    if lookahead == 0:
        return [()]
    if choices.fan_out:
        return [choices.fan_out]
    budgets = _budgets(lookahead + 1, choices.chains) if choices.ahead else (lookahead + 1,)
    lists = [optimal_fan_out(profile.rate, profile.misses[1], lookahead, budget) for budget in budgets]
    return [tuple(min(count, MOST) for count in fan_out) for fan_out in lists]


def _budgets(fewest: int, most: int) -> Iterator[int]:
    """From `fewest` chains on, each a quarter more than the one before: a few chains differ little from a few more."""
    budget = fewest
    while budget <= most:
        yield budget
        budget += max(2, budget // 4)
