"""What rounded inputs of layers with weights of few bits cost and bring: `--activations` side by side.

    python -m tools.activations smollm2 docs/design.md docs/algorithm.md --threads 1

For each setting: Kullback-Leibler divergence of the next-token distributions from those of float32 inputs (nats a
token), the share of positions with the same likeliest token, and the time of a forward by rows after 200 tokens,
by turns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ssd.execution.batch import Row
from ssd.execution.runner import Runner
from ssd.frontend.tokenization import Tokenizer
from ssd.layers.linear import PARTS
from ssd.models import hub, registry
from ssd.models.checkpoint import inspect

_TOKENS, _PAGE, _CONTEXT = 400, 16, 200
_ROWS, _REPEATS = (1, 2, 3, 4, 5, 6, 7, 8), 25


def logits_of(runner: Runner, texts: Sequence[list[int]]) -> Tensor:
    """Return the logits [tokens of all texts, V] in float64."""
    pages = list(range(_TOKENS // _PAGE))
    return torch.cat([runner.forward([Row(text, 0, pages, outputs=len(text))]) for text in texts]).double()


def forward_ms(runners: Sequence[Runner], text: list[int], rows: int) -> list[float]:
    """Return each runner's median time of a forward of so many tokens of one sequence, all with logits.

    The runners take turns."""
    row = Row(text[_CONTEXT : _CONTEXT + rows], _CONTEXT, list(range(_TOKENS // _PAGE)), outputs=rows)
    times: list[list[float]] = [[] for _ in runners]
    for _ in range(_REPEATS):
        for runner, own in zip(runners, times, strict=True):
            start = time.perf_counter()
            runner.forward([row])
            own.append(1e3 * (time.perf_counter() - start))
    return [median(own) for own in times]


@click.command(help=__doc__)
@click.argument("model")
@click.argument("texts", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--threads", default=1, show_default=True)
@torch.inference_mode()
def main(model: str, texts: tuple[Path, ...], threads: int) -> None:
    torch.set_num_threads(threads)
    checkpoint = inspect(hub.resolve(model))
    tokenizer = Tokenizer(checkpoint.directory)
    ids = [tokenizer.encode(text.read_text())[:_TOKENS] for text in texts]
    if min(map(len, ids)) < _CONTEXT + max(_ROWS):
        raise click.UsageError(f"a text has fewer than {_CONTEXT + max(_ROWS)} tokens")
    table = Table("activations", "KL", "largest", "same likeliest", *(f"{rows} rows, ms" for rows in _ROWS))
    exact: Tensor | None = None
    runners, lines = [], []
    for activations in PARTS:
        loaded = registry.load(checkpoint, torch.float32, torch.device("cpu"), _TOKENS, activations=activations)
        runner = Runner(loaded, _TOKENS // _PAGE, _PAGE)
        found = logits_of(runner, ids)
        exact = found if exact is None else exact
        expected = exact.log_softmax(-1)
        divergence = (expected.exp() * (expected - found.log_softmax(-1))).sum(-1)
        same = (exact.argmax(-1) == found.argmax(-1)).double().mean()
        runners.append(runner)
        lines.append([activations, f"{divergence.mean():.1e}", f"{divergence.max():.1e}", f"{same:.2%}"])
    times = [forward_ms(runners, ids[0], rows) for rows in _ROWS]
    for line, own in zip(lines, zip(*times, strict=True), strict=True):
        table.add_row(*line, *(f"{ms:.1f}" for ms in own))
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
