"""What recording states costs: two engines on the built-in pair, one with --no-telemetry, asked in turns.

    python tools/telemetry_cost.py ../shared/data/gsm8k.jsonl --prompts 20 --tokens 128

Prints the median time of a round with and without, the median of their ratios pair by pair, and, as differences under a
percent drown in what a machine does besides, what follows from the parts: records per round times the time of one.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import click
from rich.progress import track

from ssd import LLM, SamplingParams
from ssd.bench.datasets import from_jsonl
from ssd.bench.environment import environment
from ssd.ipc.messages import Metrics
from ssd.monitor.lanes import LANES, Lane, State
from ssd.monitor.subscriber import Subscriber

# The same plan in both engines: what the tuner finds differs from run to run.
_PLAN = {"num_speculative_tokens": 4, "fan_out": 3, "backup": "jit"}
_RECORDS = 200_000


@click.command(help=__doc__)
@click.argument("prompts_file", type=click.Path(exists=True, path_type=Path))
@click.option("--prompts", "count", default=20, show_default=True)
@click.option("--tokens", default=128, show_default=True)
def main(prompts_file: Path, count: int, tokens: int) -> None:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    with LLM(**_PLAN) as recording, LLM(**_PLAN, telemetry=False) as silent:
        for llm in (recording, silent):
            llm.generate("Warm up.", params, chat=True)
        before, pairs = records(recording), list[tuple[Metrics, Metrics]]()
        for prompt in track(from_jsonl(prompts_file, count), transient=True):
            for llm in (recording, silent):  # neither may be the one that reads the prompt first
                llm.generate(prompt, SamplingParams(max_tokens=2), chat=True)
            first, second = (llm.generate(prompt, params, chat=True)[0].metrics for llm in (recording, silent))
            pairs.append((first, second))
        written = {role: after - before[role] for role, after in records(recording).items()}
    rounds = sum(first.rounds for first, _ in pairs)
    on, off = (statistics.median(round_ms(metrics) for metrics in side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(round_ms(first) / round_ms(second) for first, second in pairs)
    one = record_us()
    click.echo(f"round: {on:.3f} ms with telemetry, {off:.3f} ms without; median of {len(pairs)} ratios {ratio:.4f}")
    for role, number in written.items():
        share = number / rounds * one / (1e3 * on)
        click.echo(f"{role}: {number / rounds:.1f} records a round, {one:.2f} µs each, {share:.3%} of a round")
    click.echo(environment())


def round_ms(metrics: Metrics) -> float:
    return metrics.verify_ms + metrics.draft_wait_ms + metrics.round_overhead_ms


def records(llm: LLM) -> dict[str, int]:
    """How many records each lane has had so far; fewer while something is still written."""
    subscriber = Subscriber(llm.engine.address)
    while (snapshot := subscriber.receive(1.0)) is None or not snapshot.whole:
        pass
    subscriber.close()
    return {lane.role: int.from_bytes(lane.records[-32:-24], "little") + 1 for lane in snapshot.lanes}


def record_us() -> float:
    """The time of one record, in µs."""
    lane = Lane(-1, LANES[0])
    began = time.perf_counter()
    for number in range(_RECORDS):
        lane.enter(State.DEPTH, number)
    return 1e6 * (time.perf_counter() - began) / _RECORDS


if __name__ == "__main__":
    main()
