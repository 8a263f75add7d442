"""`ssd demo`: one prompt answered in the mode asked for, and by plain decoding."""

from __future__ import annotations

import click
from msgspec.structs import replace

from ssd.bench.environment import runs_on
from ssd.cli.options import GroupedCommand, engine_options
from ssd.cli.session import process_setup, session, show, spinner
from ssd.client import Completion
from ssd.config.engine import EngineConfig
from ssd.config.params import SamplingParams
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve

_PROMPT = "Write a short story about a lighthouse keeper."


@click.command(cls=GroupedCommand)
@click.argument("prompt", default=_PROMPT)
@click.option("--max-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@engine_options
def demo(prompt: str, max_tokens: int, engine: EngineOptions) -> None:
    """Answer one prompt in the mode asked for, then by plain decoding, both on all cores, and compare.

    The gain varies with the text."""
    configs = [resolve(engine), resolve(replace(engine, mode="ar"))]
    with process_setup():
        completions = [_answer(config, prompt, SamplingParams(max_tokens=max_tokens)) for config in configs]
    _compare(configs, completions)


def _answer(config: EngineConfig, prompt: str, params: SamplingParams) -> Completion:
    """Answer the prompt on an engine of its own, which has answered it before."""
    with session(config) as client:
        chat = client.describe().chat
        with spinner("warming up"):
            client.generate([prompt], replace(params, max_tokens=8), chat=chat)
        click.secho(f"{config.speculation.mode}> {prompt}", bold=True)
        return show(client, prompt, params, chat)


def _compare(configs: list[EngineConfig], completions: list[Completion]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("mode", "runs on", "tok/s", "acceptance length", "hit rate", "verify ms", "overhead ms")
    for config, completion in zip(configs, completions, strict=True):
        numbers = completion.metrics
        table.add_row(
            numbers.mode,
            runs_on(config, config.speculation.mode),
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
