"""Requests that arrive at random moments, and when their tokens come."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, Protocol

from ssd.bench.progress import bar
from ssd.client import AsyncClient, Prompt
from ssd.errors import RequestError
from ssd.ipc.messages import ChatMessage, Metrics
from ssd.params import SamplingParams


@dataclass
class Answer:
    """One request: when it was sent, when how many tokens came, when it ended (seconds of one clock). A request that
    failed has an `error`, its code."""

    sent: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    ended: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    metrics: Metrics | None = None
    error: str | None = None


class Load(NamedTuple):
    """All requests of one pass, and how long they took together."""

    answers: list[Answer]
    seconds: float


class Ask(Protocol):
    """A way to an engine, open for as long as its block lasts. A request that fails gives an answer that says so."""

    async def __aenter__(self) -> object: ...

    async def __aexit__(self, *error: object) -> None: ...

    async def __call__(self, prompt: Prompt, params: SamplingParams) -> Answer: ...


def poisson(count: int, rate: float, seed: int) -> list[float]:
    """Seconds from the beginning to each of `count` arrivals, `rate` a second; all at once where that is infinite."""
    if math.isinf(rate):
        return [0.0] * count
    dice = random.Random(seed)
    return list(accumulate(dice.expovariate(rate) for _ in range(count)))


async def drive(
    ask: Ask,
    requests: Sequence[tuple[Prompt, SamplingParams]],
    arrivals: Sequence[float],
    concurrency: int | None,
    description: str,
) -> Load:
    """Ask for each request when it arrives or, where `concurrency` others are open, once one of them has ended."""
    places = asyncio.Semaphore(concurrency or len(requests))
    began = time.perf_counter()

    async def one(arrival: float, prompt: Prompt, params: SamplingParams, advance: Callable[[], None]) -> Answer:
        await asyncio.sleep(max(0.0, began + arrival - time.perf_counter()))
        async with places:
            answer = await ask(prompt, params)
        advance()
        return answer

    with bar(len(requests), description) as advance:
        asked = [one(arrival, *request, advance) for arrival, request in zip(arrivals, requests, strict=True)]
        answers = await asyncio.gather(*asked)
    return Load(answers, time.perf_counter() - began)


class ZeroMQ:
    """An `Ask` to the engine at `address`. With `chat`, a text is what a user says."""

    def __init__(self, address: str, keys: Path | None, chat: bool) -> None:
        self._address, self._keys, self._chat = address, keys, chat

    async def __aenter__(self) -> ZeroMQ:
        self._client = await AsyncClient(self._address, keys=self._keys).__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def __call__(self, prompt: Prompt, params: SamplingParams) -> Answer:
        answer = Answer(time.perf_counter())
        if not isinstance(prompt, str):
            stream = self._client.stream(params=params, token_ids=prompt)
        elif self._chat:
            stream = self._client.stream(params=params, messages=[ChatMessage("user", prompt)])
        else:
            stream = self._client.stream(prompt, params)
        try:
            async with aclosing(stream):
                async for chunk in stream:
                    if chunk.token_ids:
                        answer.arrivals.append((time.perf_counter(), len(chunk.token_ids)))
                        answer.token_ids += chunk.token_ids
                    if chunk.completion is not None:
                        answer.metrics = chunk.completion.metrics
                        answer.prompt_tokens = chunk.completion.usage.prompt_tokens
                        answer.completion_tokens = chunk.completion.usage.completion_tokens
                        answer.cached_tokens = chunk.completion.metrics.cached_tokens
        except RequestError as error:
            answer.error = error.code
        answer.ended = time.perf_counter()
        return answer
