"""From open requests to one HTTP answer, whole or as a stream of events; how it looks is the `Style`'s."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ssd.errors import RequestError
from ssd.frontend.desk import Desk, Request
from ssd.frontend.http.errors import HttpError, error_object, refusal
from ssd.frontend.http.exchange import Exchange, Gone, encoder
from ssd.frontend.http.style import Choice, Style
from ssd.ipc.messages import Chunk, Done, Failed, Generate

_Item = TypeVar("_Item")
_Made = TypeVar("_Made")

# Tokens whose log-probabilities are made JSON of in one go: a millisecond's work where each has the most there may be.
_IN_A_TURN = 64


class Generation:
    """All choices of one HTTP request, each a request to the engine, in order. Large answers that are made at the same
    time take `turns`."""

    def __init__(
        self, desk: Desk, exchange: Exchange, style: Style, generates: Sequence[Generate], turns: asyncio.Lock
    ) -> None:
        self._desk, self._exchange, self._style = desk, exchange, style
        self._generates, self._turns = generates, turns
        self._choices: list[Choice] = []
        self._news: list[Choice] = []
        self._wake = asyncio.Event()
        self._gone = False

    async def run(self, stream: bool) -> None:
        """Answer. When the client leaves, its requests end at once (raises Gone)."""
        try:
            self._open()
            self._exchange.when_gone(self._left)
            await (self._stream() if stream else self._collect())
        except RequestError as error:
            raise self._error(error.code, str(error), error.param) from None
        finally:
            for choice in self._choices:
                self._desk.cancel(choice.request)
            # Otherwise a circle of references, which only the garbage collector ends.
            self._exchange.when_gone(None)
            self._choices.clear()

    def _open(self) -> None:
        self._desk.check(len(self._generates))
        for index, generate in enumerate(self._generates):

            def wake(request: Request, index: int = index) -> None:
                if index < len(self._choices):
                    self._note(self._choices[index])

            self._choices.append(Choice(index, generate, self._desk.open(generate, wake)))
            self._note(self._choices[-1])

    def _note(self, choice: Choice) -> None:
        if choice not in self._news:
            self._news.append(choice)
        self._wake.set()

    def _left(self) -> None:
        self._gone = True
        self._wake.set()

    async def _changed(self) -> list[Choice]:
        """The choices with news, when there are any."""
        await self._wake.wait()
        self._wake.clear()
        if self._gone:
            raise Gone
        news, self._news = self._news, []
        return news

    def _error(self, code: str, message: str, param: str | None = None) -> HttpError:
        """What is wrong with a request and not with a parameter that has a name is wrong with its prompt."""
        return refusal(code, message, param or self._style.prompt)

    # -- whole ------------------------------------------------------------------------------------------------------

    async def _collect(self) -> None:
        while not all(choice.done for choice in self._choices):
            for choice in await self._changed():
                for message in _taken(choice):
                    if isinstance(message, Failed):
                        raise self._error(message.code, message.message)
                    choice.take(message)
        await self._exchange.reply(encoder.encode(await self._style.whole(self._choices, self._each)))

    async def _each(self, make: Callable[[_Item], _Made], items: Sequence[_Item]) -> list[_Made]:
        """`make` of each item, a few at a time: whatever else there is to do comes in between. Raises Gone when the
        client has left."""
        made = list(map(make, items[:_IN_A_TURN]))
        for start in range(_IN_A_TURN, len(items), _IN_A_TURN):
            async with self._turns:
                await asyncio.sleep(0)
                if self._gone:
                    raise Gone
                made += map(make, items[start : start + _IN_A_TURN])
        return made

    # -- streamed ---------------------------------------------------------------------------------------------------

    async def _stream(self) -> None:
        ended = False
        while not ended:
            events: list[Any] = []
            for choice in await self._changed():
                for message in _taken(choice):
                    if isinstance(message, Failed):
                        await self._break(events, message)
                        return
                    choice.take(message)
                    events.append(self._style.event(choice, message))
            ended = all(choice.done for choice in self._choices)
            if ended and (last := self._style.last(self._choices)) is not None:
                events.append(last)
            if events:
                await self._write(events, ended)

    async def _break(self, events: list[Any], failed: Failed) -> None:
        """An error in the middle of a stream is its last event."""
        error = self._error(failed.code, failed.message)
        if not self._exchange.started:
            raise error
        await self._write([*events, error_object(error)], ended=True)

    async def _write(self, events: list[Any], ended: bool) -> None:
        """The head goes out with the first events, so that what fails before them has a status of its own."""
        if not self._exchange.started:
            await self._exchange.start_events()
            events = [event for choice in self._choices if (event := self._style.first(choice)) is not None] + events
        data = b"".join([b"data: %b\n\n" % encoder.encode(event) for event in events])
        await self._exchange.write(data + b"data: [DONE]\n\n" if ended else data, more=not ended)


def _taken(choice: Choice) -> list[Chunk | Done | Failed]:
    """Everything that has come for a choice."""
    messages = []
    outbox = choice.request.outbox
    while (message := outbox.head) is not None and choice.done is None:
        messages.append(message)
        if outbox.sent():
            break
    return messages
