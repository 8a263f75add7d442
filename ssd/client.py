"""The library other programs talk to a running engine with.

with Client("ipc:///tmp/ssd-xyz/client.sock") as client:
    for chunk in client.stream("Why is the sky blue?"):
        print(chunk.text, end="")
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from typing import TypeAlias, overload

import msgspec

from ssd.errors import EngineDeadError, RequestError
from ssd.ipc.connection import Connection, validate
from ssd.ipc.messages import (
    Cancel,
    ChatMessage,
    Chunk,
    Describe,
    Description,
    Done,
    Failed,
    FinishReason,
    Generate,
    Message,
    Metrics,
    TokenLogprob,
    Usage,
)
from ssd.params import SamplingParams

Prompt: TypeAlias = str | Sequence[int]
"""Text, or token ids."""

_WINDOW = 1024  # requests of one batch that are open at once: more than an engine runs, fewer than it refuses
_DESCRIPTION = -1  # the inbox of the one answer that belongs to no request


class Completion(msgspec.Struct, frozen=True, omit_defaults=True):
    """One finished request. `text` leaves special tokens out and ends before a stop string; `token_ids` has all."""

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    metrics: Metrics
    logprobs: list[TokenLogprob] | None = None


class StreamChunk(msgspec.Struct, frozen=True):
    """What a stream yields: what one round added. The last one adds no tokens and carries the `completion`."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    completion: Completion | None = None


class Client:
    """A connection to an engine. For one thread at a time: give each thread a client of its own.

    A request that is refused or fails raises RequestError. EngineDeadError says that no connection came up within
    `timeout` seconds, that what is there does not answer as an engine, or that the connection broke under a request or
    was closed; UsageError that `address` is none. A slow engine is waited for.
    """

    def __init__(self, address: str, timeout: float = 10.0) -> None:
        self._address = address
        self._timeout = timeout
        self._names = itertools.count(1)
        self._inboxes: dict[int, deque[Message | EngineDeadError]] = {}
        self._connection = Connection(address, timeout)
        try:
            self.describe()
        except BaseException:
            self.close()
            raise

    def describe(self) -> Description:
        """What the engine serves. A busy engine answers too, so this waits for `timeout` seconds at most."""
        self._send(_DESCRIPTION, Describe())
        answer = self._next(_DESCRIPTION, time.monotonic() + self._timeout)
        assert isinstance(answer, Description)
        return answer

    def stream(
        self,
        prompt: str | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Sequence[ChatMessage] | None = None,
        token_ids: Sequence[int] | None = None,
    ) -> Generator[StreamChunk, None, None]:
        """Yield what each round adds. Give one of `prompt`, `messages` (a chat) and `token_ids`.

        The request begins with the first `next`; closing the generator before its end cancels it.
        """
        chat = None if messages is None else list(messages)
        ids = None if token_ids is None else list(token_ids)
        request = Generate(next(self._names), prompt, ids, chat, params or SamplingParams())
        try:
            self._open(request)
            yield from self._follow(request)
        finally:
            self._cancel(request)

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a sequence of str too: the first signature wins
        self, prompts: str, params: SamplingParams | None = None, *, chat: bool = False
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat: bool = False,
    ) -> list[Completion]: ...
    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat: bool = False,
    ) -> Completion | list[Completion]:
        """Complete one text, or a list of texts and token id lists as one batch; results come in input order.

        `params` is for all, or one for each. With `chat`, a text is what a user says in the model's chat format.
        The first failure in input order is raised and cancels the rest.
        """
        batch: Sequence[Prompt] = [prompts] if isinstance(prompts, str) else prompts
        each = params if isinstance(params, Sequence) else [params or SamplingParams()] * len(batch)
        if len(each) != len(batch):
            raise ValueError(f"{len(batch)} prompts, but {len(each)} sampling parameters")
        requests = [_request(next(self._names), *pair, chat) for pair in zip(batch, each, strict=True)]
        completions = self._run(requests)
        return completions[0] if isinstance(prompts, str) else completions

    def close(self) -> None:
        """Leave; the engine aborts what is still open. Closing twice is fine."""
        self._connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, requests: Sequence[Generate]) -> list[Completion]:
        completions: list[Completion] = []
        try:
            for request in requests[:_WINDOW]:
                self._open(request)
            for index, request in enumerate(requests):
                completions += [chunk.completion for chunk in self._follow(request) if chunk.completion is not None]
                if index + _WINDOW < len(requests):
                    self._open(requests[index + _WINDOW])
        finally:
            for request in requests:
                self._cancel(request)
        return completions

    def _follow(self, request: Generate) -> Iterator[StreamChunk]:
        """The chunks of an open request up to its end."""
        chunks: list[Chunk] = []
        while True:
            answer = self._next(request.id)
            if isinstance(answer, Chunk):
                chunks.append(answer)
                yield StreamChunk(answer.text, answer.token_ids, answer.logprobs)
            elif isinstance(answer, Done):
                yield StreamChunk(answer.text, [], None, _completion(request, chunks, answer))
                return

    def _open(self, request: Generate) -> None:
        validate(request)
        self._send(request.id, request)

    def _cancel(self, request: Generate) -> None:
        """Forget a request, and tell the engine to if it has not ended."""
        if self._inboxes.pop(request.id, None) is not None and not self._connection.closed:
            self._connection.offer(Cancel(request.id))

    # -- inboxes: what has arrived for each open request ------------------------------------------------------------

    def _send(self, inbox: int, message: Generate | Describe) -> None:
        while not self._connection.closed and self._connection.lost:  # concerns what was open before, not this message
            self._receive(None)
        self._connection.send(message)
        self._inboxes[inbox] = deque()

    def _next(self, inbox: int, deadline: float | None = None) -> Message:
        """The next answer for `inbox`, which closes with its last one. Raises the failure that ended it."""
        while not self._inboxes[inbox]:
            self._receive(deadline)
        answer = self._inboxes[inbox].popleft()
        if not isinstance(answer, Chunk):
            del self._inboxes[inbox]
        if isinstance(answer, Failed):
            raise RequestError(answer.code, answer.message)
        if isinstance(answer, EngineDeadError):
            raise answer
        return answer

    def _receive(self, deadline: float | None) -> None:
        """Sort in the next message. A lost connection is the end of everything open."""
        answer = self._connection.receive(deadline)
        if answer is None:
            for inbox in self._inboxes.values():
                inbox.append(EngineDeadError(f"the engine at {self._address} went away"))
            return
        name = answer.id if isinstance(answer, Chunk | Done | Failed) else _DESCRIPTION
        if name in self._inboxes:  # else it was cancelled
            self._inboxes[name].append(answer)


def _request(name: int, prompt: Prompt, params: SamplingParams, chat: bool) -> Generate:
    if not isinstance(prompt, str):
        return Generate(name, token_ids=list(prompt), params=params)
    if chat:
        return Generate(name, messages=[ChatMessage("user", prompt)], params=params)
    return Generate(name, prompt, params=params)


def _completion(request: Generate, chunks: Sequence[Chunk], done: Done) -> Completion:
    return Completion(
        text="".join(chunk.text for chunk in chunks) + done.text,
        token_ids=[token for chunk in chunks for token in chunk.token_ids],
        prompt_token_ids=done.prompt_token_ids,
        finish_reason=done.finish_reason,
        usage=done.usage,
        metrics=done.metrics,
        logprobs=None if request.params.logprobs is None else [e for c in chunks for e in c.logprobs or ()],
    )
