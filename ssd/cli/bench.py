"""`ssd bench`: modes side by side, by turns, with their ids compared."""

from __future__ import annotations

import os

import click
from msgspec.structs import replace

from ssd.bench.setup import PLAIN, Setup
from ssd.cli.bench_job import base_speculation, check_ids, measuring, modes_to_compare, publish
from ssd.cli.bench_options import SWEPT, BenchOptions, bench_options, setup_options
from ssd.cli.bench_serve import serve
from ssd.cli.command import GroupedCommand, main_option
from ssd.cli.options import engine_options
from ssd.errors import UsageError
from ssd.launch.options import EngineOptions, chosen

_LATENCY = """
ssd bench latency
ssd bench latency --model ./model.gguf --modes ar,ngram --prompts 5
ssd bench latency --dataset humaneval --temperature 0 --temperature 1 --json latency.json
"""
_THROUGHPUT = """
ssd bench throughput --batch-size 1 --batch-size 4
ssd bench throughput --model ./model.gguf --draft ./small.gguf
ssd bench throughput --dataset random --input-len 512 --tokens 64
"""
_PERPLEXITY = click.option("--perplexity", is_flag=True, help="How likely the target finds what each mode said.")


@click.group()
def bench() -> None:
    """Measure speed: modes side by side on the same prompts, by turns.

    Every answer's ids are compared with those of ar in the same run; where they differ the exit status is 1."""


@bench.command(cls=GroupedCommand, examples=_LATENCY)
@engine_options(without=SWEPT)
@bench_options
@setup_options
@_PERPLEXITY
def latency(
    asked: BenchOptions,
    perplexity: bool,
    engine: EngineOptions,
    setup: Setup = PLAIN,
) -> None:
    """One request at a time: speed of decoding, and the parts of a round beside what theory makes of them."""
    from ssd.bench.runs import latency as run

    settings = asked.sweep(modes_to_compare(engine, setup)).settings(base_speculation(engine, setup))
    with measuring("latency", asked, asked.texts(), engine, settings, setup) as job:
        for temperature in asked.temperatures:
            runs = run(job.client, job.prompts, job.settings, temperature, job.protocol)
            job.report.rows += job.rows(runs, temperature, perplexity)
    publish(job.report, asked, f"medians over {len(job.prompts)} prompts, {asked.tokens} tokens each")
    check_ids(job.report)


@bench.command(cls=GroupedCommand, examples=_THROUGHPUT)
@engine_options(without=SWEPT)
@bench_options
@setup_options
@main_option(
    "--batch-size",
    "batch_sizes",
    type=click.IntRange(1, 1024),
    multiple=True,
    default=(8,),
    show_default=True,
    help="Requests at the same time; may be given several times, for a table each. More than --max-num-seqs wait.",
)
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="Times that all prompts are run.")
@_PERPLEXITY
def throughput(
    asked: BenchOptions,
    batch_sizes: tuple[int, ...],
    repeats: int,
    perplexity: bool,
    engine: EngineOptions,
    setup: Setup = PLAIN,
) -> None:
    """All prompts in batches: tokens a second of the whole batch."""
    from ssd.bench.runs import throughput as run

    settings = asked.sweep(modes_to_compare(engine, setup)).settings(base_speculation(engine, setup))
    texts = asked.texts()
    count = asked.prompts if texts is None else len(texts)
    if max(batch_sizes) > count:
        raise UsageError(f"--batch-size {max(batch_sizes)} is more than the {count} prompts there are")
    if engine.max_num_seqs is None:
        engine = replace(engine, max_num_seqs=max(chosen(engine).max_num_seqs, *batch_sizes))
    with measuring("throughput", asked, texts, engine, settings, setup) as job:
        for temperature in asked.temperatures:
            for size in batch_sizes:
                runs = run(job.client, job.prompts, job.settings, temperature, job.protocol, size, repeats)
                found = job.rows(runs, temperature, perplexity)
                job.report.rows += [row | {"batch_size": size} for row in found]
    about = f"medians over {repeats} runs of {len(job.prompts)} prompts, {asked.tokens} tokens each"
    publish(job.report, asked, about)
    check_ids(job.report)


@bench.command()
@click.option("--threads", type=click.IntRange(1, 256), help="Default: as many as the cores of this process.")
def kernels(threads: int | None) -> None:
    """Time the CPU's products by rows, and of one row the bytes a second beside a loop that only reads them.

    Weights of 64 MiB of each kind, on this machine as it is now; nothing is kept."""
    import torch
    from rich.console import Console
    from rich.table import Table

    from ssd.kernels import cpu
    from ssd.kernels.timing import ROWS, speeds

    if not cpu.multiply_floats(torch.empty(1, 1)):
        raise UsageError("this machine has no kernels of ours: no C compiler, or neither AVX2 nor NEON")
    threads = threads or len(os.sched_getaffinity(0))
    table = Table(
        f"{threads} threads", "inputs", *(f"{n} ms" for n in ROWS), "5 over 1", "8 over 1", "GB/s", "of reading"
    )
    for speed in speeds(threads):
        ratios = [f"{speed.seconds[n] / speed.seconds[1]:.2f}" for n in (5, 8)]
        rate = f"{speed.bytes / speed.seconds[1] / 1e9:.1f}"
        times = [f"{1e3 * seconds:.2f}" for seconds in speed.seconds.values()]
        table.add_row(speed.weights, speed.inputs, *times, *ratios, rate, f"{speed.of_reading:.2f}")
    Console(width=160).print(table)


bench.add_command(serve)
