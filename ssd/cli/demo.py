"""`ssd demo`: one prompt answered by the engine as asked, and by plain decoding on all of its cores."""

from __future__ import annotations

import click
from msgspec.structs import replace

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
    """Answer one prompt with a draft, then plainly on all cores, and compare. The gain varies with the text."""
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

    table = Table("mode", "cores", "tok/s", "acceptance length", "hit rate", "verify ms", "overhead ms")
    for config, completion in zip(configs, completions, strict=True):
        numbers, cores = completion.metrics, [len(cpus) for cpus in (config.target_cpus, config.draft_cpus) if cpus]
        table.add_row(
            numbers.mode,
            " + ".join(map(str, cores)) or "any",
            f"{numbers.tokens_per_second:.1f}",
            f"{numbers.mean_acceptance_length:.2f}",
            f"{numbers.hit_rate:.0%}" if numbers.mode == "ssd" else "-",
            f"{numbers.verify_ms:.1f}",
            f"{numbers.round_overhead_ms:.2f}",
        )
    Console().print(table)
    same = completions[0].token_ids == completions[1].token_ids
    click.echo("The same tokens." if same else "The tokens DIFFER: see docs/exactness.md.")
