"""One HTTP answer from open requests, whole or as a stream of events; the `Style` writes its JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msgspec import Raw

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
        self._wake = asyncio.Event()
        self._gone = False

    async def run(self, stream: bool) -> None:
        """Send the answer, and end its requests at once when the client leaves. Raises Gone and HttpError."""
        self._exchange.begin_use()
        try:
            self._open()
            self._exchange.when_gone(self._left)
            await self._follow(stream)
            if not stream:
                await self._exchange.reply_json(await self._style.whole(self._choices, self._each))
        except RequestError as error:
            raise self._error(error.code, str(error), error.param) from None
        finally:
            for choice in self._choices:
                self._manager.cancel(choice.request)
            self._exchange.end_use(lambda: self._style.tokens(self._choices))
            # Breaks a reference cycle, which only the garbage collector would end.
            self._exchange.when_gone(None)
            self._choices.clear()

    def _open(self) -> None:
        def wake(_: Request) -> None:
            self._wake.set()

        self._manager.check(len(self._generates))
        style, exchange = self._style, self._exchange
        shows = style.shown, style.by_origin, style.free
        for index, generate in enumerate(self._generates):
            request = self._manager.open(generate, wake, *shows, trace=exchange.trace, reserve=exchange.reserve)
            self._choices.append(Choice(index, generate, request))
        self._wake.set()

    def _left(self) -> None:
        self._gone = True
        self._wake.set()

    async def _follow(self, stream: bool) -> None:
        ended = False
        while not ended:
            await self._wake.wait()
            self._wake.clear()
            if self._gone:
                raise Gone
            events: list[Any] = []
            for choice in self._choices:
                for message in _taken(choice):
                    if isinstance(message, Failed):
                        error = self._error(message.code, message.message, choice.request.blamed)
                        if not self._exchange.started:
                            raise error
                        await self._write([*events, self._style.error(error)], ended=True)
                        return
                    self._style.take(choice, message)
                    if stream:
                        events += self._style.events(choice, message)
            ended = all(choice.done for choice in self._choices)
            if ended and stream:
                events += self._style.last(self._choices)
            if events:
                await self._write(events, ended)

    async def _write(self, events: list[Any], ended: bool) -> None:
        # The head comes with the first events, so that an earlier error has a status of its own.
        if not self._exchange.started:
            await self._exchange.start_stream(self._style.kind)
            events = [event for choice in self._choices for event in self._style.first(choice)] + events
        data = b"".join(map(self._style.encode, events))
        await self._exchange.write(data + self._style.end if ended else data, more=not ended)

    async def _each(self, make: Callable[[TokenLogprob], Any], entries: Sequence[TokenLogprob]) -> list[Raw]:
        # A few at a time, so that others get their turn.
        made = [Raw(encoder.encode(make(entry))) for entry in entries[:_IN_A_TURN]]
        for start in range(_IN_A_TURN, len(entries), _IN_A_TURN):
            async with self._turns:
                await asyncio.sleep(0)
                if self._gone:
                    raise Gone
                made += [Raw(encoder.encode(make(entry))) for entry in entries[start : start + _IN_A_TURN]]
        return made

    def _error(self, code: str, message: str, param: str | None = None) -> HttpError:
        if param == "structured":
            param = self._style.form.field
        return refusal(code, message, param or self._style.prompt)


def _taken(choice: Choice) -> Iterator[Chunk | Done | Failed]:
    output = choice.request.output
    while choice.done is None and (message := output.head) is not None:
        yield message
        if output.sent():
            break
