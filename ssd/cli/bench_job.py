"""What the commands of `ssd bench` do alike: engines for the settings, and the report at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click
from msgspec.structs import replace

from ssd.bench.emulated import Emulation, scripted
from ssd.bench.environment import engine_facts, hardware, own_cores
from ssd.bench.settings import Protocol, Setting, widest
from ssd.cli.bench_options import Asked
from ssd.config import EngineConfig
from ssd.errors import SsdError, UsageError
from ssd.launch_config import EngineOptions, resolve
from ssd.params import Speculation

if TYPE_CHECKING:
    from ssd.bench.figures import Row
    from ssd.bench.report import Report
    from ssd.bench.runs import Runs
    from ssd.client import Client, Prompt


@dataclass(frozen=True)
class Job:
    """What there is to run, and on what."""

    clients: dict[bool, Client]
    prompts: list[Prompt]
    settings: list[Setting]
    protocol: Protocol
    report: Report

    def rows(self, runs: Runs, temperature: float, perplexity: bool) -> list[Row]:
        from ssd.bench.figures import rows
        from ssd.bench.perplexity import perplexities

        found = rows(self.settings, runs, temperature)
        if perplexity:
            by_name = perplexities(self.clients[False], runs)
            found = [row | {"perplexity": by_name[row["mode"]]} for row in found]
        return found


def starting(engine: EngineOptions) -> Speculation:
    """How requests are speculated on where no option says otherwise."""
    auto = Speculation(num_speculative_tokens=0, fan_out=(), backup="auto")
    return replace(auto, **{name: getattr(engine, name) for name in ("sampler", "saguaro_c", "budget")})


def sized(engine: EngineOptions, settings: Sequence[Setting]) -> EngineOptions:
    """The options of an engine that has room for all settings, and a draft if one of them needs it."""
    room = widest(settings, starting(engine))
    if room.mode == "ar":
        return replace(engine, mode="ar")
    return replace(
        engine,
        mode="ssd",
        num_speculative_tokens=room.num_speculative_tokens,
        fan_out=(),
        backup=room.backup,
        budget=room.budget,
    )


@contextmanager
def measuring(
    benchmark: str,
    asked: Asked,
    texts: list[str] | None,
    engine: EngineOptions,
    settings: list[Setting],
    all_cores: bool,
    emulation: Emulation | None,
) -> Iterator[Job]:
    """Engines for as long as the block lasts: one, and with `all_cores` another one for `ar` and `sd`."""
    from ssd.bench.report import Report
    from ssd.cli.session import process_setup, session

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
            configs[True], more = _whole(options, config, settings)
            settings = settings + more
        if emulation is not None:
            configs = {key: _emulating(each, emulation) for key, each in configs.items()}
        clients = {key: stack.enter_context(session(each)) for key, each in configs.items()}
        protocol = asked.protocol(clients[False].describe().chat)
        prompts = asked.requests(texts, config.vocab_size)
        report = Report(
            benchmark,
            engine_facts(config),
            asked.workload(protocol, len(prompts)),
            hardware(config, all_cores),
            emulation,
        )
        yield Job(clients, prompts, settings, protocol, report)


def _emulating(config: EngineConfig, emulation: Emulation) -> EngineConfig:
    """A scripted pair is one in its weights, where the devices are emulated."""
    if emulation.times is not None:
        return replace(config, emulate=emulation.times)
    return replace(config, synthetic=emulation.stated)


def _whole(
    options: EngineOptions, config: EngineConfig, settings: Sequence[Setting]
) -> tuple[EngineConfig, list[Setting]]:
    """An engine whose target has the cores of target and draft, and what to run on it. Raises UsageError."""
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


def publish(report: Report, asked: Asked, about: str) -> None:
    """Print everything, and write it: what a disk has no room for is still told."""
    from ssd.bench import plot
    from ssd.bench.report import sentences, tables, write
    from ssd.cli.tables import console

    output = console()
    for table in tables(report, about):
        output.print(table)
    for line in sentences(report):
        output.print(f"- {line}", soft_wrap=True, highlight=False)
    if asked.out is not None:
        write(report.as_json(), asked.out)
        click.echo(f"wrote {asked.out}", err=True)
    if asked.plot is not None:
        plot.draw(asked.plot, report.rows, f"ssd bench {report.benchmark}: {about}{report.titled}")
        click.echo(f"wrote {asked.plot}", err=True)


def check_ids(report: Report) -> None:
    """Raises SsdError where they are not those of `ar`."""
    from ssd.bench.figures import differing

    if wrong := differing(report.rows):
        raise SsdError(f"{'; '.join(wrong)} (docs/exactness.md)")
