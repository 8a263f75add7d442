"""The questions of a soak: chats of mixed lengths, asked again and again, so that their answers are known."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Literal, NamedTuple

from ssd.config.params import SamplingParams
from ssd.ipc.public import ChatMessage

Fate = Literal["whole", "abort", "disconnect"]

_SHORTEST = 8
_TOPICS = ("the sea", "bread", "railways", "prime numbers", "the moon", "a lost key", "clay", "rivers in winter")
_TASKS = (
    "Tell me in one sentence what you know about {}.",
    "Write a short story about {}.",
    "List ten facts about {}, one a line, with numbers.",
    "Write a Python function whose name has to do with {}, with a docstring, then explain it line by line.",
    "Here are notes about {0}. They repeat themselves. "
    + "I saw {0} today and thought of {0} again. " * 12
    + "Sum up.",
)


class Request(NamedTuple):
    """A chat of the pool. `number` is its place there, and its seed."""

    number: int
    messages: list[ChatMessage]
    params: SamplingParams


def pool(count: int, longest: int, seed: int) -> list[Request]:
    """Return `count` different chats with answers of 8 to `longest` tokens; every other one is sampled."""
    dice = random.Random(seed)
    requests = []
    for number in range(count):
        task, topic = _TASKS[number % len(_TASKS)], _TOPICS[number // len(_TASKS) % len(_TOPICS)]
        message = ChatMessage("user", f"{number}. {task.format(topic)}")
        params = SamplingParams(
            temperature=0.8 * (number % 2), seed=number, max_tokens=dice.randint(min(_SHORTEST, longest), longest)
        )
        requests.append(Request(number, [message], params))
    return requests


class Fates:
    """Draws how each request ends, and after how many tokens its client leaves."""

    def __init__(self, aborted: float, disconnected: float, seed: int) -> None:
        self._weights = (1 - aborted - disconnected, aborted, disconnected)
        self._dice = random.Random(seed)

    def draw(self, request: Request) -> tuple[Fate, int]:
        """Return the fate, and after how many tokens the client leaves."""
        (fate,) = self._dice.choices(("whole", "abort", "disconnect"), self._weights)
        return fate, self._dice.randint(1, request.params.max_tokens)  # type: ignore[return-value]


def shuffled(requests: list[Request], seed: int) -> Iterator[Request]:
    """Yield all requests in random order, then all in another, for ever."""
    dice = random.Random(seed)
    while True:
        yield from dice.sample(requests, len(requests))
