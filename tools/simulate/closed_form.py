"""What theory says of a setup: to fit its inputs, and to check the simulation."""

from __future__ import annotations

from ssd.speculation.theory import speedup_sd
from tools.simulate.setup import Setup
from tools.simulate.statistics import Source


def speed_sd(setup: Setup) -> float:
    """Return tokens per second of one sequence in mode `sd`: E / (1 + T), T in units of the target's round."""
    round_s, k = _round_s(setup), setup.lookahead
    draft = k * setup.devices.step.at(_share(setup, setup.batch))
    return speedup_sd(setup.statistics.plain.tokens(k), draft / round_s) / round_s


def speed_ssd(setup: Setup) -> float:
    """Return tokens per second of the reference engine in mode `ssd`: Theorem 7 with Corollary 16.

    It takes one fan-out F for all lengths, a backup for one row, and no delay."""
    round_s, k = _round_s(setup), setup.lookahead
    devices, statistics = setup.devices, setup.statistics
    (fan_out,) = setup.fan_out
    hits = statistics.hit_chance(0, k, setup.fan_out)
    cheap = setup.backup == "cheap"
    rebuild = devices.rebuild * devices.step.at(_share(setup, setup.batch * (k + 1)))
    fill = rebuild + k * devices.step.at(_share(setup, setup.batch * (k + 1) * fan_out))
    backup = 0.0 if cheap else k * devices.step.at(1)
    on_miss = statistics.law(Source.CHEAP if cheap else Source.MISS).tokens(k)
    speedup = speedup_of_batch(hits, statistics.hit.tokens(k), on_miss, fill / round_s, backup / round_s, setup.batch)
    return speedup / round_s


def speedup_of_batch(
    hit_rate: float, tokens_hit: float, tokens_miss: float, fill: float, backup: float, batch: int
) -> float:
    """Return `speedup_ssd` if one missed row of `batch` makes all rows wait for its backup (Corollary 16)."""
    all_hit, tokens = hit_rate**batch, hit_rate * tokens_hit + (1 - hit_rate) * tokens_miss
    return tokens / (all_hit * max(1.0, fill) + (1 - all_hit) * (1 + backup))


def _round_s(setup: Setup) -> float:
    """Return the seconds of a padded verification and the target's overhead."""
    return setup.devices.verify.at(setup.batch * (setup.lookahead + 1)) + setup.devices.overhead


def _share(setup: Setup, chains: int) -> int:
    """Return the chains on the device that has the most."""
    return -(-chains // setup.devices.drafts)
