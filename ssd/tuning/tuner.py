"""Predicts tokens per second from measurements, and chooses K, fan-outs and waiting by that. Pure functions.

The speed of a plan is Theorem 7's with the batch term of Corollary 16 (arXiv 2603.03251)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ssd.speculation.fan_out import MOST, fan_out_at, hit_rate, optimal_fan_out
from ssd.tuning.learner import AfterMiss, Measurements

# How much more a plan must promise than the one in force: figures are noisy, predictions some 5 % off
# (docs/planning.md), and a change has a cost. Going back to plain decoding takes little, as a draft should make nobody
# slower. It takes more while the draft's speed is only predicted, as when a batch drains: the draft forgets everything.
_HYSTERESIS, _TO_PLAIN, _TO_PLAIN_UNMEASURED = 0.08, 0.005, 0.15
# Taking up a draft that was tried needs less of a promise.
_TO_DRAFT = 0.03
# Plans this close are alike, and the one with the fewest chains is best. Where both models share a memory bus, chains
# slow the target in a way that no figure here shows: there more counts as alike.
ALIKE, ALIKE_ON_ONE_BUS = 0.003, 0.03
# Rounds differ in length: some have room for more tree steps than the mean, some for less.
_SPREAD = (0.75, 1.0, 1.25)


class SpeculationPlan(NamedTuple):
    """K and F_0..F_K; K = 0 is plain decoding. `speed` is the predicted tokens per second of the whole batch."""

    lookahead: int
    fan_out: tuple[int, ...]
    speed: float


def predicted(measured: Measurements, batch: int, lookahead: int, fan_out: Sequence[int]) -> float:
    """Tokens per second of `batch` sequences with K = `lookahead` and one fan-out, or F_0..F_K."""
    chains = sum(fan_out_at(k, lookahead, fan_out) for k in range(lookahead + 1))
    step = max(1e-6, measured.step.at(batch * chains))  # a clock may see nothing
    # The time of a verification with one draft token: deeper ones must earn their own time.
    steps = measured.verify.at(2 * batch) / step
    # An unfinished step gives nothing, and the first one of a round often has the path to catch up with.
    depths = [min(float(lookahead), steps * spread - 0.5) if steps * spread >= 1 else 0.0 for spread in _SPREAD]
    depth = sum(depths) / len(depths)
    shares = {d: depths.count(d) / len(depths) for d in depths}
    on_hit = sum(share * measured.tokens(d) for d, share in shares.items())
    hits = sum(share * _hits(measured, fan_out, d) for d, share in shares.items()) if depth > 0 else 0.0
    any_miss = 1 - hits**batch

    def speed(missed: AfterMiss) -> float:
        verified = batch * (1 + hits * depth + (1 - hits) * missed.drafted)
        tokens = batch * (hits * on_hit + (1 - hits) * missed.tokens)
        return tokens / (measured.verify.at(verified) + any_miss * missed.waited)

    # Missed rows were measured beside hits and took part of their tokens from chains for other outcomes. Where there is
    # no time for a single step there are no such chains.
    if measured.missed is not None and depth > 0:
        return speed(measured.missed)
    fresh = measured.step.at(batch)
    return max(speed(AfterMiss(measured.tokens(wait), wait * fresh, wait)) for wait in range(lookahead + 1))


def _hits(measured: Measurements, fan_out: Sequence[int], depth: float) -> float:
    """The hit rate of rounds with `depth` tokens in flight."""
    in_flight = round(depth)
    lists = [fan_out_at(k, in_flight, fan_out) for k in range(in_flight + 1)]
    return hit_rate(measured.rate, lists, measured.misses)


def predicted_sd(measured: Measurements, batch: int, lookahead: int) -> float:
    """The same for ordinary speculative decoding: draft K tokens, then verify them."""
    time = measured.verify.at(batch * (1 + lookahead)) + lookahead * measured.step.at(batch)
    return batch * measured.tokens(lookahead) / time


class Choices(NamedTuple):
    """What may be chosen: K among `lookaheads` (0 is plain decoding) and fan-outs.

    `fan_out` is one number or a list if it is fixed; otherwise a sequence may have at most `chains` chains. Without
    `ahead` the draft works in turn with the target (`sd`). Speeds that differ by less than the share `alike` count as
    equal."""

    lookaheads: tuple[int, ...]
    fan_out: tuple[int, ...] = ()
    chains: int = 32
    ahead: bool = True
    alike: float = ALIKE


def best_plan(
    measured: Measurements,
    batch: int,
    choices: Choices,
    present: SpeculationPlan | None = None,
    followed: SpeculationPlan | None = None,
) -> SpeculationPlan:
    """Returns the plan with the highest predicted speed; `present` stays unless another is clearly better.

    `measured.speed` is that of the plan `followed`. Predictions are corrected by the error that this shows, before they
    are compared with plain decoding, whose time is measured."""

    def planned(lookahead: int, fan_out: tuple[int, ...]) -> SpeculationPlan:
        if lookahead == 0:
            return SpeculationPlan(0, (), batch / measured.plain)
        return SpeculationPlan(lookahead, fan_out, correction * uncorrected(lookahead, fan_out))

    def uncorrected(lookahead: int, fan_out: tuple[int, ...]) -> float:
        if not choices.ahead:
            return predicted_sd(measured, batch, lookahead)
        return predicted(measured, batch, lookahead, fan_out)

    correction = 1.0
    if choices.ahead and measured.speed is not None and followed is not None:
        correction = measured.speed / uncorrected(followed.lookahead, followed.fan_out)
    plans = [planned(k, fan_out) for k in choices.lookaheads for fan_out in _fan_outs(measured, choices, k)]
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
            known = measured.speed is not None or not choices.ahead
            margin = _TO_PLAIN + measured.doubt if known else _TO_PLAIN_UNMEASURED
        if best.speed < (1 + margin) * kept.speed:
            return kept
    return best


def _fan_outs(measured: Measurements, choices: Choices, lookahead: int) -> list[tuple[int, ...]]:
    """The lists worth considering for one K."""
    if lookahead == 0:
        return [()]
    if choices.fan_out:
        return [choices.fan_out]
    budgets = _budgets(lookahead + 1, choices.chains) if choices.ahead else (lookahead + 1,)
    lists = [optimal_fan_out(measured.rate, measured.misses[1], lookahead, budget) for budget in budgets]
    return [tuple(min(count, MOST) for count in fan_out) for fan_out in lists]


def _budgets(fewest: int, most: int) -> Iterator[int]:
    """Numbers of chains from `fewest` on, each a quarter more than the one before."""
    budget = fewest
    while budget <= most:
        yield budget
        budget += max(2, budget // 4)
