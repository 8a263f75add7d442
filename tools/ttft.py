"""How long a short request waits for its first token while a long prompt is read (docs/performance.md).

\b
    python tools/ttft.py --long 4000 --requests 20

One engine, mode ar and ssd in turn. The long prompt is read in chunks; while it is, short requests come one after
another, each at a random moment of a chunk. A chunk takes longer the more tokens are before it: a mean one takes the
time of the long prompt, read alone, over their number, the last one what the prompt takes more than without it.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from typing import NamedTuple

import click
from rich.console import Console

from ssd import LLM, SamplingParams
from ssd.cli.tables import grid
from ssd.client import AsyncClient
from ssd.params import Speculation

_SHORT = 12  # tokens of a short prompt
_TIMES = 3  # a long prompt is timed


@click.command(help=__doc__)
@click.option("--long", "length", default=4000, show_default=True, help="tokens of the long prompt")
@click.option("--chunk", default=256, show_default=True, help="tokens of a step")
@click.option("--requests", default=20, show_default=True, help="short ones, in each mode")
@click.option("--seed", default=0, show_default=True)
def main(length: int, chunk: int, requests: int, seed: int) -> None:
    dice = random.Random(seed)
    rows = []
    with LLM(max_model_len=length + 64, max_num_batched_tokens=chunk, max_num_seqs=4) as llm:
        vocabulary = llm.engine.config.vocab_size
        for mode in ("ar", "ssd"):
            speculation = Speculation(mode) if mode == "ar" else llm.engine.config.speculation
            found = asyncio.run(_measure(llm.engine.address, vocabulary, length, chunk, requests, speculation, dice))
            step, last = found.whole / -(-length // chunk), found.last
            middle, worst = statistics.median(found.short), max(found.short)
            cells = (f"{1e3 * seconds:.0f}" for seconds in (step, last, middle, worst))
            rows.append([mode, *cells, f"{middle / step:.2f}", f"{worst / step:.2f}", f"{worst / last:.2f}"])
    columns = ["mode", "chunk ms", "last", "ttft ms, median", "worst", "in chunks, median", "worst", "in last ones"]
    Console(width=120).print(grid(f"{requests} short requests while {length} tokens are read", columns, rows))


class _Found(NamedTuple):
    """Seconds: of a long prompt alone, of its last chunk, and to the first token of each short request beside one."""

    whole: float
    last: float
    short: list[float]


async def _measure(
    address: str, vocabulary: int, length: int, chunk: int, requests: int, speculation: Speculation, dice: random.Random
) -> _Found:

    def prompt(count: int) -> list[int]:
        return [dice.randrange(1000, vocabulary) for _ in range(count)]

    params = SamplingParams(max_tokens=2, ignore_eos=True, speculation=speculation)
    async with AsyncClient(address) as client:
        await client.generate([prompt(_SHORT)], params)  # warm
        alone = statistics.median([await _first(client, prompt(length), params) for _ in range(_TIMES)])
        but_one = statistics.median([await _first(client, prompt(length - chunk), params) for _ in range(_TIMES)])
        found: list[float] = []
        while len(found) < requests:
            reading = asyncio.create_task(_first(client, prompt(length), params))
            await asyncio.sleep(0.1 * alone)
            while len(found) < requests and not reading.done():
                await asyncio.sleep(dice.random() * 0.1 * alone)
                took = await _first(client, prompt(_SHORT), params)
                if not reading.done():  # else it was alone for a part of the time
                    found.append(took)
            await reading
        return _Found(alone, alone - but_one, found)


async def _first(client: AsyncClient, prompt: list[int], params: SamplingParams) -> float:
    """Seconds from asking to the first token."""
    began = time.perf_counter()
    took = None
    async for _ in client.stream(token_ids=prompt, params=params):
        took = took or time.perf_counter() - began
    assert took is not None
    return took


if __name__ == "__main__":
    main()
