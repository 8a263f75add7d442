"""This engine beside those that one would take instead: transformers and llama.cpp (docs/performance.md).

    pip install -e '.[peers]'         # llama-cpp-python is built from source: that takes a compiler, and minutes
    python tools/compare_peers.py ../shared/data/gsm8k.jsonl --prompts 10 --tokens 64

The same model, prompts (chat format, given as ids) and cores, greedily, batch 1, end of text ignored. Each is a process
of its own with everything loaded, and they take turns prompt by prompt (A B C A B C); a warm-up answer comes before.
Speed is counted from the first token to the last, where they arrive. Ratios are of the same prompt. Memory is the most
that a contestant's processes held between its turns, pages that they share counted once. `same ids`: answers equal to
those of transformers in fp32.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import click
from peers.contestants import CONTESTANTS, REFERENCE, Files
from peers.serving import Answer, Begin
from peers.worker import PeerError, Worker
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ssd.bench.datasets import from_jsonl
from ssd.bench.environment import environment
from ssd.cli.outputs import check_writable
from ssd.cores import parsed
from ssd.errors import SsdError
from ssd.frontend.tokenization import Tokenizer
from ssd.ipc.messages import ChatMessage
from ssd.models import hub

Runs: TypeAlias = dict[str, list[Answer]]
_PACKAGES = {"llama_cpp": "llama-cpp-python"}
_WARM_UP = "Tell me about the sea."


@click.command(help=__doc__)
@click.argument("prompts_file", type=click.Path(exists=True, path_type=Path))
@click.option("--target", default="smollm2", show_default=True)
@click.option("--draft", help="Default: the built-in one of the built-in target.")
@click.option("--peers", multiple=True, type=click.Choice(list(CONTESTANTS)), help="Only these.")
@click.option("--prompts", "count", type=click.IntRange(1), default=10, show_default=True)
@click.option("--tokens", type=click.IntRange(2), default=64, show_default=True, help="New tokens a prompt.")
@click.option("--cores", help="Cores for each, as 0-2,5; all that there are by default.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write every figure here.")
def main(
    prompts_file: Path,
    target: str,
    draft: str | None,
    peers: tuple[str, ...],
    count: int,
    tokens: int,
    cores: str | None,
    json_path: Path | None,
) -> None:
    allowed = tuple(sorted(os.sched_getaffinity(0)))
    try:
        check_writable("--json", json_path)
        placed = parsed("--cores", cores, allowed) or allowed
        directory = hub.ensure(target)
        draft = draft or ("smollm2-draft" if target == "smollm2" else None)
        drafting = hub.ensure(draft) if draft else None
        names = list(_installed(peers or tuple(CONTESTANTS), drafting is not None))
        tokenizer = Tokenizer(directory)
        prompts = [_ids(tokenizer, text) for text in (_WARM_UP, *from_jsonl(prompts_file, count))]
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            files = Files(directory, drafting, _ggufs(names, directory, Path(folder)))
            workers = dict[str, Worker]()
            for name in track(names, "load", transient=True):
                workers[name] = Worker(Begin(name, files, placed))
                stack.callback(workers[name].close)
            runs = _interleaved(workers, prompts, tokens)
            memory = {name: worker.peak_mib for name, worker in workers.items()}
    except (PeerError, SsdError) as error:
        raise click.ClickException(str(error)) from None
    rows = [_row(name, runs, memory[name]) for name in names]
    report = {
        "environment": environment() | {"placed_on": placed, "packages": _versions(names)},
        "target": target,
        "draft": draft,
        "prompts": [prompts_file.name, len(prompts) - 1],
        "tokens": tokens,
        "rows": rows,
        "ratios": _ratios(runs),
        "runs": {name: [answer.tokens_per_second for answer in answers] for name, answers in runs.items()},
    }
    console = Console(width=160)
    console.print(_table(rows, f"medians of {len(prompts) - 1} prompts, {tokens} tokens, quartiles in brackets"))
    console.print(_ratio_table(report["ratios"]))
    console.print(report["environment"])
    if json_path:
        json_path.write_text(json.dumps(report, indent=1))


def _installed(names: Sequence[str], has_draft: bool) -> Iterator[str]:
    """Those that can take part; of the others a line each."""
    found = False
    for name in names:
        contestant = CONTESTANTS[name]
        if find_spec(contestant.package) is None:
            package = _PACKAGES.get(contestant.package, contestant.package)
            click.echo(f"{name} is left out: {package} is not installed (pip install -e '.[peers]')", err=True)
        elif contestant.drafts and not has_draft:
            click.echo(f"{name} is left out: there is no draft (--draft)", err=True)
        else:
            found = True
            yield name
    if not found:
        raise click.UsageError("nobody is left to compare")


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode_chat([ChatMessage("user", text)]) if tokenizer.has_chat else tokenizer.encode(text)


def _ggufs(names: Sequence[str], directory: Path, folder: Path) -> dict[str, Path]:
    """The files that are asked for, written into `folder`."""
    kinds = {kind for name in names if (kind := CONTESTANTS[name].gguf) is not None}
    found = {kind: folder / f"target-{kind}.gguf" for kind in sorted(kinds)}
    if found:
        from peers.gguf_writer import write_gguf  # loads torch
    for kind, file in found.items():
        write_gguf(directory, file, kind, directory)
    return found


def _interleaved(workers: dict[str, Worker], prompts: Sequence[list[int]], tokens: int) -> Runs:
    """The answers of each to all prompts but the first, which is there to warm up."""
    runs: Runs = {name: [] for name in workers}
    for prompt in track(prompts, "measure", transient=True):
        for name, worker in workers.items():
            runs[name].append(worker.answer(prompt, tokens))
    return {name: answers[1:] for name, answers in runs.items()}


def _row(name: str, runs: Runs, memory: float) -> dict[str, Any]:
    reference = runs.get(REFERENCE)
    same = [a.token_ids == b.token_ids for a, b in zip(runs[name], reference or (), strict=reference is not None)]
    return {
        "engine": name,
        "weights": CONTESTANTS[name].weights,
        "tok_s": _spread([answer.tokens_per_second for answer in runs[name]]),
        "memory_mib": memory,
        "same_ids": sum(same) if reference else None,
        "answers": len(runs[name]),
    }


def _ratios(runs: Runs) -> dict[str, dict[str, list[float]]]:
    """This engine over each of the others, prompt by prompt."""
    ours = {name for name in runs if CONTESTANTS[name].package == "ssd"}
    found: dict[str, dict[str, list[float]]] = {}
    for one, other in product(runs, runs):
        if one in ours and other not in ours:
            pairs = zip(runs[one], runs[other], strict=True)
            found.setdefault(one, {})[other] = _spread([a.tokens_per_second / b.tokens_per_second for a, b in pairs])
    return found


def _spread(values: list[float]) -> list[float]:
    """Median, first and third quartile."""
    if len(values) == 1:
        return values * 3
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return [median, low, high]


def _versions(names: Sequence[str]) -> dict[str, str]:
    packages = {CONTESTANTS[name].package for name in names} - {"ssd"}
    return {package: version(_PACKAGES.get(package, package)) for package in sorted(packages)}


def _table(rows: list[dict[str, Any]], title: str) -> Table:
    table = Table(title=title)
    for column in ("engine", "weights", "tok/s", "memory MiB", "same ids"):
        table.add_column(column, justify="left" if column in ("engine", "weights") else "right")
    for row in rows:
        same = "-" if row["same_ids"] is None else f"{row['same_ids']}/{row['answers']}"
        table.add_row(row["engine"], row["weights"], _cell(row["tok_s"], 1), f"{row['memory_mib']:.0f}", same)
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
