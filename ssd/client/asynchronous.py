"""The client for asyncio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar, overload

from ssd.client.results import Completion, Conversation, Params, Prompt, StreamChunk, conversations, is_conversation
from ssd.client.steps import ClientSteps, Steps, Wait
from ssd.config.params import SamplingParams
from ssd.errors import EngineDeadError
from ssd.ipc.public import Description

_Result = TypeVar("_Result")

_PER_TURN = 256  # messages sorted in before other tasks get a turn to read them


class AsyncClient(ClientSteps):
    """`Client` for asyncio: all tasks of one event loop share its connection; its methods are those of `Client`.

    It connects with the first call, or on entering its context. Cancelling a task or closing a generator cancels the
    request at the engine. The socket is read only while some task waits for it."""

    def __init__(
        self,
        address: str,
        timeout: float = 10.0,
        *,
        request_timeout: float | None = None,
        keys: str | Path | None = None,
    ) -> None:
        self._waiters: dict[int, asyncio.Future[None]] = {}  # by inbox
        self._senders: set[asyncio.Future[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watched: tuple[int, ...] = ()
        self._describes = asyncio.Lock()  # one at a time: an answer does not name its question
        super().__init__(address, timeout, request_timeout, keys)

    async def describe(self) -> Description:
        async with self._describes:
            (description,) = [description async for description in self._drive(self._describing())]
        return description

    async def get_default_sampling_params(self, **changes: Any) -> SamplingParams:
        return (await self.describe()).sampling.params(**changes)

    def stream(
        self, prompt: Prompt | Conversation, params: SamplingParams | None = None, *, timeout: float | None = None
    ) -> AsyncGenerator[StreamChunk, None]:
        return self._drive(self._streaming(self._request(prompt, params), timeout))

    @overload
    async def generate(  # type: ignore[overload-overlap]  # a str is a sequence of str too: the first signature wins
        self, prompts: str, params: SamplingParams | None = None, *, chat: bool = False, timeout: float | None = None
    ) -> Completion: ...
    @overload
    async def generate(
        self, prompts: Sequence[Prompt], params: Params = None, *, chat: bool = False, timeout: float | None = None
    ) -> list[Completion]: ...
    async def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: Params = None,
        *,
        chat: bool = False,
        timeout: float | None = None,
    ) -> Completion | list[Completion]:
        steps = self._completing(self._requests(prompts, params, chat), timeout)
        completions = [completion async for completion in self._drive(steps)]
        return completions[0] if isinstance(prompts, str) else completions

    @overload
    async def chat(
        self, messages: Conversation, params: SamplingParams | None = None, *, timeout: float | None = None
    ) -> Completion: ...
    @overload
    async def chat(
        self, messages: Sequence[Conversation], params: Params = None, *, timeout: float | None = None
    ) -> list[Completion]: ...
    async def chat(
        self, messages: Conversation | Sequence[Conversation], params: Params = None, *, timeout: float | None = None
    ) -> Completion | list[Completion]:
        steps = self._completing(self._requests(conversations(messages), params), timeout)
        completions = [completion async for completion in self._drive(steps)]
        return completions[0] if is_conversation(messages) else completions

    async def close(self) -> None:
        self._leave()

    async def __aenter__(self) -> AsyncClient:
        try:
            await self.describe()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _drive(self, steps: Steps[_Result]) -> AsyncGenerator[_Result, None]:
        with closing(steps):
            for step in steps:
                if isinstance(step, Wait):
                    await self._wait(step)
                else:
                    yield step

    async def _wait(self, wait: Wait) -> None:
        self._watch()
        waiter = asyncio.get_running_loop().create_future()
        if wait.inbox is None:
            self._senders.add(waiter)
        else:
            self._waiters[wait.inbox] = waiter
        self._pump()
        try:
            seconds = None if wait.deadline is None else max(0.0, wait.deadline - time.monotonic())
            await asyncio.wait([waiter], timeout=seconds)
        finally:
            self._senders.discard(waiter)
            if wait.inbox is not None:
                self._waiters.pop(wait.inbox, None)

    # -- the event loop -----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        if self._watched or self._connection.closed:
            return
        self._loop = asyncio.get_running_loop()
        self._watched = self._connection.descriptors()
        for descriptor in self._watched:
            self._loop.add_reader(descriptor, self._pump)

    def _pump(self) -> None:
        """Put arrived messages into their inboxes if a task waits, and let senders try again.

        Call it after every use of the socket, which may have consumed the descriptor's signal for other news."""
        if not self._connection.closed:
            self._connection.acknowledge()
        if self._waiters or self._senders:
            for _ in range(_PER_TURN):
                if not self._take_in():
                    break
            else:
                self._pump_soon()
        if self._senders and not self._connection.stuck:
            self._wake_senders()

    def _pump_soon(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon(self._pump)

    def _wake_senders(self) -> None:
        while self._senders:
            _wake(self._senders.pop())

    def _cancel(self, name: int) -> None:
        super()._cancel(name)
        self._pump_soon()

    def _arrived(self, inbox: int) -> None:
        waiter = self._waiters.pop(inbox, None)
        if waiter is not None:
            _wake(waiter)

    def _lose(self, cause: EngineDeadError) -> None:
        if self._loop is not None and not self._loop.is_closed():
            for descriptor in self._watched:
                self._loop.remove_reader(descriptor)
        self._watched = ()
        super()._lose(cause)
        self._wake_senders()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
