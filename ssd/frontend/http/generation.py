"""Turns open requests into one HTTP answer, whole or as a stream of events. The `Style` decides how it looks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from ssd.errors import RequestError
from ssd.frontend.http.errors import HttpError, refusal
from ssd.frontend.http.exchange import Exchange, Gone, encoder
from ssd.frontend.http.style import Choice, Style
from ssd.frontend.request import Request
from ssd.frontend.request_manager import RequestManager
from ssd.ipc.public import Chunk, Done, Failed, Generate, TokenLogprob

# Tokens whose log-probabilities become JSON in one go: at most a millisecond's work.
_IN_A_TURN = 64


class Generation:
    """All choices of one HTTP request, each a request to the engine, in order. Large answers take `turns`."""

    def __init__(
        self,
        manager: RequestManager,
        exchange: Exchange,
        style: Style,
        generates: Sequence[Generate],
        turns: asyncio.Lock,
    ) -> None:
        self._manager, self._exchange, self._style = manager, exchange, style
        self._generates, self._turns = generates, turns
        self._choices: list[Choice] = []
        self._news: list[Choice] = []
        self._wake = asyncio.Event()
        self._gone = False

    async def run(self, stream: bool) -> None:
        """Sends the answer. When the client leaves, its requests end at once (raises Gone)."""
        try:
            self._open()
            self._exchange.when_gone(self._left)
            await (self._stream() if stream else self._collect())
        except RequestError as error:
            raise self._error(error.code, str(error), error.param) from None
        finally:
            for choice in self._choices:
                self._manager.cancel(choice.request)
            # Breaks a reference cycle, which only the garbage collector would end.
            self._exchange.when_gone(None)
            self._choices.clear()

    def _open(self) -> None:
        self._manager.check(len(self._generates))
        for index, generate in enumerate(self._generates):

            def wake(request: Request, index: int = index) -> None:
                if index < len(self._choices):
                    self._note(self._choices[index])

            style = self._style
            request = self._manager.open(
                generate, wake, style.shown, style.by_origin, style.free, trace=self._exchange.trace
            )
            self._choices.append(Choice(index, generate, request))
            self._note(self._choices[-1])

    def _note(self, choice: Choice) -> None:
        if choice not in self._news:
            self._news.append(choice)
        self._wake.set()

    def _left(self) -> None:
        self._gone = True
        self._wake.set()

    async def _changed(self) -> list[Choice]:
        """Waits for news and returns the choices that have some."""
        await self._wake.wait()
        self._wake.clear()
        if self._gone:
            raise Gone
        news, self._news = self._news, []
        return news

    def _error(self, code: str, message: str, param: str | None = None) -> HttpError:
        """Blames the prompt for an error that names no parameter."""
        if param == "structured":
            param = self._style.structured
        return refusal(code, message, param or self._style.prompt)

    # -- whole ------------------------------------------------------------------------------------------------------

    async def _collect(self) -> None:
        while not all(choice.done for choice in self._choices):
            for choice in await self._changed():
                for message in _taken(choice):
                    if isinstance(message, Failed):
                        raise self._error(message.code, message.message, choice.request.blamed)
                    self._style.take(choice, message)
        await self._exchange.reply(encoder.encode(await self._style.whole(self._choices, self._each)))

    async def _each(self, make: Callable[[TokenLogprob], Any], entries: Sequence[TokenLogprob]) -> list[Any]:
        """Returns `make` of each entry, a few at a time so that others get their turn. Raises Gone."""
        made = list(map(make, entries[:_IN_A_TURN]))
        for start in range(_IN_A_TURN, len(entries), _IN_A_TURN):
            async with self._turns:
                await asyncio.sleep(0)
                if self._gone:
                    raise Gone
                made += map(make, entries[start : start + _IN_A_TURN])
        return made

    # -- streamed ---------------------------------------------------------------------------------------------------

    async def _stream(self) -> None:
        ended = False
        while not ended:
            events: list[Any] = []
            for choice in await self._changed():
                for message in _taken(choice):
                    if isinstance(message, Failed):
                        await self._break(events, message, choice.request.blamed)
                        return
                    self._style.take(choice, message)
                    events += self._style.events(choice, message)
            ended = all(choice.done for choice in self._choices)
            if ended:
                events += self._style.last(self._choices)
            if events:
                await self._write(events, ended)

    async def _break(self, events: list[Any], failed: Failed, param: str | None) -> None:
        """Sends an error in the middle of a stream as its last event."""
        error = self._error(failed.code, failed.message, param)
        if not self._exchange.started:
            raise error
        await self._write([*events, self._style.error(error)], ended=True)

    async def _write(self, events: list[Any], ended: bool) -> None:
        """Sends events. The head goes out with the first ones, so that an earlier error has a status of its own."""
        if not self._exchange.started:
            await self._exchange.start_events()
            events = [event for choice in self._choices for event in self._style.first(choice)] + events
        data = b"".join(map(self._style.encode, events))
        await self._exchange.write(data + self._style.end if ended else data, more=not ended)


def _taken(choice: Choice) -> list[Chunk | Done | Failed]:
    """Takes everything that has come for a choice."""
    messages = []
    output = choice.request.output
    while (message := output.head) is not None and choice.done is None:
        messages.append(message)
        if output.sent():
            break
    return messages
