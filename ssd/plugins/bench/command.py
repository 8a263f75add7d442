"""`ssd bench`: modes side by side, by turns, with their ids compared."""

from __future__ import annotations

from typing import Any

import click
from msgspec.structs import replace

from ssd.cli.command import GroupedCommand
from ssd.cli.options import engine_options, table_options
from ssd.config.engine import NEVER_S
from ssd.errors import UsageError
from ssd.launch.options import EngineOptions, chosen
from ssd.plugins.bench.emulation.options import emulation_options, setup_of
from ssd.plugins.bench.environment import engine_facts, hardware, runs_on
from ssd.plugins.bench.options import KINDS, SWEPT, BatchOptions
from ssd.plugins.bench.serve import serve
from ssd.plugins.bench.settings import base_speculation, default_modes, sized
from ssd.plugins.bench.setup import Setup

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


@click.group()
def bench() -> None:
    """Measure speed: modes side by side on the same prompts, by turns.

    Every answer's ids are compared with those of ar in the same run; where they differ the exit status is 1."""


def _add(benchmark: str, defaults: BatchOptions, examples: str, about: str) -> None:
    @bench.command(benchmark, cls=GroupedCommand, examples=examples, help=about)
    @engine_options(without=SWEPT)
    @table_options(defaults, "asked", kinds=KINDS, variables=False)
    @emulation_options
    def measured(asked: BatchOptions, engine: EngineOptions, **emulation: Any) -> None:
        _measure(benchmark, asked, engine, setup_of(asked, **emulation))


def _measure(benchmark: str, asked: BatchOptions, engine: EngineOptions, setup: Setup) -> None:
    from ssd.cli.session import process_setup, session
    from ssd.plugins.bench.figures import rows
    from ssd.plugins.bench.report import BenchReport, publish
    from ssd.plugins.bench.runs import measure, perplexities

    base = base_speculation(engine, setup.allocation)
    settings = asked.sweep(default_modes(engine, setup.has_draft)).settings(base)
    texts, largest = asked.texts(), max(asked.batch_size)
    count = asked.prompts if texts is None else len(texts)
    if largest > count:
        raise UsageError(f"--batch-size {largest} is more than the {count} prompts there are")
    if engine.max_num_seqs is None:
        engine = replace(engine, max_num_seqs=max(chosen(engine).max_num_seqs, largest))
    with setup.configured(sized(engine, settings)) as config:
        config = replace(config, idle_draft_s=NEVER_S)  # the draft must not leave before its mode is measured
        asked.tell_left_out(engine, settings)
        with process_setup(), session(config) as client:
            protocol = asked.protocol(client.describe().chat)
            prompts = asked.requests(texts, config.vocab_size)
            workload = asked.workload(protocol, count)
            report = BenchReport(benchmark, engine_facts(config), workload, hardware(config), setup)
            decoding = asked.batch_size == (1,)  # else all rows have one meaning of speed
            for temperature in asked.temperature:
                for size in asked.batch_size:
                    runs = measure(client, prompts, settings, temperature, protocol, size, asked.repeats, decoding)
                    likely = perplexities(client, runs) if asked.perplexity else {}
                    for setting, row in zip(settings, rows(settings, runs, temperature), strict=True):
                        row |= {"batch_size": size, "runs_on": runs_on(config, setting.speculation.mode) or None}
                        report.rows.append(row | ({"perplexity": likely[setting.name]} if likely else {}))
    publish(report, asked.out, f"medians, {count} prompts of {asked.tokens} tokens")


_add("latency", BatchOptions(), _LATENCY, "One request at a time: speed of decoding, and the parts of a round.")
_add(
    "throughput",
    BatchOptions(batch_size=(8,), repeats=5),
    _THROUGHPUT,
    "As latency, in batches of 8, five times: tokens a second of a whole batch.",
)
bench.add_command(serve)
