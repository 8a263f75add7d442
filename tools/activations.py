"""What rounding costs and brings: `--activations` and `--kv-cache-dtype` side by side.

    python -m tools.activations smollm2 docs/design.md docs/algorithm.md --threads 1

For each setting: perplexity, the Kullback-Leibler divergence of the next-token distributions from those of float32
inputs (nats a token), the share of positions with the same likeliest token, and the time of a forward by rows after
each `--context`, by turns, with a KV cache of float32 and of int8. If MODEL comes from a GGUF file and
llama-cpp-python is installed, llama.cpp has a row: it reads the same file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from itertools import chain, cycle, islice, product
from pathlib import Path
from statistics import median

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ssd.config.engine import CacheDType
from ssd.execution.batch import Row
from ssd.execution.runner import Runner
from ssd.frontend.tokenization import Tokenizer
from ssd.layers.linear import PARTS, Activations
from ssd.models import hub, registry
from ssd.models.checkpoint import Checkpoint, inspect
from tools.compare_peers.gguf import gguf_of

_TOKENS, _PAGE = 400, 16
_ROWS, _REPEATS = (1, 2, 3, 4, 5, 6, 7, 8), 25
CACHES: Sequence[CacheDType] = ("auto", "int8")
LLAMA_CPP = "llama.cpp"

Forward = Callable[[list[int], int], Tensor]
"""(tokens of a sequence, how many of its tokens are in the KV cache) -> logits float32 [tokens, V]."""


def forward_here(checkpoint: Checkpoint, activations: Activations, cache: CacheDType, longest: int) -> Forward:
    """Load the model with inputs and a KV cache that are rounded like this, for up to `longest` tokens."""
    loaded = registry.load(checkpoint, torch.float32, torch.device("cpu"), longest, activations=activations)
    pages = list(range(-(-longest // _PAGE)))
    runner = Runner(loaded, len(pages), _PAGE, cache_dtype=cache)
    return lambda tokens, start: runner.forward([Row(tokens, start, pages, outputs=len(tokens))])


def forward_of_llama_cpp(gguf: Path, threads: int, longest: int) -> Forward:
    """Load the model into llama.cpp, with flash attention: it is faster."""
    from llama_cpp import Llama

    sizes = {"n_ctx": longest, "n_batch": longest, "n_threads": threads, "n_threads_batch": threads}
    model = Llama(str(gguf), logits_all=True, flash_attn=True, verbose=False, **sizes)

    def forward(tokens: list[int], start: int) -> Tensor:
        model.n_tokens = start
        model.eval(tokens)
        return torch.from_numpy(model.scores[start : start + len(tokens)])

    return forward


def contestants(model: str, checkpoint: Checkpoint, threads: int, longest: int) -> Iterator[tuple[str, Forward]]:
    """Yield every setting, `float32` first, and llama.cpp if it can read the model."""
    for activations, cache in product(PARTS, CACHES):
        name = activations if cache == "auto" else f"{activations}, {cache} cache"
        yield name, forward_here(checkpoint, activations, cache, longest)
    gguf = gguf_of(model)
    if gguf is not None and find_spec("llama_cpp"):
        yield LLAMA_CPP, forward_of_llama_cpp(gguf, threads, longest)


def forward_ms(forwards: Sequence[Forward], text: list[int], context: int, rows: int) -> list[float]:
    """Return the median time of a forward of the next `rows` tokens after `context`, all with logits, by turns."""
    times: list[list[float]] = [[] for _ in forwards]
    for forward in forwards:
        if context:
            forward(text[:context], 0)
    for _ in range(_REPEATS):
        for forward, own in zip(forwards, times, strict=True):
            begin = time.perf_counter()
            forward(text[context : context + rows], context)
            own.append(1e3 * (time.perf_counter() - begin))
    return [median(own) for own in times]


@click.command(help=__doc__)
@click.argument("model")
@click.argument("texts", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--threads", default=1, show_default=True)
@click.option("--context", "contexts", type=click.IntRange(0), multiple=True, default=(200,), show_default=True)
@torch.inference_mode()
def main(model: str, texts: tuple[Path, ...], threads: int, contexts: tuple[int, ...]) -> None:
    torch.set_num_threads(threads)
    checkpoint = inspect(hub.resolve(model))
    tokenizer = Tokenizer(checkpoint.directory)
    whole = [tokenizer.encode(text.read_text()) for text in texts]
    ids, longest = [text[:_TOKENS] for text in whole], max(_TOKENS, *contexts) + max(_ROWS)
    if min(map(len, ids)) < 2:
        raise click.UsageError("a text has fewer than 2 tokens")
    forwards = dict(contestants(model, checkpoint, threads, longest))
    found: dict[str, list[Tensor]] = {name: [] for name in forwards}
    for text in ids:
        exact: Tensor | None = None
        for name, forward in forwards.items():
            own = forward(text, 0).double().log_softmax(-1)
            exact = own if exact is None else exact
            loss = -own[:-1].gather(1, torch.tensor(text[1:])[:, None])[:, 0]
            divergence = (exact.exp() * (exact - own)).sum(-1)
            found[name].append(torch.stack([loss, divergence[:-1], (exact.argmax(-1) == own.argmax(-1))[:-1].double()]))
    table = Table("activations", "perplexity", "KL", "largest", "same likeliest")
    for name, parts in found.items():
        loss, divergence, same = torch.cat(parts, -1)
        far = f"{divergence.mean():.1e}", f"{divergence.max():.1e}"
        table.add_row(name, f"{loss.mean().exp():.3f}", *far, f"{same.mean():.2%}")
    timed = list(islice(cycle(chain.from_iterable(whole)), longest))
    speeds = Table("after", "activations", *(f"{n} rows, ms" for n in _ROWS))
    for context in contexts:
        times = zip(*(forward_ms([*forwards.values()], timed, context, rows) for rows in _ROWS), strict=True)
        for name, own in zip(found, times, strict=True):
            speeds.add_row(str(context), name, *(f"{ms:.2f}" for ms in own))
    for each in (table, speeds):
        Console(width=160).print(each)


if __name__ == "__main__":
    main()
