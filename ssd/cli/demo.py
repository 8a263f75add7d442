"""`ssd demo`: one prompt answered in the mode asked for, and by plain decoding."""

from __future__ import annotations

import click
from msgspec.structs import replace

from ssd.bench.environment import runs_on
from ssd.cli.options import GroupedCommand, local_engine_options
from ssd.cli.session import process_setup, session, show, spinner
from ssd.client import Client, Completion
from ssd.config.engine import EngineConfig
from ssd.config.params import Mode, SamplingParams, Speculation
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve

_PROMPT = "Write a short story about a lighthouse keeper."
_EXAMPLES = """
ssd demo
ssd demo "Write a poem about the sea."
ssd demo --mode ngram --max-tokens 64
"""


@click.command(cls=GroupedCommand, examples=_EXAMPLES)
@click.argument("prompt", default=_PROMPT)
@click.option("--max-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@local_engine_options
def demo(prompt: str, max_tokens: int, engine: EngineOptions) -> None:
    """Answer one prompt in the mode asked for, then by plain decoding on the same engine, and compare.

    Both have all cores, unless --target-cpus or --draft-cpus say otherwise. The gain varies with the text."""
    config = resolve(engine)
    asked = [
        SamplingParams(max_tokens=max_tokens, speculation=each) for each in (config.speculation, Speculation("ar"))
    ]
    with process_setup(), session(config) as client:
        chat = client.describe().chat
        with spinner("warming up"):
            for params in asked:
                client.generate([prompt], replace(params, max_tokens=8), chat=chat)
        completions = [_answer(client, prompt, params, chat) for params in asked]
    _compare(config, completions)


def _answer(client: Client, prompt: str, params: SamplingParams, chat: bool) -> Completion:
    assert params.speculation is not None
    click.secho(f"{params.speculation.mode}> {prompt}", bold=True)
    return show(client, prompt, params, chat)


def _compare(config: EngineConfig, completions: list[Completion]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("mode", "runs on", "tok/s", "acceptance length", "hit rate", "verify ms", "overhead ms")
    modes: tuple[Mode, ...] = (config.speculation.mode, "ar")
    for mode, completion in zip(modes, completions, strict=True):
        numbers = completion.metrics
        table.add_row(
            mode,
            runs_on(config, mode),
            f"{numbers.tokens_per_second:.1f}",
            f"{numbers.mean_acceptance_length:.2f}",
            f"{numbers.hit_rate:.0%}" if numbers.hits + numbers.misses else "-",
            f"{numbers.verify_ms:.1f}",
            f"{numbers.round_overhead_ms:.2f}",
        )
    Console().print(table)
    for completion in completions:
        if completion.metrics.plan:
            click.echo(f"{completion.metrics.mode}: {completion.metrics.plan}.")
    same = completions[0].token_ids == completions[1].token_ids
    click.echo("The same tokens." if same else "The tokens DIFFER: see docs/exactness.md.")
