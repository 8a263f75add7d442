"""The paper's tables, cell by cell: what was published, what the simulation gives, what the cell was used for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from tools.simulate import paper
from tools.simulate.calibration import Inputs, fitted_to_sd, geometric, with_fan_out
from tools.simulate.run import ROUNDS, simulate
from tools.simulate.setup import Setup

MEANS, CELLS = 0.05, 0.10  # how far a cell may be off
_MANY = 16


@dataclass(frozen=True)
class Cell:
    """A cell. `use`: `input` (quoted), `fitted` (an input was fitted to it), or `predicted`."""

    table: str
    row: str
    column: str
    published: float
    simulated: float
    use: str
    bound: float = CELLS

    @property
    def deviation(self) -> float:
        return self.simulated / self.published - 1


class Drafts(NamedTuple):
    """The speed with several draft devices: a prediction, for which the paper has no cells.

    tok/s of one sequence at batch 1 and 16: the reference engine with both backups, and this engine."""

    drafts: int
    fan_out: int
    hit_rate: float
    alone: float
    neural: float
    cheap: float
    anytime: float


def cells(inputs: Inputs, rounds: int = ROUNDS) -> list[Cell]:
    """Return all tables."""
    parts = (_means, _datasets, _rerun, _temperatures, _batches)
    return [cell for part in parts for cell in part(inputs, rounds)]


def _means(inputs: Inputs, rounds: int) -> Iterator[Cell]:
    for name, setup, published, ssd in (
        ("Llama", inputs.llama, paper.LLAMA_MEANS, "fitted"),
        ("Qwen", inputs.qwen, paper.QWEN_MEANS, "predicted"),
    ):
        for mode, use in (("ar", "input"), ("sd", "fitted"), ("ssd", ssd)):
            speed = _speed(replace(setup, mode=mode), rounds)
            yield Cell("means", name, mode, published[mode], speed, use, MEANS)


def _datasets(inputs: Inputs, rounds: int) -> Iterator[Cell]:
    for name in paper.DATASETS:
        setup = fitted_to_sd(inputs.llama, paper.LLAMA_SD[name])
        for mode, published, use in (("sd", paper.LLAMA_SD, "fitted"), ("ssd", paper.LLAMA_SSD, "predicted")):
            yield Cell("data sets", name, mode, published[name], _speed(replace(setup, mode=mode), rounds), use)


def _rerun(inputs: Inputs, rounds: int) -> Iterator[Cell]:
    published = {"ar": paper.RERUN.ar, "sd": paper.RERUN.sd, "ssd": paper.RERUN.ssd}
    for mode, speed in published.items():
        use = "input" if mode == "ar" else "predicted"
        yield Cell("re-run", "Llama", mode, speed, _speed(replace(inputs.rerun, mode=mode), rounds), use)


def _temperatures(inputs: Inputs, rounds: int) -> Iterator[Cell]:
    for temperature, row in paper.TEMPERATURES.items():
        setup, name = inputs.temperature(temperature), f"T {temperature:g}"
        uniform, spread = simulate(setup, rounds), simulate(geometric(setup), rounds)
        plain = _speed(replace(setup, mode="sd"), rounds)
        yield Cell("temperature", name, "sd", row.sd, plain, "fitted")
        yield Cell("temperature", name, "ssd uniform", row.uniform, uniform.tokens_per_second, "predicted")
        yield Cell("temperature", name, "ssd geometric", row.geometric, spread.tokens_per_second, "predicted")
        yield Cell("temperature", name, "hits uniform", row.hits_uniform, uniform.hit_rate, "fitted")
        yield Cell("temperature", name, "hits geometric", row.hits_geometric, spread.hit_rate, "predicted")


def _batches(inputs: Inputs, rounds: int) -> Iterator[Cell]:
    for batch in paper.BATCHES:
        setup = replace(inputs.batch, batch=batch)
        cheap = _speed(replace(setup, backup="cheap"), rounds)
        neural = _speed(setup, rounds)
        # Without foresight the hit rate is of no account: the law of the means.
        plain = _speed(replace(inputs.llama, mode="sd", batch=batch), rounds)
        name = f"batch {batch}"
        yield Cell("batch", name, "cheap", paper.BATCH_CHEAP[batch], cheap, "fitted" if batch == 1 else "predicted")
        yield Cell("batch", name, "neural", paper.BATCH_NEURAL[batch], neural, "predicted")
        yield Cell("batch", name, "sd", paper.BATCH_SD[batch], plain, "fitted")


def drafts(inputs: Inputs, rounds: int = ROUNDS) -> list[Drafts]:
    """Return the speeds of 1 to 8 draft devices, each with as many chains as one has now: F = 3 n."""
    found = []
    for count in range(1, 9):
        setup = replace(inputs.llama, devices=replace(inputs.llama.devices, drafts=count))
        setup = with_fan_out(setup, (paper.FAN_OUT * count,))
        many = replace(setup, batch=_MANY)
        anytime = replace(many, engine="anytime", backup="auto")
        found.append(
            Drafts(
                count,
                paper.FAN_OUT * count,
                simulate(setup, rounds).hit_rate,
                _speed(setup, rounds),
                _speed(many, rounds),
                _speed(replace(many, backup="cheap"), rounds),
                _speed(anytime, rounds),
            )
        )
    return found


def _speed(setup: Setup, rounds: int) -> float:
    return simulate(setup, rounds).tokens_per_second
