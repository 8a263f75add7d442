"""What the commands of `ssd bench` share: engines for the settings, and the report at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click
from msgspec.structs import replace

from ssd.bench.emulated import Emulation, scripted
from ssd.bench.environment import engine_facts, hardware, own_cores
from ssd.bench.outputs import console
from ssd.bench.settings import Protocol, Setting, widest
from ssd.cli.bench_options import BenchOptions
from ssd.config.engine import EngineConfig
from ssd.config.params import Speculation
from ssd.errors import SsdError, UsageError
from ssd.launch.options import EngineOptions

if TYPE_CHECKING:
    from ssd.bench.figures import Row
    from ssd.bench.report import BenchReport
    from ssd.bench.runs import Runs
    from ssd.client import Client, Prompt


@dataclass(frozen=True)
class Job:
    """A benchmark to run: engines by `Setting.all_cores`, prompts, settings, and the report to fill."""

    clients: dict[bool, Client]
    prompts: list[Prompt]
    settings: list[Setting]
    protocol: Protocol
    report: BenchReport

    def rows(self, runs: Runs, temperature: float, perplexity: bool) -> list[Row]:
        """Return a row of figures for each setting, with the perplexity of its answers if asked for."""
        from ssd.bench.figures import rows
        from ssd.bench.runs import perplexities

        found = rows(self.settings, runs, temperature)
        if perplexity:
            by_name = perplexities(self.clients[False], runs)
            found = [row | {"perplexity": by_name[row["mode"]]} for row in found]
        return found


def base_speculation(engine: EngineOptions) -> Speculation:
    """Return how to speculate where no option says otherwise."""
    auto = Speculation(num_speculative_tokens=0, fan_out=(), backup="auto")
    return replace(auto, **{name: getattr(engine, name) for name in ("sampler", "saguaro_c", "budget")})


def sized(engine: EngineOptions, settings: Sequence[Setting]) -> EngineOptions:
    """Return the options of an engine with room for all settings, and with a draft if one needs it."""
    room = widest(settings, base_speculation(engine))
    if room.mode == "ar":
        return replace(engine, mode="ar")
    names = ("mode", "num_speculative_tokens", "fan_out", "backup", "budget")
    return replace(engine, **{name: getattr(room, name) for name in names})


@contextmanager
def measuring(
    benchmark: str,
    asked: BenchOptions,
    texts: list[str] | None,
    engine: EngineOptions,
    settings: list[Setting],
    all_cores: bool,
    emulation: Emulation | None,
) -> Iterator[Job]:
    """Yield a job whose engines run while the block lasts: one, and with `all_cores` another for `ar` and `sd`."""
    from ssd.bench.report import BenchReport
    from ssd.cli.session import process_setup, session
    from ssd.launch.resolve import resolve

    if emulation is not None and emulation.times is not None and all_cores:
        raise UsageError("--all-cores: what is emulated is as fast on any cores")
    with ExitStack() as stack:
        options = sized(engine, settings)
        if emulation is not None:
            options = stack.enter_context(scripted(options, emulation))
        config = resolve(options)
        stack.enter_context(process_setup())
        configs = {False: config}
        if all_cores:
            configs[True], more = _on_all_cores(options, config, settings)
            settings = settings + more
        if emulation is not None:
            configs = {key: _emulating(each, emulation) for key, each in configs.items()}
        clients = {key: stack.enter_context(session(each)) for key, each in configs.items()}
        protocol = asked.protocol(clients[False].describe().chat)
        prompts = asked.requests(texts, config.vocab_size)
        workload, equal = asked.workload(protocol, len(prompts)), hardware(config, all_cores)
        report = BenchReport(benchmark, engine_facts(config), workload, equal, emulation)
        yield Job(clients, prompts, settings, protocol, report)


def _emulating(config: EngineConfig, emulation: Emulation) -> EngineConfig:
    if emulation.times is not None:
        # A stated agreement lies in the weights of the scripted pair.
        return replace(config, emulate=emulation.times, elastic_cores=False)
    return replace(config, synthetic=emulation.stated)


def _on_all_cores(
    options: EngineOptions, config: EngineConfig, settings: Sequence[Setting]
) -> tuple[EngineConfig, list[Setting]]:
    """Return an engine whose target has the draft's cores too, and the settings to run on it. Raises UsageError."""
    from ssd.launch.resolve import resolve

    if not own_cores(config):
        raise UsageError("--all-cores: target and draft have no cores of their own here, so that it changes nothing")
    cpus = ",".join(map(str, sorted({*config.target_cpus, *config.draft_cpus})))
    more = [
        Setting(f"{setting.name}, all cores", setting.speculation, True)
        for setting in settings
        if setting.speculation.mode != "ssd"
    ]
    if not more:
        raise UsageError("--all-cores adds ar and sd, and neither is among the modes")
    return resolve(replace(options, target_cpus=cpus, draft_cpus=cpus)), more


def publish(report: BenchReport, asked: BenchOptions, about: str) -> None:
    """Print the report, then write and draw it: if the disk is full, it has been printed."""
    from ssd.bench import plot
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
        plot.draw(asked.plot, report.rows, f"ssd bench {report.benchmark}: {about}{report.title_suffix}")
        click.echo(f"wrote {asked.plot}", err=True)


def check_ids(report: BenchReport) -> None:
    """Raise SsdError if any answer's ids are not those of `ar`."""
    from ssd.bench.figures import differing

    if wrong := differing(report.rows):
        raise SsdError(f"{'; '.join(wrong)} (docs/exactness.md)")
