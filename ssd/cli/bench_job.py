"""Shared parts of the commands of `ssd bench`: engines for the settings, and the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click
from msgspec.structs import replace

from ssd.bench.environment import engine_facts, hardware, runs_on
from ssd.bench.outputs import console, draw_rows
from ssd.bench.settings import Protocol, Setting, widest
from ssd.bench.setup import PLAIN, Setup
from ssd.cli.bench_options import ROWS, BenchOptions
from ssd.config.engine import NEVER_S, EngineConfig
from ssd.config.params import DRAFTED, Mode, Speculation
from ssd.errors import SsdError, UsageError
from ssd.launch.options import EngineOptions

if TYPE_CHECKING:
    from ssd.bench.figures import Row
    from ssd.bench.report import BenchReport
    from ssd.bench.runs import Runs
    from ssd.client import Client, Prompt


@dataclass(frozen=True)
class BenchJob:
    config: EngineConfig
    client: Client
    prompts: list[Prompt]
    settings: list[Setting]
    protocol: Protocol
    report: BenchReport

    def rows(self, runs: Runs, temperature: float, perplexity: bool) -> list[Row]:
        from ssd.bench.figures import rows
        from ssd.bench.runs import perplexities

        found = [
            {**row, "runs_on": runs_on(self.config, setting.speculation.mode) or None}
            for setting, row in zip(self.settings, rows(self.settings, runs, temperature), strict=True)
        ]
        if perplexity:
            by_name = perplexities(self.client, runs)
            found = [row | {"perplexity": by_name[row["mode"]]} for row in found]
        return found


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


@contextmanager
def measuring(
    benchmark: str,
    asked: BenchOptions,
    texts: list[str] | None,
    engine: EngineOptions,
    settings: list[Setting],
    setup: Setup,
) -> Iterator[BenchJob]:
    from ssd.bench.report import BenchReport
    from ssd.cli.session import process_setup, session

    with ExitStack() as stack:
        config = stack.enter_context(setup.configured(sized(engine, settings)))
        config = replace(config, idle_draft_s=NEVER_S)  # the draft must not leave before its mode is measured
        tell_left_out(asked, engine, settings)
        stack.enter_context(process_setup())
        client = stack.enter_context(session(config))
        protocol = asked.protocol(client.describe().chat)
        prompts = asked.requests(texts, config.vocab_size)
        workload = asked.workload(protocol, len(prompts))
        report = BenchReport(benchmark, engine_facts(config), workload, hardware(config), setup)
        yield BenchJob(config, client, prompts, settings, protocol, report)


def publish(report: BenchReport, asked: BenchOptions, about: str) -> None:
    """Print the report, then write and draw it: it is printed even if the disk is full."""
    from ssd.bench.report import sentences, tables, write

    output = console()
    for table in tables(report, about):
        output.print(table)
    for line in sentences(report):
        output.print(f"- {line}", soft_wrap=True, highlight=False)
    if asked.out is not None:
        write(report.as_json(), asked.out)
        click.echo(f"wrote {asked.out}", err=True)
    if asked.plot is not None:
        draw_rows(asked.plot, report.rows, f"ssd bench {report.benchmark}: {about}{report.title_suffix}")
        click.echo(f"wrote {asked.plot}", err=True)


def check_ids(report: BenchReport) -> None:
    from ssd.bench.figures import differing

    if wrong := differing(report.rows):
        raise SsdError(f"{'; '.join(wrong)} (docs/exactness.md)")
