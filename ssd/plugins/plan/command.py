"""`ssd plan`: a pair's measurements on this machine, the speed that follows, and the engine's choice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import click
from msgspec.structs import replace

from ssd.cli.option_types import Real
from ssd.cli.options import engine_options
from ssd.cli.outputs import console, grid
from ssd.config.engine import EngineConfig
from ssd.config.params import AUTO_LOOKAHEAD, DRAFTED
from ssd.errors import UsageError
from ssd.kernels import build
from ssd.launch.options import EngineOptions
from ssd.tuning import knowledge
from ssd.tuning.costs import SITUATIONS
from ssd.tuning.estimates import Measurements, kind_of
from ssd.tuning.knowledge import PRIOR_FILE, Knowledge
from ssd.tuning.plan import Choices
from ssd.tuning.predictor import predicted_sd, ranked_plans, work_ahead
from ssd.tuning.tuner import Tuning

_MEASURING_S = 10.0  # longest wait for the measurements of an engine that is ready
# Engine options that name the pair, and where and how it computes.
_PLACED = (
    *("target", "draft", "revision", "draft_revision"),
    *("dtype", "draft_dtype", "quantize", "draft_weights", "activations"),
    *("device", "draft_device", "target_cpus", "draft_cpus", "tensor_parallel_size"),
    *("deterministic", "attention", "kv_cache_dtype", "enforce_eager"),
)
_COLUMNS = (
    *("K", "accepted", "tokens\na round"),
    *("in turn:\nverify ms", "draft ms", "ar, sd\ntok/s"),
    *("at once:\nverify ms", "step ms", "chains", "hit rate", "ssd\ntok/s"),
)


@click.command()
@click.option("--temperature", type=Real(0, 100), default=0.0, show_default=True, help="Of the requests.")
@click.option("--batch", type=click.IntRange(1, 256), default=1, show_default=True, help="Requests at the same time.")
@engine_options(without=set(EngineOptions.__struct_fields__) - set(_PLACED))
def plan(engine: EngineOptions, temperature: float, batch: int) -> None:
    """Print what this machine has measured of a pair, the speed of ar, sd and ssd by K, and what --mode auto does.

    A pair that was never started here is started once, to measure it."""
    from ssd.launch.resolve import resolve

    config = resolve(engine)
    if config.draft is None:
        raise UsageError(f"there is no draft for {config.target_name}: give --draft")
    known = measured(config) or _started(config)
    prior, kind = knowledge.read(Path(config.draft) / PRIOR_FILE, Knowledge) or Knowledge(), kind_of(temperature)
    tuning = Tuning()
    tuning.recall(known, prior)
    tuning.situate([kind] * batch, DRAFTED)
    figures = tuning.estimates.measurements(kind, True)
    assert figures is not None  # all forwards are measured
    tuning.estimates.ends = not config.inline_draft  # as in an engine whose draft is on its machine
    choice = tuning.described(config.speculation, config.core_counts("target") if config.elastic_cores else None)
    title = f"{config.target_name} and {config.draft_name} on this machine, temperature {temperature:g}, batch {batch}"
    output = console()
    output.print(grid(title, _COLUMNS, _rows(figures, batch, Choices.of(config.speculation).chains), left=0))
    for line in (*_origins(config, known, prior, kind), f"--mode auto takes {choice}."):
        output.print(f"- {line}", soft_wrap=True, highlight=False)


def measured(config: EngineConfig, rough: bool = False) -> Knowledge | None:
    """Return what engines have stored of a pair placed like this; None until all forwards are measured.

    `rough`: for want of others, take times that other programs disturbed."""
    known = knowledge.read(_file(config), Knowledge) or Knowledge()
    for tables in (known.tables, known.rough)[: 1 + rough]:
        if all(tables.get(situation) for situation in SITUATIONS):
            return replace(known, tables=tables)
    return None


def _file(config: EngineConfig) -> Path:
    return knowledge.file_of(config, str(build.library()))


def _started(config: EngineConfig) -> Knowledge:
    """Start the pair once, and return what it has measured. Raises UsageError if that is nothing."""
    from ssd.cli.session import loading, process_setup
    from ssd.llm import running

    click.echo(f"starting {config.target_name} and {config.draft_name} once, to measure them", err=True)
    with process_setup(), running(config, loading):
        deadline = time.monotonic() + _MEASURING_S
        while (known := measured(config, rough=True)) is None and time.monotonic() < deadline:
            time.sleep(0.1)
    if known is None:
        raise UsageError(f"{_file(config)} has no times of {config.target_name} and {config.draft_name}: try again")
    return known


def _rows(figures: Measurements, batch: int, budget: int) -> Iterator[list[str]]:
    """Yield the cells of each K: the times of its forwards in milliseconds, and predicted tokens/s."""
    alone_s = figures.alone_s(batch)
    yield ["0", "", "1.00", f"{1e3 * alone_s:.2f}", "", f"{batch / alone_s:.1f}", *[""] * 5]
    step_s = (figures.step_alone or figures.step).at(batch)
    for lookahead in range(1, AUTO_LOOKAHEAD + 1):
        tokens = batch * (1 + lookahead)
        ssd = ranked_plans(figures, batch, Choices(("ssd",), (lookahead,), (), budget))[0]
        yield [
            str(lookahead),
            f"{figures.acceptance[min(lookahead, len(figures.acceptance)) - 1]:.2f}",
            f"{figures.tokens(lookahead):.2f}",
            f"{1e3 * figures.alone_s(tokens):.2f}",
            f"{1e3 * lookahead * step_s:.2f}",
            f"{predicted_sd(figures, batch, lookahead):.1f}",
            f"{1e3 * figures.round_s(tokens):.2f}",
            f"{1e3 * figures.step.at(batch * sum(ssd.fan_out)):.2f}",
            str(sum(ssd.fan_out)),
            f"{work_ahead(figures, batch, lookahead, ssd.fan_out).hits:.2f}",
            f"{ssd.speed:.1f}",
        ]


def _origins(config: EngineConfig, known: Knowledge, prior: Knowledge, kind: int) -> Iterator[str]:
    """Yield sentences about figures that were not measured here, and about the times.

    A draft's prior is stored with what is learned: acceptance equal to the prior was not learned."""
    learned, given = known.law(kind), prior.law(kind)
    rates = [rate for rate, _ in given.acceptance]
    if given.sampled and (not learned.sampled or [rate for rate, _ in learned.acceptance[: len(rates)]] == rates):
        yield f"Acceptance and hit rates are not measured here: they are those of the draft's {PRIOR_FILE}."
    elif not learned.sampled:
        yield "Acceptance and hit rates are guesses: run ssd bench latency, which lets the engine measure them."
    if config.inline_draft:
        yield "sd drafts in the target's process, timed at each start: the sd shown is that of the draft on the host."
    if known.tables == known.rough:
        yield "Other programs disturbed the measuring: the times are rough. Try again on a quieter machine."
    else:
        yield f"Times were measured when this pair started here; delete {_file(config)} to measure again."
