"""Measure throughput with a draft that is stopped, slow or lying, over that of mode ar (docs/reliability.md).

    python -m tools.faulty_draft --json faults.json

One engine per fault; decoding is greedy and goes on after the end of text, in chat format. Runs in ar and in ssd take
turns on the same prompts, and each begins every other pair. A pair gives one ratio, and its ids are compared. Prompts
are read before they are timed. Two runs before the fault warm up engine and tuner, so that it comes as a surprise.

\b
healthy       no fault
stopped       SIGSTOP, and any draft that takes its place too
duty          stopped and running in turn, 50 ms each
hog           a process that only counts comes to the draft's cores and goes, 5 s each
slow 1, ...   every forward pass of the draft takes so many milliseconds more
lying         random weights: well-formed nonsense
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import click
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.progress import track

from ssd import SamplingParams
from ssd.cli.outputs import grid
from ssd.client import Client, Completion, Prompt
from ssd.config.engine import EngineConfig
from ssd.config.params import Speculation
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.launch.server import ServerOptions
from ssd.launch.supervisor import Engine
from ssd.llm import running

WANTED = 0.95
_WARM_UP_RUNS = 2


class Fault(NamedTuple):
    """A fault. `stopped` and `runs`: seconds for which the draft is stopped and continued in turn.

    `hog`: seconds for which another process keeps the draft's cores busy, and for which it is away."""

    failpoints: str = ""
    stopped: float = 0.0
    runs: float = 0.0
    hog: float = 0.0
    lying: bool = False


FAULTS = {
    "healthy": Fault(),
    "stopped": Fault(stopped=0.05),
    "duty": Fault(stopped=0.05, runs=0.05),
    "hog": Fault(hog=5.0),
    "slow 1": Fault("draft.step=delay:1"),
    "slow 20": Fault("draft.step=delay:20"),
    "slow 500": Fault("draft.step=delay:500"),
    "lying": Fault(lying=True),
}


class Pair(NamedTuple):
    """Tokens per second of `ar` and `ssd` on the same prompts, what `ssd` accepted, and how many answers were equal.

    `step_ms` is the time of a draft step, as the draft measures it."""

    ar: float
    ssd: float
    rounds: int
    accepted: int
    answers: int
    equal: int
    step_ms: float


@click.command(help=__doc__)
@click.option("--dataset", default="builtin", show_default=True, help="As for ssd bench.")
@click.option("--fault", "names", multiple=True, type=click.Choice(list(FAULTS)), help="only these")
@click.option("--batch", "batches", multiple=True, type=click.IntRange(1), default=(1, 4), show_default=True)
@click.option("--pairs", "count", type=click.IntRange(1), default=7, show_default=True)
@click.option("--tokens", type=click.IntRange(1), default=96, show_default=True)
@click.option("-k", "lookahead", type=click.IntRange(0), default=0, help="draft tokens; 0: chosen automatically")
@click.option("--json", "out", type=click.Path(path_type=Path), help="write every figure here")
def main(
    dataset: str,
    names: tuple[str, ...],
    batches: tuple[int, ...],
    count: int,
    tokens: int,
    lookahead: int,
    out: Path | None,
) -> None:
    from ssd.plugins.bench import datasets  # the core's tests import this module without the plugin
    from ssd.plugins.bench.environment import environment

    options = EngineOptions(mode="ssd", max_num_seqs=max(batches), num_speculative_tokens=lookahead)
    config = resolve(options, ServerOptions(port=0))
    prompts = datasets.prompts(dataset, (count + _WARM_UP_RUNS) * max(batches), config.vocab_size)
    rows = []
    for name in names or FAULTS:
        with _engine(config, FAULTS[name]) as (engine, client):
            for batch in batches:
                before = openings(engine)
                with disturbed(engine, FAULTS[name]) as begin:
                    pairs = _pairs(client, _batches(prompts, batch), count, tokens, begin, f"{name}, batch {batch}")
                rows.append(figures(name, batch, pairs) | {"openings": openings(engine) - before})
    columns = ["fault", "batch", "ar tok/s", "ssd tok/s", "ratio", "quartiles", "tok/round", "step ms", "opened"]
    columns.append("equal")
    Console(width=120).print(grid(f"ssd over ar; wanted: {WANTED}", columns, map(_cells, rows)))
    if out is not None:
        out.write_text(json.dumps({"environment": environment(), "tokens": tokens, "rows": rows}, indent=1))
    if altered := sum(row["answers"] - row["equal"] for row in rows):
        raise click.ClickException(f"{altered} answers are not those of ar")


def _batches(prompts: Sequence[Prompt], size: int) -> Iterator[Sequence[Prompt]]:
    """Yield batch after batch, and begin again after the last."""
    while True:
        for start in range(0, len(prompts) - size + 1, size):
            yield prompts[start : start + size]


def _pairs(
    client: Client, batches: Iterator[Sequence[Prompt]], count: int, tokens: int, begin: threading.Event, title: str
) -> list[Pair]:
    for _ in range(_WARM_UP_RUNS):
        pair(client, next(batches), tokens, ("ar", "ssd"))
    begin.set()
    orders = (("ar", "ssd"), ("ssd", "ar"))
    numbers = track(range(count), description=title, transient=True)
    return [pair(client, next(batches), tokens, orders[number % 2]) for number in numbers]


def pair(client: Client, prompts: Sequence[Prompt], tokens: int, order: Sequence[str]) -> Pair:
    """Run both modes on these prompts."""
    # Target and draft keep the prompts that they have read: neither mode's turn may be the one that reads them.
    client.generate(prompts, SamplingParams(max_tokens=2, ignore_eos=True), chat=True)
    speeds: dict[str, float] = {}
    runs: dict[str, list[Completion]] = {}
    for mode in order:
        speculation = Speculation("ar") if mode == "ar" else None  # the engine's own
        params = SamplingParams(seed=0, max_tokens=tokens, ignore_eos=True, speculation=speculation)
        began = time.perf_counter()
        runs[mode] = client.generate(prompts, params, chat=True)
        speeds[mode] = sum(len(run.token_ids) for run in runs[mode]) / (time.perf_counter() - began)
    metrics = [run.metrics for run in runs["ssd"]]
    return Pair(
        speeds["ar"],
        speeds["ssd"],
        sum(m.rounds for m in metrics),
        sum(m.accepted_tokens for m in metrics),
        len(prompts),
        sum(a.token_ids == b.token_ids for a, b in zip(runs["ar"], runs["ssd"], strict=True)),
        metrics[-1].draft_step_ms,
    )


def figures(fault: str, batch: int, pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return medians over the pairs; `ratios` has every pair's."""
    ratios = [pair.ssd / pair.ar for pair in pairs]
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {
        "fault": fault,
        "batch": batch,
        "ar_tok_s": statistics.median(pair.ar for pair in pairs),
        "ssd_tok_s": statistics.median(pair.ssd for pair in pairs),
        "ratio": statistics.median(ratios),
        "quartiles": [quartiles[0], quartiles[2]],
        "ratios": ratios,
        "acceptance_length": 1 + sum(pair.accepted for pair in pairs) / sum(pair.rounds for pair in pairs),
        "draft_step_ms": statistics.median(pair.step_ms for pair in pairs),
        "answers": sum(pair.answers for pair in pairs),
        "equal": sum(pair.equal for pair in pairs),
    }


def _cells(row: dict[str, Any]) -> list[str]:
    low, high = row["quartiles"]
    speeds = [f"{row[key]:.1f}" for key in ("ar_tok_s", "ssd_tok_s")]
    ratio = f"{row['ratio']:.3f}" + ("" if row["ratio"] >= WANTED else " !")
    equal = f"{row['equal']}/{row['answers']}"
    draft = [f"{row['acceptance_length']:.2f}", f"{row['draft_step_ms']:.1f}"]
    draft.append(str(row["openings"]))
    return [row["fault"], str(row["batch"]), *speeds, ratio, f"{low:.3f}-{high:.3f}", *draft, equal]


def openings(engine: Engine) -> int:
    """Return how often the circuit breaker has given the draft up so far."""
    with urlopen(f"{engine.url}/metrics") as response:
        families = text_string_to_metric_families(response.read().decode())
    return sum(int(f.samples[0].value) for f in families if f.name == "ssd:draft_openings")


# -- faults -----------------------------------------------------------------------------------------------------------


@contextmanager
def _engine(config: EngineConfig, fault: Fault) -> Iterator[tuple[Engine, Client]]:
    """Yield an engine whose draft has the fault, if it is one to start with."""
    with tempfile.TemporaryDirectory() as folder:
        if fault.lying:
            assert config.draft is not None
            config = replace(config, draft=str(lying_copy(Path(config.draft), Path(folder) / "draft")))
        if fault.failpoints:
            config = replace(config, failpoints=True)
        os.environ["SSD_FAILPOINTS"] = fault.failpoints
        with running(config) as found:
            yield found


def lying_copy(source: Path, copy: Path) -> Path:
    """Write the same model with the numbers of every matrix in random order."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, copy)
    generator = torch.Generator().manual_seed(0)
    for file in copy.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if tensor.dim() > 1:
                tensors[name] = tensor.flatten()[torch.randperm(tensor.numel(), generator=generator)].view_as(tensor)
        save_file(tensors, file)
    return copy


@contextmanager
def disturbed(engine: Engine, fault: Fault) -> Iterator[threading.Event]:
    """Disturb the current draft, from when the event is set until the block ends."""
    begin, end = threading.Event(), threading.Event()
    disturb = _crowd if fault.hog else _stop_and_continue
    thread = threading.Thread(target=disturb, args=(engine, fault, begin, end))
    thread.start()
    try:
        yield begin
    finally:
        end.set()
        begin.set()
        thread.join()


def _stop_and_continue(engine: Engine, fault: Fault, begin: threading.Event, end: threading.Event) -> None:
    begin.wait()
    while fault.stopped and not end.is_set():
        _signal(engine, signal.SIGSTOP)
        end.wait(fault.stopped)
        if fault.runs:
            _signal(engine, signal.SIGCONT)
            end.wait(fault.runs)
    _signal(engine, signal.SIGCONT)


def _crowd(engine: Engine, fault: Fault, begin: threading.Event, end: threading.Event) -> None:
    begin.wait()
    while not end.is_set():
        with hog(engine.config.draft_cpus):
            end.wait(fault.hog)
        end.wait(fault.hog)


@contextmanager
def hog(cpus: Collection[int]) -> Iterator[None]:
    """Keep each of the cores busy with a process that counts, for as long as the block lasts."""
    found = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in cpus]
    try:
        for process, cpu in zip(found, cpus, strict=True):
            os.sched_setaffinity(process.pid, {cpu})
        yield
    finally:
        for process in found:
            process.kill()
            process.wait()


def _signal(engine: Engine, number: signal.Signals) -> None:
    pid = engine.pids.get("draft")
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


if __name__ == "__main__":
    main()
