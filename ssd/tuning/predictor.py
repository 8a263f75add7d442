"""Predicts tokens per second of every plan from measurements. Pure functions.

A plan of `ssd` follows Theorem 7 and the batch term of Corollary 16 (arXiv 2603.03251)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ssd.config.params import DRAFTED
from ssd.speculation.fan_out import MOST, fan_out_at, hit_rate, optimal_fan_out, single_chain
from ssd.tuning.estimates import AfterMiss, Measurements
from ssd.tuning.plan import Choices, Plan

# Rounds differ in length, as shares of the mean: some have time for more tree steps, some for fewer.
_SPREAD = (0.75, 1.0, 1.25)
# K where the draft ends a speculation by itself. With the token before them a row has eight tokens, which our kernels
# for CPUs take at once; a GPU loses little by it.
_MOST_ENDING = 7


class WorkAhead(NamedTuple):
    """The draft's work in a verification: tokens of each chain, new tokens of a hit, hit rate."""

    depth: float
    on_hit: float
    hits: float


def work_ahead(measured: Measurements, batch: int, lookahead: int, fan_out: Sequence[int]) -> WorkAhead:
    """Predict the draft's work for each of `batch` sequences."""
    chains = batch * sum(fan_out_at(k, lookahead, fan_out) for k in range(lookahead + 1))
    step = max(1e-6, measured.step.at(chains))  # a clock may see nothing
    # Tree steps in the time of a verification with one draft token; deeper verifications must earn their own time.
    steps = (measured.round_s(2 * batch) - measured.chain_s * chains) / step
    # An unfinished step brings no token, and the first step of a round often computes path tokens, too.
    depths = [min(float(lookahead), steps * spread - 0.5) if steps * spread >= 1 else 0.0 for spread in _SPREAD]
    depth = sum(depths) / len(depths)
    shares = {d: depths.count(d) / len(depths) for d in depths}
    on_hit = sum(share * measured.tokens(d) for d, share in shares.items())
    hits = sum(share * _hits(measured, fan_out, d) for d, share in shares.items()) if depth > 0 else 0.0
    return WorkAhead(depth, on_hit, hits)


def predicted(measured: Measurements, batch: int, lookahead: int, fan_out: Sequence[int]) -> float:
    """Predict tokens per second in `ssd`, with one fan-out or F_0..F_K."""
    depth, on_hit, again = work_ahead(measured, batch, lookahead, fan_out)

    def speed(missed: AfterMiss) -> float:
        hits = again
        if 0 in fan_out and depth > 0:  # a single chain hits more often after a miss, with fewer tokens in flight
            hits = (back := _hits(measured, fan_out, missed.drafted)) / max(1e-9, 1 + back - again)
        any_miss = 1 - hits**batch
        verified = batch * (1 + hits * depth + (1 - hits) * missed.drafted)
        tokens = batch * (hits * on_hit + (1 - hits) * missed.tokens)
        return tokens / (measured.round_s(verified) + any_miss * missed.waited)

    # `measured.missed` includes tokens that missed rows took from chains of other outcomes. Without time for a single
    # step there are no such chains. It is of other plans, too: with few chains a miss may not wait at all.
    if measured.missed is not None and depth > 0:
        return max(speed(measured.missed), speed(AfterMiss(1.0, 0.0, 0.0)))
    fresh = measured.step.at(batch)
    return max(speed(AfterMiss(measured.tokens(wait), wait * fresh, wait)) for wait in range(lookahead + 1))


def _hits(measured: Measurements, fan_out: Sequence[int], depth: float) -> float:
    in_flight = round(depth)
    lists = [fan_out_at(k, in_flight, fan_out) for k in range(in_flight + 1)]
    return hit_rate(measured.rate(max(1, in_flight)), lists, measured.misses)


def predicted_sd(measured: Measurements, batch: int, lookahead: int) -> float:
    """Predict tokens per second of mode `sd`: draft K tokens, then verify them.

    A draft that ends a single row counts as the best K up to this one."""
    if measured.ends and batch == 1:
        fixed = replace(measured, ends=False)
        return max(predicted_sd(fixed, batch, k) for k in range(1, lookahead + 1))
    verify_s = measured.alone_s(batch * (1 + lookahead)) + measured.overhead
    draft_s = lookahead * (measured.step_alone or measured.step).at(batch)
    return batch * measured.tokens(lookahead) / (verify_s + draft_s)


def predicted_plain(measured: Measurements, batch: int) -> float:
    """Predict tokens per second of prompt lookup without a draft."""
    gain = measured.lookup
    return batch * (1 + gain.accepted) / measured.alone_s(batch * (1 + gain.verified))


def speed_of(measured: Measurements, batch: int, plan: Plan) -> float:
    if plan.mode == "ssd":
        return predicted(measured, batch, plan.lookahead, plan.fan_out)
    return predicted_sd(measured, batch, plan.lookahead) if plan.mode == "sd" else predicted_plain(measured, batch)


def ranked_plans(measured: Measurements, batch: int, choices: Choices) -> list[Plan]:
    """Return the plans of each mode and K, in `ssd` by number of chains, fastest first."""
    found = []
    for mode in choices.modes:
        if mode not in DRAFTED:
            found.append(Plan(mode, speed=predicted_plain(measured, batch)))
        elif mode == "sd":
            numbers = choices.lookaheads
            if measured.ends and batch == 1 and len(numbers) > 1:
                numbers = (min(numbers[-1], _MOST_ENDING),)
            lists = ((k, choices.fan_out or (1,) * (k + 1)) for k in numbers)
            found += [Plan("sd", k, sum(f), f, predicted_sd(measured, batch, k)) for k, f in lists]
        else:
            lists = ((k, fan_out) for k in choices.lookaheads for fan_out in _fan_outs(measured, choices, k))
            found += [Plan("ssd", k, sum(f), f, predicted(measured, batch, k, f)) for k, f in lists]
    return sorted(found, key=lambda plan: plan.speed, reverse=True)


def _fan_outs(measured: Measurements, choices: Choices, lookahead: int) -> list[tuple[int, ...]]:
    if choices.fan_out:
        return [choices.fan_out]
    lists, budget = [single_chain(lookahead)], lookahead + 1
    while budget <= choices.chains:
        lists.append(best_fan_out(measured, lookahead, budget))
        budget += max(2, budget // 2)
    return list(dict.fromkeys(lists))  # those cut to `MOST` may be equal


def best_fan_out(measured: Measurements, lookahead: int, budget: int) -> tuple[int, ...]:
    """Return the list of Theorem 12 for at most `budget` chains, none above `MOST`."""
    best = optimal_fan_out(measured.rate(lookahead), measured.misses[1], lookahead, budget)
    return tuple(min(count, MOST) for count in best)
