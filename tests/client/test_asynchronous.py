"""The asyncio client against the real gateway: what many tasks on one connection add to the blocking one."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from ssd.client import AsyncClient
from ssd.config.params import SamplingParams
from ssd.errors import EngineDeadError
from ssd.ipc import sockets
from ssd.ipc.messages import Emission, Submit
from tests.client.serving import TOKENIZER, echo, endless, serving
from tests.scripted_engine import (
    Script,
    ScriptedEngine,
    ScriptedTarget,
    engine_config,
    gateway_thread,
    scripted_engine,
)


async def using(engine: ScriptedEngine, body: Callable[[AsyncClient], Coroutine[Any, Any, None]]) -> None:
    async with AsyncClient(engine.address) as client:
        await body(client)


def with_client(script: Script, body: Callable[[AsyncClient, ScriptedEngine], Coroutine[Any, Any, None]]) -> None:
    with serving(script) as engine:
        asyncio.run(asyncio.wait_for(using(engine, lambda client: body(client, engine)), 60))


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def read(client: AsyncClient, prompt: str) -> str:
    return "".join([chunk.text async for chunk in client.stream(prompt)])


def some_forever(submit: Submit) -> Any:
    """Endless for prompts that begin with "forever", an echo for others."""
    return endless(submit) if submit.token_ids[0] == TOKENIZER.encode("forever")[0] else echo(submit)


def test_tasks_share_the_connection_and_get_each_their_own() -> None:
    async def body(client: AsyncClient, engine: ScriptedEngine) -> None:
        prompts = ["word " * (1 + n % 7) + str(n) for n in range(300)]
        streams = [read(client, prompt) for prompt in prompts]
        batch = client.generate(prompts, SamplingParams(max_tokens=1))
        descriptions = [client.describe() for _ in range(5)]
        *texts, completions = await asyncio.gather(*streams, batch)
        assert texts == prompts
        assert [len(completion.token_ids) for completion in completions] == [1] * 300
        assert {description.model for description in await asyncio.gather(*descriptions)} == {"scripted"}

    with_client(echo, body)


def test_cancelling_a_task_or_closing_a_generator_cancels_the_request() -> None:
    async def body(client: AsyncClient, engine: ScriptedEngine) -> None:
        task = asyncio.create_task(read(client, "forever a"))
        batch = asyncio.create_task(client.generate(["forever b", "forever c"]))
        stream = client.stream("forever d")
        await anext(stream)
        await until(lambda: len(engine.target.open) == 4)
        task.cancel()
        batch.cancel()
        await stream.aclose()
        await asyncio.wait([task, batch])
        assert task.cancelled() and batch.cancelled()
        await until(lambda: not engine.target.open)
        assert len(set(engine.target.aborted)) == 4
        assert await read(client, "and on") == "and on"

    with_client(some_forever, body)


def test_tasks_that_come_and_go_at_random_disturb_no_other() -> None:
    async def body(client: AsyncClient, engine: ScriptedEngine) -> None:
        dice = random.Random(3)

        async def give_up(n: int) -> None:
            stream = client.stream(f"forever {n}")
            for _ in range(dice.randrange(5)):
                await anext(stream)
                await asyncio.sleep(dice.random() / 100)
            await stream.aclose()

        async def give_up_soon(n: int) -> None:
            task = asyncio.create_task(read(client, f"forever {n}"))
            await asyncio.sleep(dice.random() / 20)
            task.cancel()
            await asyncio.wait([task])

        prompts = ["word " * (1 + n % 9) + str(n) for n in range(100)]
        others = [(give_up, give_up_soon)[n % 2](n) for n in range(100)]
        texts = await asyncio.gather(*[read(client, prompt) for prompt in prompts], *others)
        assert texts[:100] == prompts
        await until(lambda: not engine.target.open)

    with_client(some_forever, body)


def test_a_cancel_does_not_swallow_the_news_for_others() -> None:
    """The transport tells of news once, and sending takes note of it, too."""

    async def body(client: AsyncClient, target: ScriptedTarget) -> None:
        left, kept = client.stream("a"), client.stream("b")
        first = [asyncio.create_task(anext(stream)) for stream in (left, kept)]
        submits = [await asyncio.to_thread(target.next_submit) for _ in first]
        target.step(*[Emission(submit.request, [28120]) for submit in submits])
        await asyncio.gather(*first)
        second = asyncio.create_task(anext(kept))
        await asyncio.sleep(0)  # it waits now
        target.step(*[Emission(submit.request, [28120], finish_reason="stop") for submit in submits])
        time.sleep(0.3)  # everything has arrived, and the event loop has not seen it
        await left.aclose()
        assert (await second).token_ids == [28120]

    with scripted_engine() as engine, gateway_thread(engine, engine_config()):
        asyncio.run(asyncio.wait_for(using(engine, lambda client: body(client, engine.target)), 20))


def test_unread_messages_do_not_keep_the_event_loop_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    pumped = 0
    pump = AsyncClient._pump

    def count(client: AsyncClient) -> None:
        nonlocal pumped
        pumped += 1
        pump(client)

    async def body(client: AsyncClient, engine: ScriptedEngine) -> None:
        nonlocal pumped
        stream = client.stream("one two three four five six")
        await anext(stream)
        await until(lambda: not engine.target.open)
        pumped = 0
        for _ in range(1000):
            await asyncio.sleep(0)
        assert pumped < 100
        assert [chunk async for chunk in stream][-1].completion is not None

    monkeypatch.setattr(AsyncClient, "_pump", count)
    with_client(echo, body)


def test_each_new_connection_is_listened_to() -> None:
    """A new socket may get the descriptor of the old one."""

    async def body(directory: str) -> None:
        client = AsyncClient(f"ipc://{directory}/{sockets.CLIENT}")
        for name in map(str, range(5)):
            engine = ScriptedEngine(directory)
            with gateway_thread(engine, engine_config(target_name=name)):
                assert (await client.describe()).model == name
            engine.close()
        await client.close()

    with scripted_engine() as engine:
        engine.close()
        asyncio.run(asyncio.wait_for(body(engine.directory), 30))


def test_closing_ends_an_open_stream() -> None:
    async def body(client: AsyncClient, engine: ScriptedEngine) -> None:
        open_stream = client.stream("forever")
        await anext(open_stream)
        await client.close()
        await client.close()
        with pytest.raises(EngineDeadError, match="this client is closed"):
            async for _ in open_stream:
                pass
        with pytest.raises(EngineDeadError, match="this client is closed"):
            await client.describe()

    with_client(some_forever, body)


def test_closing_ends_what_waits_for_a_connection() -> None:
    async def body() -> None:
        client = AsyncClient("ipc:///tmp/ssd-nowhere/client.sock", timeout=60)
        waiting = [asyncio.create_task(client.describe()), asyncio.create_task(read(client, "a"))]
        await asyncio.sleep(0)
        await client.close()
        for error in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(error, EngineDeadError) and str(error) == "this client is closed"

    asyncio.run(asyncio.wait_for(body(), 20))
