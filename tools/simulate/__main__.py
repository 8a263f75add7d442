"""Simulate target and draft devices from acceptance statistics (docs/simulation.md).

\b
    python -m tools.simulate paper
    python -m tools.simulate run --mode ssd -k 7 --fan-out 3 --batch 4 --drafts 2 --network-delay 0.1ms
    python -m tools.simulate replay --budget 10 --budget 24 --temperature 0 --temperature 1
    python -m tools.simulate pearl
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial, wraps
from typing import Any

import click

from ssd.cli.option_types import FanOut, Real
from ssd.cli.outputs import console
from ssd.config.params import MAX_CHAINS, MAX_LOOKAHEAD
from ssd.errors import UsageError
from ssd.plugins.bench.emulation.quantities import Duration, Times, time_text
from ssd.speculation.fan_out import optimal_fan_out, single_chain
from ssd.speculation.theory import LinearCost
from tools.simulate import report, tables
from tools.simulate.calibration import inputs
from tools.simulate.paper import FITTED
from tools.simulate.run import ROUNDS, SEED, simulate
from tools.simulate.setup import BACKUPS, ENGINES, MAX_BATCH, MAX_DRAFTS, MODES, Devices, Setup
from tools.simulate.statistics import AcceptanceLaw, Statistics

# Llama-3.1-70B with Llama-3.2-1B, greedy: what `paper` fits, rounded.
_VERIFY, _STEP, _OVERHEAD = map(time_text, (FITTED.verify, FITTED.step, FITTED.overhead))
_ACCEPTANCE = ",".join(map(str, FITTED.acceptance))
_MISSES = ",".join(map(str, FITTED.misses))

_ROUNDS = click.option("--rounds", type=click.IntRange(64, 1_000_000), default=ROUNDS, show_default=True)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def rates(text: str) -> tuple[float, ...]:
    """Read numbers such as ".9,.8"."""
    return tuple(map(float, text.split(",")))


def law(text: str) -> tuple[float, float]:
    c, r = rates(text)
    return c, r


@click.group(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    pass


def _refused(command: Callable[..., None]) -> Callable[..., None]:
    """Turn a refused setup into a user's error: exit status 2."""

    @wraps(command)
    def call(**values: Any) -> None:
        try:
            command(**values)
        except UsageError as error:
            raise click.UsageError(str(error)) from None

    return call


@main.command()
@_ROUNDS
@_JSON
def paper(rounds: int, as_json: bool) -> None:
    """Print published tables from quoted and fitted inputs. Exit status 1 if a cell is out of bounds."""
    sources = inputs()
    cells, drafts = tables.cells(sources, rounds), tables.drafts(sources, rounds)
    if as_json:
        _print_json(
            inputs=[note._asdict() for note in sources.notes],
            cells=[asdict(cell) | {"deviation": cell.deviation} for cell in cells],
            drafts=[found._asdict() for found in drafts],
        )
    else:
        output = console()
        for table in (report.inputs_table(sources.notes), report.cells_table(cells), report.drafts_table(drafts)):
            output.print(table)
        for line in report.causes(cells):
            output.print(f"- {line}", soft_wrap=True, highlight=False)
    beyond = report.beyond(cells)
    click.echo(f"{len(cells) - len(beyond)} of {len(cells)} cells within bounds (means 5 %, others 10 %)", err=as_json)
    if beyond:
        sys.exit(1)


@main.command()
@click.option("--mode", type=click.Choice(MODES), default="ssd", show_default=True)
@click.option("--engine", type=click.Choice(ENGINES), default="anytime", show_default=True, help="Of mode ssd.")
@click.option(
    "-k", "--num-speculative-tokens", "lookahead", type=click.IntRange(1, MAX_LOOKAHEAD), default=7, show_default=True
)
@click.option("-f", "--fan-out", type=FanOut(), default="auto", show_default=True, help="auto: Theorem 12.")
@click.option("--budget", type=click.IntRange(2, 1024), help="Chains a sequence with fan-out auto.  [default: 3(K+1)]")
@click.option("--batch", type=click.IntRange(1, MAX_BATCH), default=1, show_default=True)
@click.option("--drafts", type=click.IntRange(1, MAX_DRAFTS), default=1, show_default=True, help="Draft devices.")
@click.option("--network-delay", "delay", type=Duration(), default="0", show_default=True, help="A message, one way.")
@click.option(
    "--verify", type=Times(), default=_VERIFY, show_default=True, help="Forward of the target, and each token."
)
@click.option("--step", type=Times(), default=_STEP, show_default=True, help="Forward of the draft, and each chain.")
@click.option("--overhead", type=Duration(), default=_OVERHEAD, show_default=True, help="A round's.")
@click.option("--rebuild", type=click.IntRange(0, 8), default=0, show_default=True, help="Reference: forwards a tree.")
@click.option("--backup", type=click.Choice(BACKUPS), help="On a miss.  [default: auto; reference: neural]")
@click.option("--acceptance", type=rates, default=_ACCEPTANCE, show_default=True, help="By position; last repeats.")
@click.option("--acceptance-on-miss", "on_miss", type=rates, help="[default: the same]")
@click.option("--acceptance-of-cheap", "cheap", type=rates, default="0", show_default=True, help="Cheap backup.")
@click.option("--misses", type=law, default=_MISSES, show_default=True, help="c,r of c F^-r.")
@_ROUNDS
@click.option("--seed", type=click.IntRange(min=0), default=SEED, show_default=True)
@_JSON
@_refused
def run(rounds: int, seed: int, as_json: bool, **values: Any) -> None:
    """Simulate one setup: speed, hit rate, tokens per round, idle shares. Defaults: the paper's Llama pair."""
    setup = _setup(**values)
    figures = simulate(setup, rounds, seed)
    if as_json:
        _print_json(setup=asdict(setup), figures=asdict(figures))
        return
    engine = f"{setup.engine}, " if setup.mode == "ssd" else ""
    fan_out = ",".join(map(str, setup.fan_out))
    console().print(report.figures_table(f"{setup.mode} ({engine}K {setup.lookahead}, F {fan_out})", figures))


def _setup(
    *,
    mode: str,
    engine: str,
    lookahead: int,
    fan_out: tuple[int, ...],
    budget: int | None,
    batch: int,
    drafts: int,
    delay: float,
    verify: LinearCost,
    step: LinearCost,
    overhead: float,
    rebuild: int,
    backup: str | None,
    acceptance: tuple[float, ...],
    on_miss: tuple[float, ...] | None,
    cheap: tuple[float, ...],
    misses: tuple[float, float],
) -> Setup:
    plain = AcceptanceLaw(acceptance)
    if fan_out == "pearl":
        fan_out = single_chain(lookahead)
    elif isinstance(fan_out, str) or not fan_out:
        try:
            fan_out = optimal_fan_out(plain.rate(lookahead), misses[1], lookahead, budget or 3 * (lookahead + 1))
        except ValueError as error:
            raise UsageError(str(error)) from None
    backup = backup or ("auto" if engine == "anytime" else "neural")
    devices = Devices(verify, step, drafts, overhead, delay, rebuild)
    statistics = Statistics(plain, plain, AcceptanceLaw(on_miss or acceptance), misses, AcceptanceLaw(cheap))
    setup = Setup(devices, statistics, mode, engine, lookahead, fan_out, batch, backup)
    return replace(setup, statistics=statistics.foreseeing(setup.fan_out, lookahead))


@main.command()
@_JSON
def pearl(as_json: bool) -> None:
    """Tell where a tree of chains beats the one chain of PEARL, and where neither beats sd. Takes minutes."""
    from tools.simulate.pearl import compare

    found = list(compare())
    if as_json:
        _print_json(rivals=[one._asdict() for one in found])
    else:
        for acceptance in dict.fromkeys(one.acceptance for one in found):
            console().print(report.pearl_table(acceptance, [one for one in found if one.acceptance == acceptance]))


@main.command()
@click.option("--dataset", "datasets", multiple=True, default=("builtin",), show_default=True, help="As for ssd bench.")
@click.option("--prompts", type=click.IntRange(1), default=8, show_default=True, help="Of each data set.")
@click.option("--tokens", type=click.IntRange(8), default=128, show_default=True, help="Longest answer.")
@click.option("-k", "--num-speculative-tokens", "lookahead", type=click.IntRange(1, MAX_LOOKAHEAD), default=4)
@click.option("--budget", "budgets", type=click.IntRange(2, MAX_CHAINS), multiple=True, default=(10, 24))
@click.option("--temperature", "temperatures", type=Real(0, 100), multiple=True, default=(0.0, 1.0))
@_JSON
@_refused
def replay(
    datasets: tuple[str, ...],
    prompts: int,
    tokens: int,
    lookahead: int,
    budgets: tuple[int, ...],
    temperatures: tuple[float, ...],
    as_json: bool,
) -> None:
    """Replay recorded answers to the built-in draft: hit rates by Theorem 12 and by joint allocation."""
    from tools.simulate.replay import record, replayed

    found = replayed(partial(record, datasets, prompts, tokens), temperatures, budgets, lookahead)
    if as_json:
        _print_json(replays=[one._asdict() for one in found])
    else:
        console().print(report.replay_table(found))


def _print_json(**parts: Any) -> None:
    click.echo(json.dumps(parts, indent=1))


if __name__ == "__main__":
    main()
