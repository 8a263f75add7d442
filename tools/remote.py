"""Measures a draft on another machine: tokens per second of `ar`, local `ssd` and `ssd` over links of several lengths.

    python -m tools.remote --rtt 0 5 20 80                        # the paper's pair on emulated devices
    python -m tools.remote --rtt 0 5 20 --built-in --turns 6      # the built-in pair, a core for each model

All engines run on this machine, one after the other; in each, `ar` and `ssd` answer the same prompts in turn. The link
is `tools.link`. Exit status 1 if an id differs from `ar`."""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
from msgspec.structs import replace

from ssd.client import Client
from ssd.config.emulation import ForwardTime
from ssd.config.engine import DraftLink, EngineConfig, Upstream
from ssd.config.params import SamplingParams, Speculation
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.launch.supervisor import Engine
from ssd.plugins.bench.emulation.agreement import PRESETS
from ssd.plugins.bench.emulation.chains import write_pair
from ssd.plugins.remote.configuration import remote_draft
from tools.processes import command, environment

# What an idle engine in mode `auto` takes to measure a draft that has joined.
_MEASURES_S = 4.0
_PROMPTS = [
    "The history of the city begins",
    "In the morning, she",
    "def add(a, b):\n",
    "Water is",
    "1, 2, 3, 4,",
    "Why",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rtt", type=float, nargs="+", default=[0.0, 5.0, 20.0], help="milliseconds")
    parser.add_argument("--pair", choices=sorted(PRESETS), default=sorted(PRESETS)[0])
    parser.add_argument("--verify", type=float, help="milliseconds of a verification  [default: the pair's]")
    parser.add_argument("--built-in", action="store_true", help="the built-in pair, for real")
    parser.add_argument("--mode", choices=("ssd", "auto"), default="ssd")
    parser.add_argument("--backup", default="auto")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--local", action=argparse.BooleanOptionalAction, default=True, help="measure a local draft too"
    )
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ssd-remote-") as folder:
        config, draft, speculation = _pair(asked, Path(folder))
        print("| draft | ar tok/s | ssd tok/s | ssd over ar | hit rate | tokens a round | ids of ar |", flush=True)
        print("|---|---|---|---|---|---|---|")
        right = True
        for rtt in ([None] if asked.local else []) + asked.rtt:
            with _engine(config, draft, rtt) as client:
                right &= _measure(client, "here" if rtt is None else f"{rtt:g} ms away", speculation, asked)
    sys.exit(not right)


def _pair(asked: argparse.Namespace, folder: Path) -> tuple[EngineConfig, EngineConfig, Speculation]:
    """The engine with a draft here, the draft as `ssd draft` would run it, and how requests are speculated on."""
    loopback = Upstream(draft_connect="tcp://127.0.0.1:1")
    if asked.built_in:
        options = EngineOptions(mode=asked.mode, target_cpus="0", draft_cpus="1", backup=asked.backup)
        config = resolve(options)
        return config, remote_draft(loopback, "smollm2-draft", None, EngineOptions()), config.speculation
    preset = PRESETS[asked.pair]
    times = preset.times
    if asked.verify is not None:
        times = replace(times, verify=ForwardTime(asked.verify / 1000))
    pair = write_pair(folder, preset.agreement(asked.temperature))
    exact = {"draft_dtype": "float32", "draft_weights": "as-is"}
    lookahead, fan_out = preset.lookahead, (preset.fan_out,)
    options = EngineOptions(
        target=str(pair.target),
        draft=(str(pair.draft),),
        mode=asked.mode,
        backup=asked.backup,
        num_speculative_tokens=lookahead,
        fan_out=fan_out,
        target_cpus="0",
        draft_cpus="1",
        **exact,
    )
    config = replace(resolve(options), emulate=times, elastic_cores=False)
    draft = remote_draft(loopback, str(pair.draft), None, EngineOptions(**exact))
    return config, replace(draft, emulate=times), config.speculation


@contextmanager
def _engine(config: EngineConfig, draft: EngineConfig, rtt: float | None) -> Iterator[Client]:
    """An engine with its draft here, or `rtt` milliseconds away."""
    with ExitStack() as stack:
        if rtt is not None:
            port, far = _free_port(), _free_port()
            link = DraftLink(bind=f"tcp://127.0.0.1:{port}")
            config = replace(config, draft=None, link=link, draft_cpus=(), elastic_cores=False)
        client = stack.enter_context(Client(stack.enter_context(Engine(config)).address))
        if rtt is not None:
            ends = f"127.0.0.1:{far}", f"127.0.0.1:{port}"
            stack.enter_context(_process(command("tools.link", *ends, "--delay", str(rtt / 2))))
            own = replace(draft, upstream=Upstream(draft_connect=f"tcp://127.0.0.1:{far}"))
            stack.enter_context(_draft(own))
            if config.speculation.mode == "auto":
                time.sleep(_MEASURES_S)
        yield client


@contextmanager
def _process(arguments: list[str], **options: object) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(arguments, env=environment() | {"OMP_NUM_THREADS": "1"}, text=True, **options)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def _draft(draft: EngineConfig) -> Iterator[None]:
    """A draft that has joined, on the second core."""
    payload = os.memfd_create("ssd-draft")
    os.write(payload, msgspec.json.encode(draft))
    os.lseek(payload, 0, os.SEEK_SET)
    arguments = ["taskset", "-c", "1", *command("ssd.plugins.remote.drafter", str(payload))]
    with _process(arguments, stdout=subprocess.PIPE, pass_fds=(payload,)) as process:
        assert process.stdout is not None and process.stdout.readline().startswith("drafting for")
        os.close(payload)
        yield


def _measure(client: Client, where: str, speculation: Speculation, asked: argparse.Namespace) -> bool:
    """Print a line of the table; returns whether all ids were those of `ar`."""
    speeds: dict[str, list[float]] = {"ar": [], "ssd": []}
    hits, lengths, right = [], [], 0
    for turn in range(-1, asked.turns):  # the first one warms up
        ids = {}
        for name, how in (("ar", Speculation("ar")), ("ssd", speculation)):
            params = SamplingParams(
                max_tokens=asked.tokens, ignore_eos=True, speculation=how, seed=turn + 1, temperature=asked.temperature
            )
            prompt = _PROMPTS[turn % len(_PROMPTS)]
            given = prompt if asked.built_in else [(7 * turn + n) % 100 for n in range(1, 9)]
            (answer,) = client.generate([given], params)
            ids[name] = answer.token_ids
            if turn >= 0:
                speeds[name].append(answer.metrics.tokens_per_second)
        if turn >= 0:
            hits.append(answer.metrics.hit_rate)
            lengths.append(answer.metrics.mean_acceptance_length)
            right += ids["ar"] == ids["ssd"]
    ratios = [fast / plain for fast, plain in zip(speeds["ssd"], speeds["ar"], strict=True)]
    plain, fast = (statistics.median(speeds[name]) for name in speeds)
    figures = f"{plain:.1f} | {fast:.1f} | {statistics.median(ratios):.2f}"
    told = f"{statistics.mean(hits):.2f} | {statistics.mean(lengths):.2f} | {right} of {asked.turns}"
    print(f"| {where} | {figures} | {told} |", flush=True)
    return right == asked.turns


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


if __name__ == "__main__":
    main()
