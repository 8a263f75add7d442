"""`ssd plan`: what a pair would do at every K, budget and batch, and when a device for the draft pays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ssd import profile as profiles
from ssd.cli import plan_plot, plan_report, plots
from ssd.cli.quantities import Duration, Rates, Real, Times, Wholes
from ssd.errors import UsageError
from ssd.params import MAX_CHAINS, MAX_LOOKAHEAD
from ssd.profile import FIGURES, PAPER, Misses, Profile
from ssd.speculation.break_even import MAX_BATCH, break_even, paying_batches
from ssd.speculation.planning import Grid, forecast


@click.command()
@click.option("--profile", "file", type=click.Path(path_type=Path), help="JSON of measured figures (docs/planning.md).")
@click.option("--verify", type=Times(), help="Forward of the target, and each token: 18.2ms+64us.")
@click.option("--step", type=Times(), help="Forward of the draft, and each chain.")
@click.option("--overhead", "overhead_s", type=Duration(), help="What a round with a draft takes beside its forwards.")
@click.option("--acceptance", type=Rates(most=1), help="Rate of each draft token, or rates by position; last repeats.")
@click.option("--misses", type=Rates(2), help="c,r: misses are c F^-r for fan-out F.")
@click.option("--target-gpus", type=Real(min=0, min_open=True), help="Devices of the target.")
@click.option("--draft-gpus", type=Real(min=0), help="Devices of the draft; 0: none that count.")
@click.option(
    "-k",
    "--num-speculative-tokens",
    "lookaheads",
    type=Wholes(1, MAX_LOOKAHEAD),
    default="1-8",
    show_default=True,
    help="K.",
)
@click.option(
    "--budget",
    "budgets",
    type=Wholes(2, MAX_CHAINS),
    default="8,16,24,32",
    show_default=True,
    help="B: chains a sequence.",
)
@click.option(
    "--batch",
    "batches",
    type=Wholes(1, MAX_BATCH),
    default="1,2,4,8,16,32",
    show_default=True,
    help="Sequences at once.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw tok/s over the batch: FILE.png, .svg or .pdf.")
def plan(
    file: Path | None,
    lookaheads: tuple[int, ...],
    budgets: tuple[int, ...],
    batches: tuple[int, ...],
    as_json: bool,
    plot: Path | None,
    **figures: Any,
) -> None:
    """Predict tok/s of ar, sd and ssd over K, budget and batch, the best settings, and when a draft device pays.

    Figures come from a profile and from options, which win; what neither says is that of the paper's Llama pair
    (Llama-3.1-70B on 4 H100 with Llama-3.2-1B on a fifth). Nothing is loaded or run."""
    grid = Grid(lookaheads, budgets)
    try:
        grid.check()
    except ValueError as error:
        raise UsageError(f"--budget, -k: {error}") from None
    if plot is not None:
        plots.check(plot)
    profile, sources = _profile(file, {name: value for name, value in figures.items() if value is not None})
    pair = profile.pair()
    forecasts = tuple(forecast(pair, batch, grid) for batch in batches)
    break_evens = tuple(break_even(pair, found, grid) for found in forecasts)
    report = plan_report.Report(profile, pair, sources, grid, forecasts, break_evens, paying_batches(pair, grid))
    if plot is not None:
        plan_plot.draw(plot, pair, forecasts, profile.name)
        click.echo(f"wrote {plot}", err=True)
    if as_json:
        click.echo(json.dumps(plan_report.as_json(report), indent=1))
    else:
        _print(report)


def _profile(file: Path | None, given: dict[str, Any]) -> tuple[Profile, dict[str, str]]:
    """The figures to plan with, and where each of them comes from. Raises UsageError."""
    base = PAPER if file is None else profiles.read(file)
    name = base.name if file is None else f"profile {file.name}"
    sources = dict.fromkeys(FIGURES, name)
    sources |= {figure: f"{name}, not measured: {why}" for figure, why in base.assumed.items()}
    sources |= dict.fromkeys(given, "option")
    for figure in ("verify", "step"):
        if figure in given:
            given[figure] = profiles.Times.of(given[figure])
    if "misses" in given:
        given["misses"] = Misses(*given["misses"])
    if not given:
        return base, sources
    assumed = {figure: why for figure, why in base.assumed.items() if figure not in given}
    return profiles.checked(base, name=f"{base.name}, with options", assumed=assumed, **given), sources


def _print(report: plan_report.Report) -> None:
    from ssd.cli.tables import console

    output = console()
    for table in plan_report.tables(report):
        output.print(table)
    for line in plan_report.sentences(report):
        output.print(f"- {line}", soft_wrap=True, highlight=False)
