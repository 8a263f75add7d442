"""Compares PEARL's single chain with a tree of chains: by batch, acceptance, and verification over draft step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from ssd.speculation.fan_out import optimal_fan_out, single_chain
from ssd.speculation.theory import LinearCost
from tools.simulate.closed_form import speed_sd
from tools.simulate.paper import FITTED
from tools.simulate.run import simulate
from tools.simulate.setup import Devices, Setup
from tools.simulate.statistics import AcceptanceLaw, Statistics

ACCEPTANCES, BATCHES, RATIOS = (0.6, 0.75, 0.9), (1, 4, 8, 16, 32, 64), (2, 4, 8, 16)
_LOOKAHEADS, _CHAINS = (1, 2, 3, 4, 5, 6, 7, 8, 11, 15), 24
_BACKUPS = (("reference", "neural"), ("reference", "cheap"), ("anytime", "auto"), ("anytime", "cheap"))
_ROW_ROUNDS = 2048  # rows times rounds of a simulation


class Rivals(NamedTuple):
    """The best speeds, over plain decoding; `ratio` is the verification of one token over a draft step.

    `tree` has a chain for each accepted length or more, `pearl` one chain. Both take the best K, engine and backup;
    those of the tree are in `how`."""

    acceptance: float
    batch: int
    ratio: float
    sd: float
    pearl: float
    tree: float
    how: str


def compare() -> Iterator[Rivals]:
    """Compare at every acceptance, batch and ratio."""
    for acceptance in ACCEPTANCES:
        for batch in BATCHES:
            for ratio in RATIOS:
                yield compared(acceptance, batch, ratio)


def compared(acceptance: float, batch: int, ratio: float) -> Rivals:
    """Compare on the target of the paper's Llama pair.

    A slower draft has more arithmetic a chain, in proportion. The first candidate misses as often as a draft token."""
    verify, step = FITTED.verify, FITTED.step
    slower = verify.at(1) / ratio / step.at(1)
    step = LinearCost(slower * step.fixed, slower * step.each)
    devices = Devices(verify, step, overhead=FITTED.overhead, rebuild=1)
    statistics = Statistics.alike(AcceptanceLaw((acceptance,)), (1 - acceptance, FITTED.misses[1]))
    setups = [Setup(devices, statistics, lookahead=k, batch=batch) for k in _LOOKAHEADS]
    alone = 1 / verify.at(batch)
    sd = max(speed_sd(setup) for setup in setups)
    pearl, _ = max(_best(replace(setup, fan_out=single_chain(setup.lookahead))) for setup in setups)
    tree, how = max(_best(replace(setup, fan_out=fan_out)) for setup in setups for fan_out in _fan_outs(setup))
    return Rivals(acceptance, batch, ratio, sd / alone, pearl / alone, tree / alone, how)


def _fan_outs(setup: Setup) -> list[tuple[int, ...]]:
    """Return Theorem 12's fan-outs with one chain for each length, and with as many chains as the paper has."""
    k, law = setup.lookahead, setup.statistics
    return [optimal_fan_out(law.plain.rate(k), law.misses[1], k, chains) for chains in (k + 1, _CHAINS)]


def _best(setup: Setup) -> tuple[float, str]:
    """Return the best speed over engines and backups, and how it was reached."""
    rounds = max(64, _ROW_ROUNDS // setup.batch)
    found = []
    for engine, backup in _BACKUPS:
        speed = simulate(replace(setup, engine=engine, backup=backup), rounds).tokens_per_second
        found.append((speed, f"K {setup.lookahead}, {sum(setup.fan_out)} chains, {engine}, {backup}"))
    return max(found)
