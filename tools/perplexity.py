"""What rounding weights costs: perplexity of texts under a model in float32, in bfloat16 and in 8 bits.

Beside it, on the same texts: the mean divergence KL(float32 || rounded) in nats a token, and how often the likeliest
token is the same.

python tools/perplexity.py prompts.jsonl
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import torch
from rich.progress import track
from tokenizers import Tokenizer
from torch import Tensor

from ssd.bench.datasets import from_jsonl
from ssd.execution.batch import Row
from ssd.execution.runner import Runner
from ssd.models import hub, registry
from ssd.models.checkpoint import inspect

_PAGE, _CPU = 16, torch.device("cpu")
_KINDS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": torch.float32},
    "bfloat16": {"dtype": torch.bfloat16},
    "int8": {"dtype": torch.float32, "int8": True},
}


@click.command(help=__doc__)
@click.argument("texts", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--model", default="smollm2", show_default=True)
@click.option("--count", default=60, show_default=True, help="Texts to read: lines, each an object with a `prompt`.")
@click.option("--tokens", default=512, show_default=True, help="Read at most so many tokens of each.")
def main(texts: Path, model: str, count: int, tokens: int) -> None:
    directory = hub.resolve(model)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    batch = [ids[:tokens] for text in from_jsonl(texts, count) if len(ids := tokenizer.encode(text).ids) > 1]
    runners = {kind: _runner(directory, tokens, options) for kind, options in _KINDS.items()}
    sums = {kind: torch.zeros(3, dtype=torch.float64) for kind in _KINDS}
    for ids in track(batch, "texts"):
        exact: Tensor | None = None
        for kind, logprobs in _logprobs(runners, ids):
            exact = logprobs if exact is None else exact
            loss = -logprobs.gather(1, torch.tensor(ids[1:])[:, None]).sum()
            divergence = (exact.exp() * (exact - logprobs)).sum()
            same = (exact.argmax(-1) == logprobs.argmax(-1)).sum()
            sums[kind] += torch.stack((loss, divergence, same)).double()
    total = sum(len(ids) - 1 for ids in batch)
    click.echo(f"{total} tokens of {len(batch)} texts\nweights   perplexity       KL   same likeliest token")
    for kind, (loss, divergence, same) in sums.items():
        click.echo(f"{kind:9} {math.exp(loss / total):10.3f} {divergence / total:8.4f} {same / total:11.1%}")


def _runner(directory: Path, tokens: int, options: dict[str, Any]) -> Runner:
    model = registry.load(inspect(directory), options["dtype"], _CPU, tokens, int8=options.get("int8", False))
    return Runner(model, -(-tokens // _PAGE), _PAGE)


def _logprobs(runners: dict[str, Runner], ids: list[int]) -> Iterator[tuple[str, Tensor]]:
    """(kind, log-probabilities [len(ids) - 1, V] of each token after those before it), one kind after the other."""
    for kind, runner in runners.items():
        pages = range(runner.cache.pages)
        yield kind, runner.forward([Row(ids[:-1], 0, pages, len(ids) - 1)]).float().log_softmax(-1)


if __name__ == "__main__":
    main()
