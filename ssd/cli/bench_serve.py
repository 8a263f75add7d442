"""`ssd bench serve`: requests that arrive at random moments, at an engine that serves."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click.core import ParameterSource
from msgspec.structs import replace

from ssd.bench.environment import engine_facts, hardware, runs_on
from ssd.bench.quantities import Real
from ssd.bench.settings import Protocol, Setting
from ssd.cli.bench_job import base_speculation, check_ids, modes_to_compare, publish, sized, tell_left_out
from ssd.cli.bench_options import SWEPT, BenchOptions, bench_options
from ssd.cli.command import GroupedCommand, headed, main_option
from ssd.cli.options import address_options, engine_options, speculation_changes
from ssd.config.descriptions import CLIENTS
from ssd.config.engine import NEVER_S, EngineConfig
from ssd.config.params import DRAFTED, Speculation
from ssd.errors import SsdError, UsageError
from ssd.ipc.public import printable
from ssd.launch.options import EngineOptions

if TYPE_CHECKING:
    from ssd.bench.figures import Row
    from ssd.bench.load import Endpoint, Pass
    from ssd.client import Client, Prompt

_DECIDED_THERE = (*EngineOptions.__struct_fields__, "modes", "lookaheads", "fan_outs", "backups", "address", "keys")
_EXAMPLES = """
ssd bench serve --request-rate 4
ssd bench serve --address http://127.0.0.1:8000 --max-concurrency 8
ssd bench serve --url http://127.0.0.1:8000 --repeats 3
"""
_AS_SERVED = Setting("as served", Speculation("ar"))  # HTTP requests do not set the mode


class _Traffic(NamedTuple):
    """Arrivals of requests: `rate` a second, at most `concurrency` open, all prompts `repeats` times."""

    rate: float
    concurrency: int | None
    repeats: int

    def as_json(self) -> Row:
        rate: float | str = "inf" if math.isinf(self.rate) else self.rate
        return {"request_rate": rate, "max_concurrency": self.concurrency, "repeats": self.repeats}


class _LoadTest(NamedTuple):
    """A load test to run: requests, their endpoint, and how often to send them."""

    asked: BenchOptions
    traffic: _Traffic
    endpoint: Endpoint
    prompts: list[Prompt]
    settings: list[Setting]
    protocol: Protocol


@click.command(cls=GroupedCommand, examples=_EXAMPLES)
@engine_options(without=SWEPT)
@bench_options
@main_option(
    "--request-rate",
    type=Real(min=0, min_open=True),
    default=math.inf,
    show_default=True,
    help="Requests a second, at random moments (Poisson); inf: all at once.",
)
@click.option("--max-concurrency", type=click.IntRange(1, 1024), help="Most requests open at once. Default: all.")
@click.option(
    "--repeats", type=click.IntRange(1), default=1, show_default=True, help="Times that all prompts are sent."
)
@main_option("--url", help="Use the OpenAI-compatible server at this address, as it is.")
@headed("--api-key", envvar="OPENAI_API_KEY", heading=CLIENTS, help="The key for --url.")
@address_options
@click.pass_context
def serve(
    context: click.Context,
    asked: BenchOptions,
    request_rate: float,
    max_concurrency: int | None,
    repeats: int,
    url: str | None,
    api_key: str | None,
    address: str | None,
    keys: Path | None,
    engine: EngineOptions,
) -> None:
    """Send requests at random moments: latencies and throughput by the names of vllm bench serve.

    At the running engine of --address, in its own mode unless --modes says otherwise; at the server of --url, as it is;
    else, in all modes by turns, at an engine of its own."""
    from ssd.cli.session import process_setup, session
    from ssd.client import Client
    from ssd.launch.resolve import resolve

    traffic = _Traffic(request_rate, max_concurrency, repeats)
    if url is not None:
        _refuse_engine_options(context)
        with process_setup():
            _at_server(asked, traffic, url, api_key)
    elif address is not None:
        changes = speculation_changes(context, engine)
        texts = asked.texts()
        with process_setup(), Client(address, keys=keys) as client:
            served = client.describe()
            settings = asked.sweep((served.speculation.mode,)).settings(replace(served.speculation, **changes))
            job = _at_engine(asked, traffic, texts, settings, client, keys)
            names = {"target_name": printable(served.model), "draft_name": printable(served.draft)}
            _report(job, names | {"address": address})
    else:
        if keys is not None:
            raise UsageError("--keys is for the running engine of --address")
        texts = asked.texts()
        settings = asked.sweep(modes_to_compare(engine)).settings(base_speculation(engine))
        config = replace(resolve(sized(engine, settings)), idle_draft_s=NEVER_S)  # the draft must not leave
        tell_left_out(asked, engine, settings)
        with process_setup(), session(config) as client:
            job = _at_engine(asked, traffic, texts, settings, client, None)
            _report(job, engine_facts(config), config)


def _refuse_engine_options(context: click.Context) -> None:
    for option in context.command.params:
        if option.name in _DECIDED_THERE and context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE:
            raise UsageError(f"{option.opts[0]} is not for --url, whose server is used as it is")


def _at_server(asked: BenchOptions, traffic: _Traffic, url: str, key: str | None) -> None:
    from ssd.bench.http import Http

    texts = asked.texts()
    if texts is None:
        raise UsageError("--dataset random needs an engine whose vocabulary is known: give texts for --url")
    protocol = asked.protocol(chat=False)
    server = Http(url, traffic.concurrency or len(texts), protocol.chat, key)
    job = _LoadTest(asked, traffic, server, list(texts), [_AS_SERVED], protocol)
    _report(job, {"target_name": printable(server.model), "url": url})


def _at_engine(
    asked: BenchOptions,
    traffic: _Traffic,
    texts: list[str] | None,
    settings: list[Setting],
    client: Client,
    keys: Path | None,
) -> _LoadTest:
    """Return the load test for a running engine; raise UsageError if it lacks the mode of a setting."""
    from ssd.bench.load import ZeroMQ

    served = client.describe()
    for setting in settings:
        if setting.speculation.mode in DRAFTED and not served.draft:
            raise UsageError(f"mode {setting.name} needs a draft, and the engine of --address runs without one")
        if setting.speculation.mode != "ar" and served.speculation.mode == "ar" and not served.draft:
            raise UsageError(f"mode {setting.name} needs an engine that was not started with --mode ar")
    protocol = asked.protocol(served.chat)
    endpoint = ZeroMQ(client.address, keys, protocol.chat)
    return _LoadTest(asked, traffic, endpoint, asked.requests(texts, served.vocab_size), settings, protocol)


def _report(job: _LoadTest, facts: dict[str, Any], config: EngineConfig | None = None) -> None:
    """Measure, then report. `facts` describe the engine; `config` is that of this command's own."""
    from ssd.bench.figures import described, plain
    from ssd.bench.load import equal_answers, load_figures
    from ssd.bench.report import BenchReport

    asked, traffic, settings = job.asked, job.traffic, job.settings
    workload = asked.workload(job.protocol, len(job.prompts)) | traffic.as_json()
    report = BenchReport("serve", facts, workload, "" if config is None else hardware(config))
    read = len(settings) * traffic.repeats * len(asked.temperatures) > 1
    for temperature in asked.temperatures:
        passes = asyncio.run(_measure(job, temperature, read))
        reference = plain(settings) if len(settings) > 1 else None
        for setting in settings:
            row = described(setting, temperature) | traffic.as_json() | load_figures(passes[setting.name])
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
    publish(report, asked, f"{len(job.prompts)} requests of {asked.tokens} tokens, {traffic.rate:g} a second")
    check_ids(report)


async def _measure(job: _LoadTest, temperature: float, read: bool) -> dict[str, list[Pass]]:
    """Run the passes of each setting by turns; with `read`, the engine first caches all prompts."""
    from ssd.bench.load import drive, poisson
    from ssd.bench.runs import READ_TOKENS, WARM_UP, reader

    endpoint, prompts, settings, params = job.endpoint, job.prompts, job.settings, job.protocol.params
    most = job.traffic.concurrency
    async with endpoint:
        warm_up: Prompt = "Warm up." if isinstance(prompts[0], str) else WARM_UP  # a server may take one kind only
        for setting in settings:
            await endpoint(warm_up, replace(params(setting, 0.0, 0), max_tokens=16))
        if read:
            short = replace(params(reader(settings), 0.0, 0), max_tokens=READ_TOKENS)
            await drive(endpoint, [(prompt, short) for prompt in prompts], [0.0] * len(prompts), most, "prompts")
        arrivals = poisson(len(prompts), job.traffic.rate, job.protocol.seed)
        passes: dict[str, list[Pass]] = {setting.name: [] for setting in settings}
        for _ in range(job.traffic.repeats):
            for setting in settings:
                requests = [(prompt, params(setting, temperature, index)) for index, prompt in enumerate(prompts)]
                title = f"{setting.name}, T = {temperature:g}"
                passes[setting.name].append(await drive(endpoint, requests, arrivals, most, title))
    return passes
