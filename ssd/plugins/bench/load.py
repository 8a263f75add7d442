"""Sends requests at random moments, records when their tokens come, and computes figures."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ssd.client import AsyncClient, Prompt
from ssd.config.params import SamplingParams
from ssd.errors import RequestError
from ssd.ipc.public import ChatMessage, Metrics
from ssd.plugins.bench.figures import Row
from ssd.plugins.bench.runs import bar


@dataclass
class TimedAnswer:
    """The answer to one request: times in seconds of one clock, `arrivals` as (time, tokens)."""

    sent: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    ended: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    metrics: Metrics | None = None
    error: str | None = None


class Pass(NamedTuple):
    answers: list[TimedAnswer]
    seconds: float


def poisson(count: int, rate: float, seed: int) -> list[float]:
    """Return `count` Poisson arrivals at `rate` a second, in seconds from the start; inf: all at 0."""
    if math.isinf(rate):
        return [0.0] * count
    dice = random.Random(seed)
    return list(accumulate(dice.expovariate(rate) for _ in range(count)))


async def drive(
    ask: Callable[[Prompt, SamplingParams], Awaitable[TimedAnswer]],
    requests: Sequence[tuple[Prompt, SamplingParams]],
    arrivals: Sequence[float],
    concurrency: int | None,
    description: str,
) -> Pass:
    """Send each request at its arrival time, or later when fewer than `concurrency` are open."""
    places = asyncio.Semaphore(concurrency or len(requests))
    began = time.perf_counter()

    async def one(arrival: float, prompt: Prompt, params: SamplingParams, advance: Callable[[], None]) -> TimedAnswer:
        await asyncio.sleep(max(0.0, began + arrival - time.perf_counter()))
        async with places:
            answer = await ask(prompt, params)
        advance()
        return answer

    with bar(len(requests), description) as advance:
        asked = [one(arrival, *request, advance) for arrival, request in zip(arrivals, requests, strict=True)]
        answers = await asyncio.gather(*asked)
    return Pass(answers, time.perf_counter() - began)


class ZeroMQ:
    """An engine's ZeroMQ address; a call sends a request, whose failure is in the `TimedAnswer`.

    With `chat`, a text is a user's message."""

    def __init__(self, address: str, keys: Path | None, chat: bool) -> None:
        self._address, self._keys, self._chat = address, keys, chat

    async def __aenter__(self) -> ZeroMQ:
        self._client = await AsyncClient(self._address, keys=self._keys).__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def __call__(self, prompt: Prompt, params: SamplingParams) -> TimedAnswer:
        answer = TimedAnswer(time.perf_counter())
        said = [ChatMessage("user", prompt)] if self._chat and isinstance(prompt, str) else prompt
        stream = self._client.stream(said, params)
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


def load_figures(passes: Sequence[Pass]) -> Row:
    """Return the figures of all passes together, by the names of `vllm bench serve`.

    `itl` is per token: a `chunk_gap` divided by its tokens. `e2el` runs from sending to the end; `tpot` is (e2el -
    ttft) / (tokens - 1)."""
    answers = [answer for each in passes for answer in each.answers]
    completed = [answer for answer in answers if answer.error is None and answer.arrivals]
    errors = Counter(answer.error or "no tokens" for answer in answers if answer.error or not answer.arrivals)
    seconds = sum(each.seconds for each in passes)
    read = sum(answer.prompt_tokens for answer in completed)
    written = sum(answer.completion_tokens for answer in completed)
    row: Row = {
        "duration": seconds,
        "num_prompts": len(answers),
        "completed": len(completed),
        "failed": errors.total(),
        "errors": dict(errors),
        "total_input_tokens": read,
        "total_output_tokens": written,
        "cached_input_tokens": sum(answer.cached_tokens for answer in completed),
        "request_throughput": len(completed) / seconds,
        "output_throughput": written / seconds,
        "total_token_throughput": (read + written) / seconds,
        "max_concurrent_requests": max(most_open(each.answers) for each in passes),
    }
    for name, times in {
        "ttft": [_ttft(answer) for answer in completed],
        "tpot": [tpot for answer in completed for tpot in _tpot(answer)],
        "itl": [gap / count for answer in completed for gap, count in _gaps(answer) for _ in range(count)],
        "chunk_gap": [gap for answer in completed for gap, _ in _gaps(answer)],
        "e2el": [answer.ended - answer.sent for answer in completed],
    }.items():
        row |= _spread(name, times)
    return row | _speculation(completed)


def equal_answers(passes: Sequence[Pass], reference: Sequence[Pass]) -> Row:
    """Count the answers whose ids equal the reference's, among those completed in both."""
    ours, theirs = ([answer for each in some for answer in each.answers] for some in (passes, reference))
    both = [(a, b) for a, b in zip(ours, theirs, strict=True) if a.error is None and b.error is None]
    return {"answers": len(both), "equal_to_ar": sum(a.token_ids == b.token_ids for a, b in both)}


def most_open(answers: Sequence[TimedAnswer]) -> int:
    changes = sorted([(answer.ended, -1) for answer in answers] + [(answer.sent, 1) for answer in answers])
    return max(accumulate(change for _, change in changes), default=0)


def _ttft(answer: TimedAnswer) -> float:
    return answer.arrivals[0][0] - answer.sent


def _tpot(answer: TimedAnswer) -> Iterator[float]:
    if answer.completion_tokens > 1:
        yield (answer.ended - answer.sent - _ttft(answer)) / (answer.completion_tokens - 1)


def _gaps(answer: TimedAnswer) -> Iterator[tuple[float, int]]:
    for (before, _), (after, count) in pairwise(answer.arrivals):
        yield after - before, count


def _spread(name: str, seconds: Sequence[float]) -> Row:
    if not seconds:
        return {}
    times = [1e3 * value for value in seconds]
    return {
        f"mean_{name}_ms": statistics.fmean(times),
        f"median_{name}_ms": statistics.median(times),
        f"std_{name}_ms": statistics.pstdev(times),
        f"p99_{name}_ms": float(np.quantile(times, 0.99)),
    }


def _speculation(answers: Sequence[TimedAnswer]) -> Row:
    metrics = [answer.metrics for answer in answers if answer.metrics is not None]
    rounds = sum(m.rounds for m in metrics)
    if not rounds:
        return {}
    looked_up = sum(m.hits + m.misses for m in metrics)
    return {
        **({"plan": metrics[-1].plan} if metrics[-1].plan else {}),
        "acceptance_length": 1 + sum(m.accepted_tokens for m in metrics) / rounds,
        "hit_rate": sum(m.hits for m in metrics) / looked_up if looked_up else None,
    }
