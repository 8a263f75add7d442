"""`ssd bench serve`: requests that arrive at random moments, at an engine that serves."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click.core import ParameterSource
from msgspec.structs import replace

from ssd.bench.environment import engine_facts, hardware
from ssd.bench.settings import Protocol, Setting
from ssd.cli.bench_job import check_ids, publish, sized, starting
from ssd.cli.bench_options import SWEPT, Asked, measured_options
from ssd.cli.options import address_options, engine_options_but, speculation_changes
from ssd.cli.quantities import Real
from ssd.errors import SsdError, UsageError
from ssd.launch_config import EngineOptions, resolve
from ssd.params import Speculation

if TYPE_CHECKING:
    from ssd.bench.figures import Row
    from ssd.bench.load import Ask, Load
    from ssd.client import Client, Prompt
    from ssd.ipc.messages import Description

_DECIDED_THERE = (*EngineOptions.__struct_fields__, "modes", "lookaheads", "fan_outs", "backups", "address", "keys")
_AS_SERVED = Setting("as served", Speculation("ar"))  # over HTTP nothing is said of speculation


class _Traffic(NamedTuple):
    """How requests arrive."""

    rate: float
    concurrency: int | None
    repeats: int

    def as_json(self) -> Row:
        rate: float | str = "inf" if math.isinf(self.rate) else self.rate
        return {"request_rate": rate, "max_concurrency": self.concurrency, "repeats": self.repeats}


@click.command()
@measured_options
@click.option(
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
@click.option("--url", help="Use the OpenAI-compatible server at this address, as it is.")
@click.option("--api-key", envvar="OPENAI_API_KEY", help="The key for --url.")
@address_options
@engine_options_but(*SWEPT)
@click.pass_context
def serve(
    context: click.Context,
    asked: Asked,
    request_rate: float,
    max_concurrency: int | None,
    repeats: int,
    url: str | None,
    api_key: str | None,
    address: str | None,
    keys: Path | None,
    engine: EngineOptions,
) -> None:
    """Requests that arrive at random moments: latencies and throughput by the names of vllm bench serve.

    At the running engine of --address, in its own mode unless --modes says otherwise; at the server of --url, as it is;
    else, in all modes by turns, at an engine of its own."""
    from ssd.cli.session import process_setup, session
    from ssd.client import Client

    traffic = _Traffic(request_rate, max_concurrency, repeats)
    if url is not None:
        _refuse(context)
        with process_setup():
            _at_server(asked, traffic, url, api_key)
    elif address is not None:
        changes = speculation_changes(context, engine)
        texts = asked.texts()
        with process_setup(), Client(address, keys=keys) as client:
            served = client.describe()
            settings = asked.sweep((served.speculation.mode,)).settings(replace(served.speculation, **changes))
            facts = {"target_name": served.model, "draft_name": served.draft, "address": address}
            _at_engine(asked, traffic, texts, settings, client, keys, facts, "")
    else:
        if keys is not None:
            raise UsageError("--keys is for the running engine of --address")
        texts = asked.texts()
        settings = asked.sweep().settings(starting(engine))
        config = resolve(sized(engine, settings))
        with process_setup(), session(config) as client:
            facts, said = engine_facts(config), hardware(config, False)
            _at_engine(asked, traffic, texts, settings, client, None, facts, said)


def _refuse(context: click.Context) -> None:
    """Options that a server of --url has decided already."""
    for option in context.command.params:
        if option.name in _DECIDED_THERE and context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE:
            raise UsageError(f"{option.opts[0]} is not for --url, whose server is used as it is")


def _at_server(asked: Asked, traffic: _Traffic, url: str, key: str | None) -> None:
    from ssd.bench.http import Http

    texts = asked.texts()
    if texts is None:
        raise UsageError("--dataset random needs an engine whose vocabulary is known: give texts for --url")
    protocol = asked.protocol(chat=False)
    server = Http(url, traffic.concurrency or len(texts), protocol.chat, key)
    facts = {"target_name": server.model, "url": url}
    _report(asked, traffic, server, list(texts), [_AS_SERVED], protocol, facts, "")


def _at_engine(
    asked: Asked,
    traffic: _Traffic,
    texts: list[str] | None,
    settings: list[Setting],
    client: Client,
    keys: Path | None,
    facts: dict[str, Any],
    said: str,
) -> None:
    from ssd.bench.load import ZeroMQ

    served = client.describe()
    _check_draft(settings, served)
    protocol = asked.protocol(served.chat)
    ask = ZeroMQ(client.address, keys, protocol.chat)
    _report(asked, traffic, ask, asked.requests(texts, served.vocab_size), settings, protocol, facts, said)


def _check_draft(settings: Sequence[Setting], served: Description) -> None:
    drafting = [setting.name for setting in settings if setting.speculation.mode != "ar"]
    if drafting and not served.draft:
        raise UsageError(f"mode {drafting[0]} needs a draft, and the engine of --address runs without one")


def _report(
    asked: Asked,
    traffic: _Traffic,
    ask: Ask,
    prompts: list[Prompt],
    settings: list[Setting],
    protocol: Protocol,
    facts: dict[str, Any],
    said: str,
) -> None:
    from ssd.bench.figures import described, plain
    from ssd.bench.load_figures import equal_answers, load_figures
    from ssd.bench.report import Report

    report = Report("serve", facts, asked.workload(protocol, len(prompts)) | traffic.as_json(), said)
    read = len(settings) * traffic.repeats * len(asked.temperatures) > 1
    for temperature in asked.temperatures:
        loads = asyncio.run(_measure(ask, prompts, settings, temperature, protocol, traffic, read))
        reference = plain(settings) if len(settings) > 1 else None
        for setting in settings:
            row = described(setting, temperature) | traffic.as_json() | load_figures(loads[setting.name])
            if reference is not None and not setting.speculation.ratio_rule(temperature):
                row |= equal_answers(loads[setting.name], loads[reference.name])
            report.rows.append(row)
    if read:
        report.notes.append("Prompts were read before: the first token does not wait for a prompt that was kept.")
    for row in report.rows:
        if not row["completed"]:
            raise SsdError(f"{row['mode']}: no request was completed; failures by code: {row['errors']}")
    publish(report, asked, f"{len(prompts)} requests of {asked.tokens} tokens, {traffic.rate:g} a second")
    check_ids(report)


async def _measure(
    ask: Ask,
    prompts: Sequence[Prompt],
    settings: Sequence[Setting],
    temperature: float,
    protocol: Protocol,
    traffic: _Traffic,
    read: bool,
) -> dict[str, list[Load]]:
    """Passes of each setting, by turns, after a warm-up; with `read`, prompts are read before, so that no setting's
    pass is the one that reads them."""
    from ssd.bench.load import drive, poisson
    from ssd.bench.runs import WARM_UP, readers

    async with ask:
        at_once = [0.0] * len(prompts)
        warm_up: Prompt = "Warm up." if isinstance(prompts[0], str) else WARM_UP  # a server may take one kind only
        for setting in settings:
            await ask(warm_up, replace(protocol.params(setting, 0.0, 0), max_tokens=16))
        for setting in readers(settings) if read else ():
            short = replace(protocol.params(setting, 0.0, 0), max_tokens=2)
            await drive(ask, [(prompt, short) for prompt in prompts], at_once, traffic.concurrency, "prompts")
        arrivals = poisson(len(prompts), traffic.rate, protocol.seed)
        loads: dict[str, list[Load]] = {setting.name: [] for setting in settings}
        for _ in range(traffic.repeats):
            for setting in settings:
                params = [protocol.params(setting, temperature, index) for index in range(len(prompts))]
                requests = list(zip(prompts, params, strict=True))
                loads[setting.name].append(
                    await drive(ask, requests, arrivals, traffic.concurrency, f"{setting.name}, T = {temperature:g}")
                )
    return loads
