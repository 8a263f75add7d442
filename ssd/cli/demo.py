"""`ssd demo`: what speculative speculative decoding does, on the built-in pair."""

from __future__ import annotations

import click
import msgspec

from ssd.cli.options import engine_options
from ssd.cli.session import process_setup, session, show, spinner
from ssd.client import Completion
from ssd.launch_config import EngineOptions, resolve
from ssd.params import SamplingParams, Speculation

_PROMPT = "A train travels 60 km in 45 minutes. How far does it travel in 2 hours at the same speed?"


@click.command()
@click.argument("prompt", default=_PROMPT)
@click.option("--max-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@engine_options
def demo(prompt: str, max_tokens: int, engine: EngineOptions) -> None:
    """Answer one prompt with ssd and without, on one engine, and compare. How much is gained varies with the text."""
    config = resolve(engine)
    params = SamplingParams(max_tokens=max_tokens)
    plain = msgspec.structs.replace(params, speculation=Speculation("ar"))
    with process_setup(), session(config) as client:
        chat = client.describe().chat
        with spinner("warming up"):
            for warm_up in (params, plain):
                client.generate([prompt], msgspec.structs.replace(warm_up, max_tokens=8), chat=chat)
        completions = []
        for title, each in ((config.speculation.mode, params), ("ar", plain)):
            click.secho(f"{title}> {prompt}", bold=True)
            completions.append(show(client, prompt, each, chat))
    _compare(*completions)


def _compare(speculated: Completion, plain: Completion) -> None:
    from rich.console import Console
    from rich.table import Table

    same = speculated.token_ids == plain.token_ids
    table = Table("mode", "tok/s", "acceptance length", "hit rate", "verify ms", "overhead ms")
    for numbers in (speculated.metrics, plain.metrics):
        table.add_row(
            numbers.mode,
            f"{numbers.tokens_per_second:.1f}",
            f"{numbers.mean_acceptance_length:.2f}",
            f"{numbers.hit_rate:.0%}" if numbers.mode == "ssd" else "-",
            f"{numbers.verify_ms:.1f}",
            f"{numbers.round_overhead_ms:.2f}",
        )
    Console().print(table)
    click.echo("The same tokens." if same else "The tokens DIFFER: see docs/exactness.md.")
