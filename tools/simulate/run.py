"""Runs one simulation: from a setup to its figures."""

from __future__ import annotations

from dataclasses import dataclass

import simpy

from tools.simulate.anytime import Anytime
from tools.simulate.devices import DraftDevices, Meter
from tools.simulate.reference import PingPong, plain
from tools.simulate.setup import Setup
from tools.simulate.statistics import Draws, Source

ROUNDS, SEED = 1024, 20260303
_WARM_UP = 16  # rounds; the first ones begin without a speculation


@dataclass(frozen=True)
class Figures:
    """What a run measured. Speeds are tokens per second, of one sequence and of the batch.

    `hit_rate` is over rows and rounds, without outcomes that came too early for their chain (`late`). Idle shares are
    of time; the draft's is the mean of its devices."""

    tokens_per_second: float
    throughput: float
    tokens_per_round: float
    tokens_on_hit: float
    tokens_on_miss: float
    hit_rate: float
    late_rate: float
    round_s: float
    target_idle: float
    draft_idle: float


def simulate(setup: Setup, rounds: int = ROUNDS, seed: int = SEED) -> Figures:
    """Return the figures of `rounds` rounds of `setup`; a seed always gives the same."""
    env = simpy.Environment()
    devices = setup.devices
    draft = DraftDevices(env, devices.step, devices.drafts)
    meter = Meter(env, _WARM_UP, _WARM_UP + rounds, draft)
    draws = Draws(seed, setup.batch, rounds)
    if setup.mode == "ar":
        plain(env, setup, meter)
    else:
        engine = Anytime if setup.mode == "ssd" and setup.engine == "anytime" else PingPong
        engine(env, setup, draft, draws, meter)
    env.run(until=meter.done)
    return _figures(meter, setup, rounds)


def _figures(meter: Meter, setup: Setup, rounds: int) -> Figures:
    total, rows = meter.tokens.total(), meter.rows.total()
    missed = (Source.MISS, Source.CHEAP)
    misses = sum(meter.rows[source] for source in missed)
    hits = meter.rows[Source.HIT]
    return Figures(
        tokens_per_second=total / meter.seconds / setup.batch,
        throughput=total / meter.seconds,
        tokens_per_round=total / rows,
        tokens_on_hit=meter.tokens[Source.HIT] / hits if hits else 0.0,
        tokens_on_miss=sum(meter.tokens[source] for source in missed) / misses if misses else 0.0,
        hit_rate=hits / rows,
        late_rate=meter.late / rows,
        round_s=meter.seconds / rounds,
        target_idle=1 - meter.target_busy / meter.seconds,
        draft_idle=1 - meter.draft_busy / meter.seconds / setup.devices.drafts,
    )
