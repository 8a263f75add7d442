"""The inputs of the paper's tables: quoted, derived from quoted figures, or fitted to named cells.

`Inputs.notes` says which is which. A cell to which nothing was fitted is a prediction."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from scipy.optimize import least_squares

from ssd.speculation.fan_out import miss_law, optimal_fan_out
from ssd.speculation.theory import LinearCost
from tools.simulate import paper
from tools.simulate.closed_form import speed_sd, speed_ssd
from tools.simulate.setup import Devices, Setup
from tools.simulate.statistics import AcceptanceLaw, Statistics, mixed, solve_exponent

_K, _RERUN = paper.LOOKAHEAD, paper.RERUN
# Billions of parameters, from the model cards: arithmetic per token is in proportion.
_LLAMA_70B, _LLAMA_1B, _QWEN_32B, _QWEN_600M = 70.6, 1.24, 32.8, 0.6
_TARGET_DEVICES = 4  # tensor parallel; the draft has one of the same kind


class Note(NamedTuple):
    """An input: its value in words, and where it comes from."""

    name: str
    value: str
    source: str


@dataclass(frozen=True)
class Inputs:
    """The setups that the tables vary."""

    llama: Setup
    rerun: Setup
    qwen: Setup
    batch: Setup
    notes: tuple[Note, ...]

    def temperature(self, temperature: float) -> Setup:
        """Return the Llama setup at a temperature.

        Fitted: the acceptance to the `sd` column, c to the uniform hit rates. r is that of the table of misses; at T =
        0.3 it lies between its neighbours."""
        row = paper.TEMPERATURES[temperature]
        r = _miss_exponent(temperature)
        law = ((1 - row.hits_uniform) * paper.FAN_OUT**r, r)
        return fitted_to_sd(with_misses(self.llama, law), row.sd)


def _miss_exponent(temperature: float) -> float:
    known = sorted(paper.MISSES)
    below = max(t for t in known if t <= temperature)
    above = min(t for t in known if t >= temperature)
    share = (temperature - below) / (above - below) if above > below else 0.0
    low, high = (miss_law(paper.MISSES[t])[1] for t in (below, above))
    return low + share * (high - low)


def geometric(setup: Setup) -> Setup:
    """Return the setup with as many chains, spread by Theorem 12."""
    law = setup.statistics
    best = optimal_fan_out(law.plain.rate(setup.lookahead), law.misses[1], setup.lookahead, paper.BUDGET)
    return with_fan_out(setup, best)


def with_fan_out(setup: Setup, fan_out: tuple[int, ...]) -> Setup:
    return replace(setup, fan_out=fan_out, statistics=setup.statistics.foreseeing(fan_out, setup.lookahead))


def with_misses(setup: Setup, law: tuple[float, float]) -> Setup:
    return with_fan_out(replace(setup, statistics=replace(setup.statistics, misses=law)), setup.fan_out)


def fitted_to_sd(setup: Setup, tokens_per_second: float) -> Setup:
    """Return the setup with the acceptance at which `sd` is as fast as given."""
    one_token_rounds = speed_sd(replace(setup, statistics=Statistics.alike(AcceptanceLaw((0.0,)), (1.0, 0.0))))
    tokens = tokens_per_second / one_token_rounds
    return with_fan_out(replace(setup, statistics=setup.statistics.scaled(tokens, setup.lookahead)), setup.fan_out)


@cache
def inputs() -> Inputs:
    """Return everything that the tables are computed from."""
    statistics = _rerun_statistics()
    llama = _fitted_devices(Setup(_devices(7e-5, 2e-3, 1e-3), statistics))
    rerun = _rerun(statistics)
    qwen = _qwen(llama)
    # With the cheap backup and one sequence nothing waits: a miss costs the tokens that it would have had beyond 1.
    round_s = llama.devices.verify.at(_K + 1) + llama.devices.overhead
    lost = statistics.plain.tokens(_K) - paper.BATCH_CHEAP[1] * round_s
    misses = lost / (statistics.miss.tokens(_K) - 1)
    batch = with_misses(replace(llama, fan_out=(1,)), (misses, statistics.misses[1]))
    return Inputs(llama, rerun, qwen, batch, _notes(llama, rerun, qwen, batch))


def _rerun_statistics() -> Statistics:
    hit = AcceptanceLaw.from_shares(_RERUN.accepted)
    x = solve_exponent(lambda exponent: hit.power(exponent).tokens(_K), _RERUN.on_miss)
    miss, r = hit.power(x), _miss_exponent(0.0)
    plain = mixed(_RERUN.hits, hit, miss, _K)
    return Statistics(plain, hit, miss, ((1 - _RERUN.hits) * paper.FAN_OUT**r, r))


def _devices(each: float, step: float, overhead: float) -> Devices:
    """Return the times of the Llama pair.

    `ar` gives the verification of one token, `each` the time of a further one. A chain costs the draft what its
    arithmetic is to that of the target."""
    chain = each * _TARGET_DEVICES * _LLAMA_1B / _LLAMA_70B
    verify = LinearCost(1 / paper.LLAMA_AR - each, each)
    return Devices(verify, LinearCost(step - chain, chain), overhead=overhead, rebuild=1)


def _fitted_devices(setup: Setup) -> Setup:
    """Fit three unknowns to seven cells: the means of `sd` and `ssd`, and the `sd` row of the batch table."""

    def misfits(unknown: list[float]) -> list[float]:
        each, step, overhead = (value * 1e-3 for value in unknown)
        here = replace(setup, devices=_devices(each, step, overhead))
        pairs = [(speed_sd(here), paper.LLAMA_MEANS["sd"]), (speed_ssd(here), paper.LLAMA_MEANS["ssd"])]
        pairs += [(speed_sd(replace(here, batch=batch)), speed) for batch, speed in paper.BATCH_SD.items()]
        return [found / wanted - 1 for found, wanted in pairs]

    each, step, overhead = least_squares(misfits, [0.07, 2.0, 1.0], bounds=(0.001, 10.0)).x * 1e-3
    return replace(setup, devices=_devices(float(each), float(step), float(overhead)))


def _rerun(statistics: Statistics) -> Setup:
    """Return the setup of the re-run: a round takes (1 - p) K steps beyond verification and overhead."""
    rest = _RERUN.round_s - _RERUN.verify_s - _RERUN.overhead_s
    step = rest / ((1 - _RERUN.hits) * _K)
    return Setup(
        Devices(LinearCost(_RERUN.verify_s, 0.0), LinearCost(step, 0.0), overhead=_RERUN.overhead_s),
        statistics,
    )


def _qwen(llama: Setup) -> Setup:
    devices = llama.devices
    each = devices.verify.each * _QWEN_32B / _LLAMA_70B
    step = devices.step
    chain = step.each * _QWEN_600M / _LLAMA_1B
    devices = replace(
        devices,
        verify=LinearCost(1 / paper.QWEN_MEANS["ar"] - each, each),
        step=LinearCost(step.at(1) - chain, chain),
    )
    setup = replace(llama, devices=devices, lookahead=paper.QWEN_LOOKAHEAD, fan_out=(paper.QWEN_FAN_OUT,))
    return fitted_to_sd(setup, paper.QWEN_MEANS["sd"])


def _notes(llama: Setup, rerun: Setup, qwen: Setup, batch: Setup) -> tuple[Note, ...]:
    devices, law, k = llama.devices, llama.statistics, qwen.lookahead
    step = devices.step
    exponents = ", ".join(f"{_miss_exponent(t):.3f}" for t in paper.TEMPERATURES)
    return (
        Note("verify, 1 token", f"{devices.verify.at(1) * 1e3:.2f} ms", "quoted: 1 / 54.7"),
        Note("verify, each more", f"{devices.verify.each * 1e6:.1f} us", "fitted: Llama means, batch table row sd"),
        Note("draft step, 1 chain", f"{step.at(1) * 1e3:.3f} ms", "fitted: the same 7 cells"),
        Note("draft step, each more", f"{step.each * 1e6:.2f} us", "derived: verify's, by parameters and devices"),
        Note("overhead a round", f"{devices.overhead * 1e3:.2f} ms", "fitted: the same 7 cells"),
        Note("rebuild", "1 forward a tree", "the reference engine runs the winning chain again"),
        Note("K, F", f"{llama.lookahead}, {llama.fan_out[0]}", "quoted: re-run"),
        Note("accepted on a hit", f"{law.hit.tokens(_K):.2f} tokens", "quoted: re-run's histogram"),
        Note("accepted on a miss", f"{law.miss.tokens(_K):.2f} tokens", "quoted mean; shape of the hits"),
        Note("hit rate at F = 3", f"{_RERUN.hits}", "quoted: re-run"),
        Note("r of misses c F^-r", exponents, "table of misses, T 0, .3 (between), .7, 1"),
        Note("acceptance by T", "4 numbers", "fitted: temperature table, column sd"),
        Note("c by T", "4 numbers", "fitted: temperature table, uniform hit rates"),
        Note("hit rate at F = 1", f"{1 - batch.statistics.misses[0]:.3f}", "fitted: batch table, cheap, batch 1"),
        Note("acceptance by data set", "4 numbers", "fitted: the sd speeds of the data sets"),
        Note("Qwen K, F", f"{k}, {qwen.fan_out[0]}", "the authors' repository, reference_test_outputs.md"),
        Note("Qwen acceptance", f"{qwen.statistics.plain.tokens(k):.2f} tokens", "fitted: Qwen mean of sd"),
        Note("Qwen verify, 1 token", f"{qwen.devices.verify.at(1) * 1e3:.2f} ms", "quoted: 1 / 88.8"),
        Note("Qwen step, overhead, misses", "those of Llama", "assumed: the page has none"),
        Note("re-run's step", f"{rerun.devices.step.fixed * 1e3:.2f} ms", "derived: (19.4 - 15 - 2.9) / .84"),
    )
