"""From runs under emulation to what the engine itself costs, and what theory and the simulator allow."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from simulation.cascade import Level
from simulation.run import simulate
from simulation.setup import Devices, Setup
from simulation.statistics import AcceptanceLaw, Statistics

from emulating.cases import Case
from ssd.client import Completion
from ssd.ipc.messages import Metrics
from ssd.params import Mode
from ssd.speculation.theory import acceptance_for, speedup_sd, speedup_ssd, ssd_over_sd

Turn = Mapping[Mode, Sequence[Completion]]  # the batch in every mode, the same prompts and seeds


class ModeFigures(NamedTuple):
    """Of one mode, medians over the turns; milliseconds a round. `beyond` is what a round took beyond the stated time
    of its verification and beyond waiting; `predicted_ratio` is the measured speed over Theorem 7's (for `sd`:
    E / (1 + T), for `ar` one verification a token)."""

    tok_s: float
    round_ms: float
    wait_ms: float
    beyond_ms: float
    predicted_ratio: float
    tokens_a_round: float


class Figures(NamedTuple):
    """One case at one batch size. `gain` is `ssd` over `sd`, turn by turn; `simulated` is the same where the engine
    costs nothing, and `ceiling` Corollary 9's. `depth_beyond_ms`: of a tree step, beyond its stated time;
    `wait_beyond_ms`: of a round of `sd`, beyond the depths that it waits for. `equal` of `texts` had `ar`'s ids."""

    modes: dict[Mode, ModeFigures]
    hit_rate: float
    on_hit: float
    on_miss: float
    gain: float
    simulated: float
    ceiling: float
    depth_beyond_ms: float
    wait_beyond_ms: float
    equal: int
    texts: int


def figures(case: Case, batch: int, turns: Sequence[Turn]) -> Figures:
    modes = {mode: _mode(case, batch, mode, turns) for mode in turns[0]}
    sd, ssd = (_pooled([run.metrics for turn in turns for run in turn[mode]]) for mode in ("sd", "ssd"))
    depth_ms = 1e3 * case.times.depth.line.at(batch)
    texts = [pair for turn in turns for mode in ("sd", "ssd") for pair in zip(turn[mode], turn["ar"], strict=True)]
    draft = case.stated.lookahead * depth_ms / _verify_ms(case, batch, sd)
    return Figures(
        modes=modes,
        hit_rate=ssd.hit_rate,
        on_hit=ssd.on_hit,
        on_miss=ssd.on_miss,
        gain=statistics.median(_speed(turn["ssd"]) / _speed(turn["sd"]) for turn in turns),
        simulated=simulated_gain(case, batch, sd.tokens, ssd.hit_rate),
        ceiling=ssd_over_sd(ssd.hit_rate, ssd.on_hit or ssd.tokens, sd.tokens, draft)[1],
        depth_beyond_ms=turns[-1]["ssd"][-1].metrics.draft_step_ms - depth_ms,
        wait_beyond_ms=modes["sd"].wait_ms - case.stated.lookahead * depth_ms,
        equal=sum(one.token_ids == other.token_ids for one, other in texts),
        texts=len(texts),
    )


class _Pooled(NamedTuple):
    """Means over the rounds of some requests; times in ms."""

    tokens: float
    drafted: float
    round: float
    wait: float
    hit_rate: float
    on_hit: float
    on_miss: float


def _pooled(metrics: Sequence[Metrics]) -> _Pooled:
    rounds = sum(m.rounds for m in metrics)
    hits, misses = sum(m.hits for m in metrics), sum(m.misses for m in metrics)

    def mean(field: str) -> float:
        return sum(getattr(m, field) * m.rounds for m in metrics) / rounds

    return _Pooled(
        tokens=mean("mean_acceptance_length"),
        drafted=sum(m.drafted_tokens for m in metrics) / rounds,
        round=mean("verify_ms") + mean("draft_wait_ms") + mean("round_overhead_ms"),
        wait=mean("draft_wait_ms"),
        hit_rate=hits / max(1, hits + misses),
        on_hit=sum(m.mean_acceptance_length_on_hit * m.hits for m in metrics) / max(1, hits),
        on_miss=sum(m.mean_acceptance_length_on_miss * m.misses for m in metrics) / max(1, misses),
    )


def _verify_ms(case: Case, batch: int, rounds: _Pooled) -> float:
    """Stated, of the tokens that a round verified."""
    return 1e3 * case.times.verify.line.at(batch * (1 + rounds.drafted))


def _mode(case: Case, batch: int, mode: Mode, turns: Sequence[Turn]) -> ModeFigures:
    pooled = [_pooled([completion.metrics for completion in turn[mode]]) for turn in turns]
    rows = [
        (
            _speed(turn[mode]),
            rounds.round,
            rounds.wait,
            rounds.round - _verify_ms(case, batch, rounds) - rounds.wait,
            _speed(turn[mode]) / _predicted(case, batch, mode, rounds),
            rounds.tokens,
        )
        for turn, rounds in zip(turns, pooled, strict=True)
    ]
    return ModeFigures(*(statistics.median(column) for column in zip(*rows, strict=True)))


def _speed(completions: Sequence[Completion]) -> float:
    """Tokens per second of one sequence of a batch."""
    return statistics.fmean(completion.metrics.tokens_per_second for completion in completions)


def _predicted(case: Case, batch: int, mode: Mode, rounds: _Pooled) -> float:
    """Tokens per second that theory gives for stated times; of waiting for misses, which end when the draft has
    finished what it was at, the measured one."""
    verify = _verify_ms(case, batch, rounds)
    if mode == "ar":
        return 1e3 / verify
    if mode == "sd":
        draft = case.stated.lookahead * 1e3 * case.times.depth.line.at(batch)
        return 1e3 / verify * speedup_sd(rounds.tokens, draft / verify)
    backup = rounds.wait / verify / max(1e-9, 1 - rounds.hit_rate)
    return 1e3 / verify * speedup_ssd(rounds.hit_rate, rounds.on_hit, rounds.on_miss, 0.0, backup)


def simulated_gain(case: Case, batch: int, tokens: float, hit_rate: float) -> float:
    """`ssd` over `sd` in the simulator, with `tokens` a round of `sd`, such hits, and an engine that costs nothing."""
    rate = acceptance_for(tokens, case.stated.lookahead)
    exponent = 0.6  # of no account with one fan-out
    law = ((1 - hit_rate) * case.stated.fan_out**exponent, exponent)
    setup = Setup(
        Devices(case.times.verify.line, (Level(case.times.depth.line),)),
        Statistics.alike(AcceptanceLaw((rate,)), law),
        engine="anytime",
        lookahead=case.stated.lookahead,
        fan_out=(case.stated.fan_out,),
        batch=batch,
        backup="auto",
    )
    sd, ssd = (simulate(replace(setup, mode=mode)).tokens_per_second for mode in ("sd", "ssd"))
    return ssd / sd
