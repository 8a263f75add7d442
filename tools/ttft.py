"""How long a short request waits for its first token while a long prompt is read (docs/performance.md).

\b
    python tools/ttft.py --long 4000 --requests 20

One engine, modes ar and ssd by turns, a long prompt each. While it is read in chunks, short requests come one after
another: each at a random moment after the first token of the one before, which goes on. A third request, which decodes
plainly and so gets one token in every step, shows when each step ended: what a chunk takes is measured where the short
ones wait, since it takes longer the more tokens are before it. A short one that comes just after a step has begun waits
for the rest of that step and for its own: two steps, and at most two chunks' time.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from itertools import pairwise

import click
from rich.console import Console
from rich.progress import Progress

from ssd import LLM, SamplingParams
from ssd.cli.tables import grid
from ssd.client import AsyncClient, StreamChunk
from ssd.params import Speculation

_SHORT = 12  # tokens of a short prompt
_GOES_ON = 8  # tokens that it asks for
_TOGETHER_S = 0.02  # what one step brings arrives within this time
_MODES = ("ar", "ssd")


@click.command(help=__doc__)
@click.option("--long", "length", default=4000, show_default=True, help="tokens of the long prompts")
@click.option("--chunk", default=256, show_default=True, help="tokens of a step")
@click.option("--requests", default=20, show_default=True, help="short ones, in each mode")
@click.option("--target", default="smollm2", show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(length: int, chunk: int, requests: int, target: str, seed: int) -> None:
    with LLM(target, max_model_len=length + 64, max_num_batched_tokens=chunk, max_num_seqs=8) as llm:
        config = llm.engine.config
        speculation = {"ar": Speculation("ar"), "ssd": config.speculation}
        found = asyncio.run(_measure(llm.engine.address, config.vocab_size, length, requests, speculation, seed))
    columns = ["mode", "long ones", "chunk ms, mean", "longest", "", "median", "p90", "worst"]
    rows = [row for mode in _MODES for row in _rows(mode, found[mode])]
    Console(width=120).print(grid(f"first token of {requests} short requests beside {length} tokens", columns, rows))


@dataclass
class _Reading:
    """What happened while one long prompt was read. Times in seconds: when it was asked for, when it was read, when
    each step ended, when each short request came and got its first token."""

    asked: float
    read: float = 0.0
    ends: list[float] = field(default_factory=list)
    short: list[tuple[float, float]] = field(default_factory=list)

    @property
    def chunks(self) -> list[float]:
        """Seconds of each step, from the first one that has some of the long prompt to the one that ends it."""
        ends = [end for end in self.ends if self.asked < end < self.read + _TOGETHER_S]
        return [after - before for before, after in pairwise(ends)]

    def steps(self, came: float, first: float) -> int:
        """How many steps a short request has seen, in whole or in part."""
        return 1 + sum(came < end < first - _TOGETHER_S for end in self.ends)


async def _measure(
    address: str, vocabulary: int, length: int, requests: int, speculation: dict[str, Speculation], seed: int
) -> dict[str, list[_Reading]]:
    """Long prompts of each mode by turns, until there were enough short requests beside them."""
    found: dict[str, list[_Reading]] = {mode: [] for mode in speculation}
    dice = random.Random(seed)
    async with AsyncClient(address) as client:
        with Progress(transient=True) as progress:
            task = progress.add_task("short requests", total=requests * len(speculation))
            while short := [mode for mode in speculation if _count(found[mode]) < requests]:
                for mode in short:
                    prober = _Prober(client, vocabulary, speculation[mode], dice)
                    missing = requests - _count(found[mode])
                    found[mode].append(await prober.read(length, missing))
                    if not found[mode][-1].short:
                        raise click.UsageError(f"{length} tokens are read before a short request can come")
                    progress.update(task, completed=sum(map(_count, found.values())))
    return found


def _count(readings: list[_Reading]) -> int:
    return sum(len(reading.short) for reading in readings)


class _Prober:
    """Asks for a long prompt and, while it is read, for short ones."""

    def __init__(self, client: AsyncClient, vocabulary: int, speculation: Speculation, dice: random.Random) -> None:
        self._client, self._vocabulary, self._speculation, self._dice = client, vocabulary, speculation, dice

    async def read(self, length: int, most: int) -> _Reading:
        """One long prompt, with at most so many short requests beside it."""
        probe = self._stream(_SHORT, length, Speculation("ar"))
        await anext(probe)
        reading = _Reading(time.perf_counter())
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(_note_ends(probe, reading))
            long = group.create_task(_drain(self._stream(length, 1, self._speculation)))
            await self._pause(reading)
            while not long.done() and len(reading.short) < most:
                came = time.perf_counter()
                stream = self._stream(_SHORT, _GOES_ON, self._speculation)
                await anext(stream)
                first = time.perf_counter()
                group.create_task(_drain(stream))
                if not long.done():  # else it was alone for a part of the time
                    reading.short.append((came, first))
                await self._pause(reading)
            reading.read = await long
            await asyncio.sleep(_TOGETHER_S)
            watching.cancel()
        await probe.aclose()
        return reading

    async def _pause(self, reading: _Reading) -> None:
        """Up to as long as the last step took, once there was one with some of the long prompt."""
        while len(reading.ends) < 3:
            await asyncio.sleep(_TOGETHER_S)
        await asyncio.sleep(self._dice.random() * (reading.ends[-1] - reading.ends[-2]))

    def _stream(self, prompt: int, tokens: int, speculation: Speculation) -> AsyncGenerator[StreamChunk, None]:
        ids = [self._dice.randrange(1000, self._vocabulary) for _ in range(prompt)]
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, speculation=speculation)
        return self._client.stream(token_ids=ids, params=params)


async def _note_ends(probe: AsyncGenerator[StreamChunk, None], reading: _Reading) -> None:
    async for _ in probe:
        reading.ends.append(time.perf_counter())


async def _drain(stream: AsyncGenerator[StreamChunk, None]) -> float:
    """When a stream ended."""
    async for _ in stream:
        pass
    return time.perf_counter()


def _rows(mode: str, readings: list[_Reading]) -> list[list[str]]:
    """Median, 90th percentile and worst of the first tokens of one mode, in each unit."""
    chunks = [second for reading in readings for second in reading.chunks]
    waits = [(reading, came, first) for reading in readings for came, first in reading.short]
    units = {
        "ms": [1e3 * (first - came) for _, came, first in waits],
        "mean chunks": [(first - came) / statistics.mean(reading.chunks) for reading, came, first in waits],
        "longest chunks": [(first - came) / max(reading.chunks) for reading, came, first in waits],
        "steps": [float(reading.steps(came, first)) for reading, came, first in waits],
    }
    rows = []
    for unit, values in units.items():
        head = [mode, str(len(readings)), f"{1e3 * statistics.mean(chunks):.0f}", f"{1e3 * max(chunks):.0f}"]
        marks = statistics.median(values), _ninetieth(values), max(values)
        digits = 0 if unit in ("ms", "steps") else 2
        rows.append([*(head if not rows else [""] * 4), unit, *(f"{mark:.{digits}f}" for mark in marks)])
    return rows


def _ninetieth(values: list[float]) -> float:
    return sorted(values)[math.ceil(0.9 * len(values)) - 1]


if __name__ == "__main__":
    main()
