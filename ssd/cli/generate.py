"""`ssd generate`: prompts in, text or JSON out."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import click
import msgspec
from click.core import ParameterSource
from msgspec.structs import replace

from ssd.cli.options import SPECULATION, engine_options
from ssd.cli.session import process_setup, session, show
from ssd.client import Client, Completion
from ssd.errors import RequestError, UsageError
from ssd.ipc.connection import validate
from ssd.ipc.messages import Generate
from ssd.launch_config import EngineOptions, resolve
from ssd.params import MAX_SEED, SamplingParams


@click.command()
@click.argument("prompt", required=False)
@click.option("--prompts-file", type=click.Path(path_type=Path), help='JSON lines with a "prompt"; run as one batch.')
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=click.IntRange(min=0), default=0, help="Sample from the K likeliest tokens; 0: all.")
@click.option("--top-p", type=float, default=1.0, help="Sample from the likeliest tokens that make up this share.")
@click.option("--min-p", type=float, default=0.0, help="Leave out tokens below this share of the likeliest one's.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--seed", type=click.IntRange(0, MAX_SEED), help="Same seed, same tokens. Default: a random one.")
@click.option("--stop", multiple=True, help="Text to stop before; up to four times.")
@click.option("--ignore-eos", is_flag=True, help="Go on after the end-of-text token.")
@click.option("--logprobs", type=click.IntRange(0, 20), help="With --json: log-probabilities, and of N alternatives.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a prompt.")
@click.option("--chat/--raw", default=None, help="Use the model's chat format or not. Default: if it has one.")
@click.option("--address", help="Use the running engine at this address.")
@engine_options
@click.pass_context
def generate(
    context: click.Context,
    prompt: str | None,
    prompts_file: Path | None,
    as_json: bool,
    chat: bool | None,
    address: str | None,
    engine: EngineOptions,
    **sampling: Any,
) -> None:
    """Complete PROMPT, or the prompts of a file."""
    params = SamplingParams(**sampling)
    changes = {} if address is None else _changes(context, engine)
    prompts = _prompts(prompt, prompts_file, params)
    with process_setup(), _connect(address, engine) as client:
        served = client.describe()
        as_chat = served.chat if chat is None else chat
        if changes:
            params = replace(params, speculation=replace(served.speculation, **changes))
        if as_json or prompts_file is not None:
            for completion in client.generate(prompts, params, chat=as_chat):
                click.echo(msgspec.json.encode(completion).decode())
        else:
            completion = show(client, prompts[0], params, as_chat)
            click.echo(_summary(completion), err=True)


def _connect(address: str | None, engine: EngineOptions) -> AbstractContextManager[Client]:
    return session(resolve(engine)) if address is None else Client(address)


def _summary(completion: Completion) -> str:
    numbers = completion.metrics
    parts = [f"{completion.usage.completion_tokens} tokens", f"{numbers.tokens_per_second:.1f} tok/s", numbers.mode]
    if numbers.mode != "ar":
        parts.append(f"acceptance length {numbers.mean_acceptance_length:.2f}")
    if numbers.mode == "ssd":
        parts.append(f"hit rate {numbers.hit_rate:.0%}")
    parts += [f"verify {numbers.verify_ms:.1f} ms", f"wait {numbers.draft_wait_ms:.1f} ms"]
    return ", ".join([*parts, f"overhead {numbers.round_overhead_ms:.2f} ms"])


def _changes(context: click.Context, engine: EngineOptions) -> dict[str, Any]:
    """What flags and environment ask of a running engine's way to speculate. The rest it has decided already."""
    sources = {name: context.get_parameter_source(name) for name in EngineOptions.__struct_fields__}
    for name, source in sources.items():
        if source is ParameterSource.COMMANDLINE and name not in SPECULATION:
            raise UsageError(f"--{name.replace('_', '-')} cannot be changed in the running engine of --address")
    return {name: getattr(engine, name) for name in SPECULATION if sources[name] is not ParameterSource.DEFAULT}


def _prompts(prompt: str | None, file: Path | None, params: SamplingParams) -> list[str]:
    """The prompts to complete, everything about them checked that can be without an engine."""
    if (prompt is None) == (file is None):
        raise UsageError("give either a PROMPT or --prompts-file")
    params.check()
    if prompt is not None:
        return [_checked(prompt, params, "the prompt")]
    assert file is not None
    return _read(file, params)


def _read(file: Path, params: SamplingParams) -> list[str]:
    try:
        lines = file.read_text("utf-8-sig").split("\n")  # not splitlines, which takes more than newlines
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"cannot read {file}: not UTF-8 at byte {error.start}") from None
    prompts = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            prompts.append(_prompt_of(line, params, f"{file}, line {number}"))
    if not prompts:
        raise UsageError(f"{file} holds no prompts")
    return prompts


def _prompt_of(line: str, params: SamplingParams, where: str) -> str:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not JSON: {error}") from None
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
        raise UsageError(f'{where}: expected an object with a "prompt" of text')
    return _checked(entry["prompt"], params, where)


def _checked(prompt: str, params: SamplingParams, where: str) -> str:
    if not prompt:
        raise UsageError(f"{where} is empty" if where == "the prompt" else f"{where}: the prompt is empty")
    try:
        validate(Generate(0, prompt, params=params))
    except RequestError as error:
        raise UsageError(f"{where}: {error}") from None
    return prompt
