"""Shared parts of the commands of `ssd bench`: modes, options of an engine for the settings, and the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
from msgspec.structs import replace

from ssd.bench.outputs import console
from ssd.bench.settings import Setting, widest
from ssd.bench.setup import PLAIN, Setup
from ssd.cli.bench_options import ROWS, BenchOptions
from ssd.config.params import DRAFTED, Mode, Speculation
from ssd.errors import SsdError, UsageError
from ssd.launch.options import EngineOptions

if TYPE_CHECKING:
    from ssd.bench.report import BenchReport


def base_speculation(engine: EngineOptions, setup: Setup = PLAIN) -> Speculation:
    return Speculation(
        sampler=engine.sampler, saguaro_c=engine.saguaro_c, budget=engine.budget, allocation=setup.allocation
    )


def modes_to_compare(engine: EngineOptions, setup: Setup = PLAIN) -> tuple[Mode, ...]:
    """Return the modes that are compared by default; those with a draft only if there is one."""
    if engine.drafts or setup.has_draft:
        return ROWS
    return tuple(mode for mode in ROWS if mode not in DRAFTED)


def tell_left_out(asked: BenchOptions, engine: EngineOptions, settings: Sequence[Setting]) -> None:
    if asked.modes is None and not any(setting.speculation.mode in DRAFTED for setting in settings):
        click.echo(f"{engine.target} has no draft: sd and ssd are left out; give --draft to compare them", err=True)


def sized(engine: EngineOptions, settings: Sequence[Setting]) -> EngineOptions:
    """Return options with room for all settings; raise UsageError if they need a draft and none is given."""
    room = widest(settings, base_speculation(engine))
    drafting = [setting.name for setting in settings if setting.speculation.mode in DRAFTED]
    if drafting and not engine.drafts:
        raise UsageError(f"{drafting[0]} needs a draft for target {engine.target}: give --draft, or --modes ar,ngram")
    if room.mode in ("ar", "ngram"):
        return replace(engine, mode=room.mode)
    names = ("mode", "num_speculative_tokens", "fan_out", "backup", "budget")
    return replace(engine, **{name: getattr(room, name) for name in names})


def publish(report: BenchReport, asked: BenchOptions, about: str) -> None:
    """Print the report, then write it: it is printed even if the disk is full. Raises SsdError if ids differ."""
    from ssd.bench.figures import differing
    from ssd.bench.report import sentences, tables, write

    output = console()
    for table in tables(report, about):
        output.print(table)
    for line in sentences(report):
        output.print(f"- {line}", soft_wrap=True, highlight=False)
    if asked.out is not None:
        write(report.as_json(), asked.out)
        click.echo(f"wrote {asked.out}", err=True)
    if wrong := differing(report.rows):
        raise SsdError(f"{'; '.join(wrong)} (docs/exactness.md)")
