"""The built-in pair under concurrent load: the tokens of plain decoding, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import os
import time
import urllib.request
from pathlib import Path
from random import Random

from msgspec.structs import replace

from ssd import SamplingParams
from ssd.client import AsyncClient, Client, Completion
from ssd.config.params import Speculation
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.launch.server import ServerOptions
from ssd.launch.supervisor import Engine

_STREAMS = 32
_DICE = Random(5)
_WORDS = ("the", "sea", "a", "ship", "on", "light", "two", "of", "green", "stones", "and", "wind", "before", "slow")
PROMPTS = [" ".join(_DICE.choices(_WORDS, k=_DICE.choice([3, 10, 40, 200]))) for _ in range(_STREAMS)]
PARAMS = [
    SamplingParams(
        temperature=_DICE.choice([0.0, 0.8]),
        seed=_DICE.randrange(1000),
        max_tokens=_DICE.choice([1, 5, 17, 40]),
        repetition_penalty=_DICE.choice([1.0, 1.0, 1.2]),
        ignore_eos=True,
    )
    for _ in range(_STREAMS)
]


async def concurrently(address: str) -> list[Completion]:
    """All at once; every fourth also aborts a twin of itself on the way."""

    async def one(client: AsyncClient, index: int) -> Completion:
        await asyncio.sleep(0.05 * index)
        if index % 4 == 0:
            async for _ in client.stream(PROMPTS[index], PARAMS[index]):
                break
        found = await client.generate(PROMPTS[index], PARAMS[index])
        assert isinstance(found, Completion)
        return found

    async with AsyncClient(address) as client:
        return await asyncio.gather(*[one(client, index) for index in range(_STREAMS)])


def held(engine: Engine) -> dict[str, tuple[int, int]]:
    """(descriptors, threads) of every process, when connections that are being closed have been: unchanged for 1 s."""
    looks: list[dict[str, tuple[int, int]]] = []
    while len(looks) < 10 or any(look != looks[-1] for look in looks[-10:]):
        looks.append(
            {
                role: (len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task")))
                for role, pid in engine.pids.items()
            }
        )
        time.sleep(0.1)
    return looks[-1]


def test_streams_of_mixed_lengths_say_what_each_says_alone() -> None:
    config = resolve(EngineOptions(), ServerOptions(port=0))
    with Engine(config) as engine:
        asyncio.run(concurrently(engine.address))  # what is made once has been made
        before = held(engine)
        found = asyncio.run(concurrently(engine.address))
        with Client(engine.address) as alone:
            plain = [alone.generate(prompt, _plain(params)) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
        assert [completion.token_ids for completion in found] == [completion.token_ids for completion in plain]
        assert held(engine) == before
        with urllib.request.urlopen(f"{engine.url}/server_info") as answer:
            info = json.load(answer)
        assert info["requests"] == {"open": 0, "running": 0, "waiting": 0}
        assert info["kv_cache_usage"] == 0
    assert not Path(engine.address.removeprefix("ipc://")).parent.exists()


def _plain(params: SamplingParams) -> SamplingParams:
    return replace(params, speculation=Speculation("ar"))
