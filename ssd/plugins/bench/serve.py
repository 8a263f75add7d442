"""`ssd bench serve`: requests that arrive at random moments, at an engine that serves."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import replace

from ssd.cli.command import GroupedCommand
from ssd.cli.options import address_options, engine_options, speculation_changes, table_options
from ssd.config.engine import NEVER_S, EngineConfig
from ssd.config.params import DRAFTED
from ssd.errors import SsdError, UsageError
from ssd.ipc.public import printable
from ssd.launch.options import EngineOptions
from ssd.plugins.bench.environment import engine_facts, hardware, runs_on
from ssd.plugins.bench.options import KINDS, SWEPT, ServeOptions
from ssd.plugins.bench.settings import Protocol, Setting, base_speculation, default_modes, sized

if TYPE_CHECKING:
    from ssd.client import Client, Prompt
    from ssd.plugins.bench.load import Pass, ZeroMQ

_EXAMPLES = """
ssd bench serve --request-rate 4
ssd bench serve --max-concurrency 4 --repeats 3
ssd bench serve --address http://127.0.0.1:8000 --max-concurrency 8
"""


@click.command(cls=GroupedCommand, examples=_EXAMPLES)
@engine_options(without=SWEPT)
@table_options(ServeOptions(), "asked", kinds=KINDS, variables=False)
@address_options
@click.pass_context
def serve(
    context: click.Context, asked: ServeOptions, address: str | None, keys: Path | None, engine: EngineOptions
) -> None:
    """Send requests at random moments: latencies and throughput by the names of vllm bench serve.

    At the running engine of --address, in its own mode unless --modes says otherwise; else, in all modes by turns, at
    an engine of its own."""
    from ssd.cli.session import process_setup, session
    from ssd.client import Client
    from ssd.launch.resolve import resolve

    if address is not None:
        changes = speculation_changes(context, engine, SWEPT)
        texts = asked.texts()
        with process_setup(), Client(address, keys=keys) as client:
            served = client.describe()
            settings = asked.sweep((served.speculation.mode,)).settings(replace(served.speculation, **changes))
            names = {"target_name": printable(served.model), "draft_name": printable(served.draft)}
            _measure(asked, texts, settings, client, keys, names | {"address": address})
        return
    if keys is not None:
        raise UsageError("--keys is for the running engine of --address")
    texts = asked.texts()
    settings = asked.sweep(default_modes(engine)).settings(base_speculation(engine))
    config = replace(resolve(sized(engine, settings)), idle_draft_s=NEVER_S)  # the draft must not leave
    asked.tell_left_out(engine, settings)
    with process_setup(), session(config) as client:
        _measure(asked, texts, settings, client, None, engine_facts(config), config)


def _measure(
    asked: ServeOptions,
    texts: list[str] | None,
    settings: list[Setting],
    client: Client,
    keys: Path | None,
    facts: dict[str, Any],
    config: EngineConfig | None = None,
) -> None:
    """Measure and report. `facts` describe the engine of `client`; `config` is that of this command's own.

    Raises UsageError if the engine lacks the mode of a setting."""
    from ssd.plugins.bench.figures import described, plain
    from ssd.plugins.bench.load import ZeroMQ, equal_answers, load_figures
    from ssd.plugins.bench.report import BenchReport, publish

    served = client.describe()
    for setting in settings:
        if setting.speculation.mode in DRAFTED and not served.draft:
            raise UsageError(f"mode {setting.name} needs a draft, and the engine of --address runs without one")
        if setting.speculation.mode != "ar" and served.speculation.mode == "ar" and not served.draft:
            raise UsageError(f"mode {setting.name} needs an engine that was not started with --mode ar")
    protocol, prompts = asked.protocol(served.chat), asked.requests(texts, served.vocab_size)
    endpoint = ZeroMQ(client.address, keys, protocol.chat)
    workload = asked.workload(protocol, len(prompts)) | asked.traffic()
    report = BenchReport("serve", facts, workload, "" if config is None else hardware(config))
    read = len(settings) * asked.repeats * len(asked.temperature) > 1
    for temperature in asked.temperature:
        passes = asyncio.run(_passes(asked, endpoint, prompts, settings, protocol, temperature, read))
        reference = plain(settings) if len(settings) > 1 else None
        for setting in settings:
            row = described(setting, temperature) | asked.traffic() | load_figures(passes[setting.name])
            if config is not None:
                row["runs_on"] = runs_on(config, setting.speculation.mode)
            if reference is not None and setting.speculation.rule(temperature).emits_samples:
                row |= equal_answers(passes[setting.name], passes[reference.name])
            report.rows.append(row)
    if read:
        report.notes.append("Prompts were read before: the first token does not wait for a prompt that was kept.")
    for row in report.rows:
        if not row["completed"]:
            raise SsdError(f"{row['mode']}: no request was completed; failures by code: {row['errors']}")
    publish(report, asked.out, f"{len(prompts)} requests of {asked.tokens} tokens, {asked.request_rate:g} a second")


async def _passes(
    asked: ServeOptions,
    endpoint: ZeroMQ,
    prompts: list[Prompt],
    settings: list[Setting],
    protocol: Protocol,
    temperature: float,
    read: bool,
) -> dict[str, list[Pass]]:
    """Run the passes of each setting by turns; with `read`, the engine first caches all prompts."""
    from ssd.plugins.bench.load import drive, poisson
    from ssd.plugins.bench.runs import READ_TOKENS, WARM_UP, reader

    async with endpoint:
        for setting in settings:
            await endpoint(WARM_UP, replace(protocol.params(setting, 0.0, 0), max_tokens=16))
        if read:
            short = replace(protocol.params(reader(settings), 0.0, 0), max_tokens=READ_TOKENS)
            requests = [(prompt, short) for prompt in prompts]
            await drive(endpoint, requests, [0.0] * len(prompts), asked.max_concurrency, "prompts")
        arrivals = poisson(len(prompts), asked.request_rate, protocol.seed)
        passes: dict[str, list[Pass]] = {setting.name: [] for setting in settings}
        for _ in range(asked.repeats):
            for setting in settings:
                params = [protocol.params(setting, temperature, index) for index in range(len(prompts))]
                requests = list(zip(prompts, params, strict=True))
                title = f"{setting.name}, T = {temperature:g}"
                passes[setting.name].append(await drive(endpoint, requests, arrivals, asked.max_concurrency, title))
    return passes
