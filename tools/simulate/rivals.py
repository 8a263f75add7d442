"""Published tables of other engines: nano-PEARL on H200, and AMD's re-run of SSD on MI300X.

Their cells stand beside the paper's (`python -m tools.simulate paper`). `notes` says which inputs are quoted, derived
or fitted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from ssd.speculation.fan_out import single_chain
from ssd.speculation.theory import LinearCost
from tools.simulate.calibration import Inputs, Note
from tools.simulate.cascade import Level
from tools.simulate.run import ROUNDS, Figures, simulate
from tools.simulate.setup import Devices, Setup
from tools.simulate.statistics import AcceptanceLaw, Statistics
from tools.simulate.tables import Cell


class Published(NamedTuple):
    """A data set of nano-PEARL: tokens from one rejection to the next at batch 1, and tok/s of the batch, by batch."""

    run: float
    ar: tuple[float, ...]
    pearl: tuple[float, ...]


# github.com/smart-lty/nano-PEARL, docs/bench_summary.md and benchmark.html at commit 27015b76, columns MAT and
# Throughput: Qwen3-32B on two H200 with Qwen3-0.6B on a third, greedy, bf16. Plain decoding runs 200 tokens a question,
# PEARL 100 rounds (benchmark/eval_benchmark.py).
BATCHES = (1, 8, 16, 32)
NANO_PEARL = {
    "GSM8K": Published(6.944, (78.70, 566.44, 1047.17, 1916.19), (212.87, 1391.86, 2485.42, 3845.78)),
    "HumanEval": Published(4.417, (78.64, 613.32, 1165.10, 2194.92), (171.26, 1257.69, 2305.89, 3833.23)),
    "AIME": Published(6.397, (78.61, 607.31, 1143.09, 2202.87), (204.39, 1465.95, 2679.96, 4470.34)),
    "CNNDM": Published(3.182, (77.77, 528.56, 895.14, 1381.49), (134.46, 777.94, 1144.58, 1660.51)),
}
_K = 5  # PEARL drafts and verifies 6 tokens a round; the first of them is this simulation's bonus token
_CHAIN = 2 * 0.6 / 32.8  # arithmetic of a draft token over that of a target token on each of its two devices

# rocm.blogs.amd.com/artificial-intelligence/ssd_mi300x, 29 May 2026: Llama-3.1-70B on four MI300X, 1B on a fifth. We
# could not read its table: the speed and its ratios are from a summary of the page, the ranges from a report of it.
MI300X_SSD, _OVER_AR, _OVER_SD = 225.86, 4.32, 1.64
MI300X_RANGES = {"ssd / sd": (1.64, 1.72), "ssd / ar": (4.3, 5.0)}


def cells(inputs: Inputs, rounds: int = ROUNDS) -> list[Cell]:
    """Return the cells of both tables."""
    return [*_nano_pearl(rounds), *_mi300x(inputs, rounds)]


def _nano_pearl(rounds: int) -> Iterator[Cell]:
    for name, published in NANO_PEARL.items():
        for index, batch in enumerate(BATCHES):
            speed = _simulated(name, index, _overhead(), rounds).throughput
            use = "predicted" if (name, batch) != ("GSM8K", 1) else "fitted"
            yield Cell("nano-PEARL", f"{name}, batch {batch}", "pearl", published.pearl[index], speed, use)


def _simulated(name: str, index: int, overhead: float, rounds: int = ROUNDS) -> Figures:
    """Simulate longer than other cells: a round depends on the one before, so means settle late."""
    return simulate(_pearl(name, index, overhead), max(64, 8 * rounds // BATCHES[index]))


def _pearl(name: str, index: int, overhead: float) -> Setup:
    """Return PEARL on a data set at the batch with this index.

    The data set whose plain decoding is quickest tells the target's times. What another one takes beyond it is prefill,
    which weighs twice in a round: there are half as many rounds as tokens."""
    quickest = [_seconds(index) for index in range(len(BATCHES))]
    each = (quickest[-1] - quickest[0]) / (BATCHES[-1] - BATCHES[0])
    step, chain = quickest[0] / (_K + 1), each * _CHAIN
    prefill = 2 * (BATCHES[index] / NANO_PEARL[name].ar[index] - quickest[index])
    devices = Devices(
        LinearCost(quickest[0] - each, each), (Level(LinearCost(step - chain, chain)),), overhead=overhead + prefill
    )
    accepted = 1 - 1 / NANO_PEARL[name].run
    statistics = Statistics.alike(AcceptanceLaw((accepted,)), (1 - accepted, 0.0))
    return Setup(devices, statistics, "ssd", "anytime", _K, single_chain(_K), BATCHES[index], "cheap")


def _seconds(index: int) -> float:
    return BATCHES[index] / max(published.ar[index] for published in NANO_PEARL.values())


@cache
def _overhead() -> float:
    """Return the seconds of a round beyond its verification, fitted to GSM8K at batch 1."""
    found = _simulated("GSM8K", 0, 0.0)
    return found.tokens_per_round / NANO_PEARL["GSM8K"].pearl[0] - found.round_s


def _mi300x(inputs: Inputs, rounds: int) -> Iterator[Cell]:
    quoted, fitted = _llama_on_mi300x(inputs)
    speeds = {mode: simulate(replace(quoted, mode=mode), rounds).tokens_per_second for mode in ("ar", "sd", "ssd")}
    for column, (least, most) in MI300X_RANGES.items():
        ratio = speeds["ssd"] / speeds[column[-2:]]
        yield Cell("MI300X", "H100's step", column, least, ratio, "predicted", most=most)
    for mode, over, use in (("ar", _OVER_AR, "input"), ("sd", _OVER_SD, "fitted"), ("ssd", 1.0, "predicted")):
        speed = simulate(replace(fitted, mode=mode), rounds).tokens_per_second
        yield Cell("MI300X", "fitted step", mode, MI300X_SSD / over, speed, use)


def _llama_on_mi300x(inputs: Inputs) -> tuple[Setup, Setup]:
    """Return the paper's Llama pair with AMD's `ar`; then also with the draft step that gives AMD's `sd`."""
    llama = inputs.llama
    devices, k = llama.devices, llama.lookahead
    verify = LinearCost(_OVER_AR / MI300X_SSD - devices.verify.each, devices.verify.each)
    quoted = replace(llama, devices=replace(devices, verify=verify))
    round_s = verify.at(k + 1) + devices.overhead
    step = (llama.statistics.plain.tokens(k) * _OVER_SD / MI300X_SSD - round_s) / k
    chain = devices.levels[0].step.each
    levels = (Level(LinearCost(step - chain, chain)),)
    return quoted, replace(quoted, devices=replace(quoted.devices, levels=levels))


def notes(inputs: Inputs) -> tuple[Note, ...]:
    """Return the inputs of both tables."""
    pearl, amd = _pearl("GSM8K", 0, _overhead()).devices, _llama_on_mi300x(inputs)[1].devices
    return (
        Note("PEARL verify, 1 token", f"{pearl.verify.at(1) * 1e3:.2f} ms", "quoted: ar at batch 1"),
        Note("PEARL verify, each more", f"{pearl.verify.each * 1e6:.1f} us", "derived: ar at batch 1 and 32"),
        Note("PEARL acceptance", "4 numbers", "quoted: MAT at batch 1 is 1 / (1 - a)"),
        Note("PEARL miss of 1 candidate", "1 - a", "assumed: the bonus token is as hard as the others"),
        Note("PEARL prefill", "16 numbers", "derived: ar beyond the quickest data set's"),
        Note("PEARL K", f"{_K}", "fitted: 2.9 tokens a round, GSM8K, batch 1"),
        Note("PEARL step", f"{pearl.levels[0].step.at(1) * 1e3:.2f} ms", "assumed: K + 1 steps fill a verification"),
        Note("PEARL overhead a round", f"{_overhead() * 1e3:.2f} ms", "fitted: GSM8K, batch 1"),
        Note("MI300X verify, 1 token", f"{amd.verify.at(1) * 1e3:.2f} ms", "quoted: 4.32 / 225.86"),
        Note("MI300X step", f"{amd.levels[0].step.at(1) * 1e3:.2f} ms", "fitted: sd, 225.86 / 1.64 (second row only)"),
        Note("MI300X K, F, acceptance, rest", "those of Llama", "assumed: the same pair and engine"),
    )
