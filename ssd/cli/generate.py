"""`ssd generate`: prompts in, text or JSON out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from ssd.cli.command import GroupedCommand, headed, main_option
from ssd.cli.options import address_options, local_engine_options, sampling_options, speculation_changes
from ssd.cli.prompts import read_prompts
from ssd.cli.session import connect, process_setup, show, speculating, summary
from ssd.client import Client, Completion
from ssd.config.descriptions import FILES, SAMPLING
from ssd.config.params import MAX_GRAMMAR, SamplingDefaults, SamplingParams, Structured
from ssd.errors import RequestError, UsageError
from ssd.ipc.connection import validate
from ssd.ipc.public import Generate
from ssd.launch.options import EngineOptions
from ssd.system.files import read_bounded

_FILE = click.Path(path_type=Path, dir_okay=False)
_EXAMPLES = """
ssd generate "Why is the sky blue?"
ssd generate "Write a haiku." --model ./model.gguf --max-tokens 64 --temperature 0.7
ssd generate --prompts-file prompts.jsonl --address http://127.0.0.1:8000 > answers.jsonl
"""


@click.command(cls=GroupedCommand, examples=_EXAMPLES)
@click.argument("prompt", required=False)
@local_engine_options
@main_option("--prompts-file", type=click.Path(path_type=Path), help='JSON lines with a "prompt"; run as one batch.')
@sampling_options(max_tokens=128)
@headed(
    "--logprobs",
    type=click.IntRange(0, 20),
    heading=SAMPLING,
    help="With --json: log-probabilities, and of N alternatives.",
)
@headed("--json-schema", type=_FILE, heading=FILES, help="The output is JSON that obeys the JSON Schema in this file.")
@headed("--regex", heading=FILES, help="The output matches this regular expression.")
@headed(
    "--grammar",
    type=_FILE,
    heading=FILES,
    help="The output obeys the grammar in this file, in Lark's notation or GBNF.",
)
@main_option("--json", "as_json", is_flag=True, help="Print one JSON object a prompt.")
@main_option("--chat/--raw", default=None, help="Use the model's chat format or not. Default: if it has one.")
@address_options
@click.pass_context
def generate(
    context: click.Context,
    prompt: str | None,
    prompts_file: Path | None,
    as_json: bool,
    chat: bool | None,
    address: str | None,
    keys: Path | None,
    json_schema: Path | None,
    regex: str | None,
    grammar: Path | None,
    engine: EngineOptions,
    **sampling: Any,
) -> None:
    """Complete PROMPT, or the prompts of a file."""
    sampling["structured"] = _structured(json_schema, regex, grammar)
    changes = {} if address is None else speculation_changes(context, engine)
    prompts = _prompts(prompt, prompts_file, SamplingDefaults().params(**sampling))
    with process_setup(), connect(address, keys, engine, quiet=as_json, chat=bool(chat)) as client:
        served = client.describe()
        as_chat = served.chat if chat is None else chat
        params = speculating(served.sampling.params(**sampling), served, changes)
        if as_json or prompts_file is not None:
            for completion in _completed(client, prompts, params, as_chat):
                click.echo(msgspec.json.encode(completion).decode())
        else:
            completion = show(client, prompts[0][1], params, as_chat)
            click.echo(summary(completion.usage.completion_tokens, completion.metrics), err=True)


def _structured(schema: Path | None, regex: str | None, grammar: Path | None) -> Structured | None:
    """Return the rule that the output must obey, or None; raise UsageError for more than one rule."""
    given = [asked for asked in (schema, regex, grammar) if asked is not None]
    if len(given) > 1:
        raise UsageError("give one of --json-schema, --regex and --grammar")
    if regex is not None:
        return Structured("regex", regex)
    if not given:
        return None
    file = Path(given[0])
    text = read_bounded(file, 4 * MAX_GRAMMAR, pipe=True).decode(errors="replace")
    return Structured("json" if schema is not None else "grammar", text)


def _prompts(prompt: str | None, file: Path | None, params: SamplingParams) -> list[tuple[str, str]]:
    """Return (file and line, or "", text) of each prompt; raise UsageError for a bad one."""
    if (prompt is None) == (file is None):
        raise UsageError("give either a PROMPT or --prompts-file")
    params.check()
    found = [("", prompt or "")] if file is None else list(read_prompts(file))
    for line, text in found:
        if not text:
            raise UsageError("the prompt is empty")
        try:
            validate(Generate(0, text, params=params))
        except RequestError as error:
            raise UsageError(f"{line or 'the prompt'}: {error}") from None
    return found


def _completed(client: Client, prompts: list[tuple[str, str]], params: SamplingParams, chat: bool) -> list[Completion]:
    try:
        return client.generate([text for _, text in prompts], params, chat=chat)
    except RequestError as error:
        line = "" if error.index is None else prompts[error.index][0]
        if not line:
            raise
        raise RequestError(error.code, f"{line}: {error}", error.param) from None
