"""What the tests of the client library share: engines that answer by a script, and patience."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from ssd.client import AsyncClient, StreamChunk
from ssd.frontend.tokenization import Tokenizer
from ssd.ipc.messages import Emission, Submit
from ssd.ipc.public import Metrics
from tests.scripted_engine import (
    MODEL,
    Script,
    ScriptedEngine,
    engine_config,
    following,
    gateway_thread,
    scripted_engine,
)

TOKENIZER = Tokenizer(MODEL)

_Result = TypeVar("_Result")


class LoopClient:
    """AsyncClient where a test expects a Client: its event loop runs while a call waits."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        try:
            self._client = AsyncClient(*arguments, **options)
            self._run(self._client.__aenter__())
        except BaseException:
            self._loop.close()
            raise

    def describe(self) -> Any:
        return self._run(self._client.describe())

    def get_default_sampling_params(self, **changes: Any) -> Any:
        return self._run(self._client.get_default_sampling_params(**changes))

    def chat(self, *arguments: Any, **options: Any) -> Any:
        return self._run(self._client.chat(*arguments, **options))

    def generate(self, *arguments: Any, **options: Any) -> Any:
        return self._run(self._client.generate(*arguments, **options))

    def stream(self, *arguments: Any, **options: Any) -> Iterator[StreamChunk]:
        stream = self._client.stream(*arguments, **options)
        try:
            while (chunk := self._run(anext(stream, None))) is not None:
                yield chunk
        finally:
            self._run(stream.aclose())

    def close(self) -> None:
        self._run(self._client.close())

    def __enter__(self) -> LoopClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._loop.close()

    def _run(self, what: Awaitable[_Result]) -> _Result:
        return self._loop.run_until_complete(what)


def echo(submit: Submit) -> Iterator[Emission]:
    """The prompt again, two tokens a step."""
    ids = submit.token_ids[: submit.params.max_tokens]
    parts = [ids[start : start + 2] for start in range(0, len(ids), 2)]
    for part in parts[:-1]:
        yield Emission(submit.request, part)
    yield Emission(submit.request, parts[-1], finish_reason="length", metrics=Metrics(rounds=len(parts)))


def endless(submit: Submit) -> Iterator[Emission]:
    return (Emission(submit.request, [28120]) for _ in itertools.count())


@contextmanager
def serving(script: Script) -> Iterator[ScriptedEngine]:
    with ExitStack() as stack:
        engine = stack.enter_context(scripted_engine())
        stack.enter_context(gateway_thread(engine, engine_config()))
        stack.enter_context(following(engine, script))
        yield engine


def wait_until(condition: Callable[[], object]) -> None:
    """Wait for what other threads do."""
    tick = threading.Event()
    for _ in range(2000):
        if condition():
            return
        tick.wait(0.01)
    raise AssertionError("it did not happen")
