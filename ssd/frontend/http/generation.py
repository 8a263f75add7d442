"""From open requests to one HTTP answer, whole or as a stream of events; how it looks is the `Style`'s."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ssd.errors import RequestError
from ssd.frontend.desk import Desk, Request
from ssd.frontend.http import answers
from ssd.frontend.http.errors import error_object, refusal
from ssd.frontend.http.exchange import Exchange, Gone, encoder
from ssd.ipc.messages import Chunk, Done, Failed, Generate, TokenLogprob


@dataclass(eq=False)
class Choice:
    """One completion of an answer: what it has so far. `told` counts the characters that a stream has sent."""

    index: int
    request: Request
    told: int = 0
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    done: Done | None = None

    @property
    def metrics(self) -> answers.RequestMetrics:
        assert self.done is not None, "asked for at the end"
        return answers.request_metrics(self.done.metrics, len(self.token_ids))

    def take(self, message: Chunk | Done) -> None:
        self.text.append(message.text)
        if isinstance(message, Done):
            self.done = message
        else:
            self.token_ids += message.token_ids
            self.logprobs += message.logprobs or ()
            self.prompt_logprobs += message.prompt_logprobs or ()


class Style(Protocol):
    """The look of one interface. Objects are msgspec Structs, to be encoded as JSON."""

    def whole(self, choices: Sequence[Choice], usage: answers.Usage) -> Any:
        """The answer that is not streamed."""

    def first(self, choice: Choice) -> Any | None:
        """The event that a choice's stream begins with, or None."""

    def event(self, choice: Choice, message: Chunk | Done) -> Any:
        """The event for what has come; the last one carries the reason of the end."""

    def last(self, choices: Sequence[Choice], usage: answers.Usage) -> Any | None:
        """The event after all choices have ended, or None."""


class Generation:
    """All choices of one HTTP request: `prompts` x `n` requests to the engine, in order."""

    def __init__(self, desk: Desk, exchange: Exchange, style: Style, generates: Sequence[Generate], n: int) -> None:
        self._desk, self._exchange, self._style, self._n = desk, exchange, style, n
        self._generates = generates
        self._choices: list[Choice] = []
        self._news: list[Choice] = []
        self._wake = asyncio.Event()
        self._gone = False

    async def run(self, stream: bool) -> None:
        """Answer. When the client leaves, its requests end at once (raises Gone)."""
        try:
            self._open()
        except RequestError as error:
            self._cancel()
            raise refusal(error.code, str(error)) from None
        self._exchange.when_gone(self._left)
        try:
            await (self._stream() if stream else self._collect())
        finally:
            self._cancel()

    def _open(self) -> None:
        self._desk.check(len(self._generates))
        for index, generate in enumerate(self._generates):

            def wake(request: Request, index: int = index) -> None:
                if index < len(self._choices):
                    self._note(self._choices[index])

            self._choices.append(Choice(index, self._desk.open(generate, wake)))
            self._note(self._choices[-1])

    def _note(self, choice: Choice) -> None:
        if choice not in self._news:
            self._news.append(choice)
        self._wake.set()

    def _left(self) -> None:
        self._gone = True
        self._wake.set()

    def _cancel(self) -> None:
        for choice in self._choices:
            self._desk.cancel(choice.request)

    async def _changed(self) -> list[Choice]:
        """The choices with news, when there are any."""
        await self._wake.wait()
        self._wake.clear()
        if self._gone:
            raise Gone
        news, self._news = self._news, []
        return news

    # -- whole ------------------------------------------------------------------------------------------------------

    async def _collect(self) -> None:
        while not all(choice.done for choice in self._choices):
            for choice in await self._changed():
                for message in _taken(choice):
                    if isinstance(message, Failed):
                        raise refusal(message.code, message.message)
                    choice.take(message)
        answer = self._style.whole(self._choices, self._usage())
        await self._exchange.reply(encoder.encode(answer))

    # -- streamed ---------------------------------------------------------------------------------------------------

    async def _stream(self) -> None:
        while not all(choice.request.accepted for choice in self._choices):
            for choice in await self._changed():
                if isinstance(choice.request.outbox.head, Failed):
                    raise refusal(choice.request.outbox.head.code, choice.request.outbox.head.message)
        await self._exchange.start_events()
        firsts = [event for choice in self._choices if (event := self._style.first(choice)) is not None]
        if firsts:
            await self._exchange.write(_events(firsts))
        for choice in self._choices:  # what has come while all were being accepted
            self._note(choice)
        while not all(choice.done for choice in self._choices):
            events: list[Any] = []
            for choice in await self._changed():
                for message in _taken(choice):
                    if isinstance(message, Failed):
                        await self._break(events, message)
                        return
                    choice.take(message)
                    events.append(self._style.event(choice, message))
            if events:
                await self._exchange.write(_events(events))
        last = self._style.last(self._choices, self._usage())
        await self._exchange.write((_events([last]) if last is not None else b"") + _END, more=False)

    async def _break(self, events: list[Any], failed: Failed) -> None:
        """An error in the middle of a stream is its last event."""
        events.append(error_object(refusal(failed.code, failed.message)))
        await self._exchange.write(_events(events) + _END, more=False)

    def _usage(self) -> answers.Usage:
        done = [choice.done for choice in self._choices if choice.done is not None]
        prompts = sum(end.usage.prompt_tokens for end in done[:: self._n])
        return answers.usage(prompts, sum(end.usage.completion_tokens for end in done), [end.metrics for end in done])


_END = b"data: [DONE]\n\n"


def _events(events: Sequence[Any]) -> bytes:
    return b"".join([b"data: %b\n\n" % encoder.encode(event) for event in events])


def _taken(choice: Choice) -> list[Chunk | Done | Failed]:
    """Everything that has come for a choice."""
    messages = []
    outbox = choice.request.outbox
    while (message := outbox.head) is not None and choice.done is None:
        messages.append(message)
        if outbox.sent():
            break
    return messages


def now() -> int:
    """Seconds since the epoch, for `created`."""
    return int(time.time())
