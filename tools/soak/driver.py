"""A steady load through `ssd.client`: a fixed number of open requests, some given up in the middle."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from msgspec.structs import replace

from ssd.client import AsyncClient, StreamChunk
from ssd.config.params import Speculation
from ssd.errors import EngineDeadError, RequestError, RequestTimeoutError
from tools.soak.answers import Answer, Heard, judge
from tools.soak.asking import Fate, Fates, Request
from tools.soak.watching import WatchedClient

_PATIENCE_S = 120.0  # of one request, waiting for its turn included; after that it is lost
_AGAIN_S = 0.1
_SETTLING = 300  # looks at whether the last ends have come, a tenth of a second apart

DISCONNECTED = "disconnected"
"""The code of a request whose connection broke before its end."""


@dataclass
class Tally:
    """What came of a load, counted by end.

    Requests that clients gave up count as `aborted` or `disconnected`. All others count as `finished`, as `lost` (no
    end; `hung` if waited for too long), by their error's code, or as `told` if that code was to be expected. `altered`
    and `duplicated` ones count there too. Times are in seconds. `token_gaps` has an entry for each token after the
    first chunk: the time since the chunk before, divided by the chunk's tokens."""

    seconds: float = 0.0
    finished: int = 0
    aborted: int = 0
    disconnected: int = 0
    lost: int = 0
    hung: int = 0
    duplicated: int = 0
    altered: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    told: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    rounds: int = 0
    accepted: int = 0
    hits: int = 0
    first_token: list[float] = field(default_factory=list)
    token_gaps: list[float] = field(default_factory=list)
    chunk_gaps: list[float] = field(default_factory=list)

    @property
    def wrong(self) -> int:
        return self.lost + self.duplicated + self.altered + sum(self.errors.values())

    def time(self, heard: Heard) -> None:
        """Note when tokens came."""
        self.tokens += heard.tokens
        if heard.arrivals:
            self.first_token.append(heard.arrivals[0] - heard.sent)
        for before, now, chunk in zip(heard.arrivals, heard.arrivals[1:], heard.chunks[1:], strict=False):
            self.chunk_gaps.append(now - before)
            self.token_gaps += [(now - before) / len(chunk)] * len(chunk)


class Driver:
    """Sends `requests` in their order to the engine at `address`, `concurrency` at a time.

    The first whole answer to a request is the reference for all later ones (`reference`, by the request's number): run
    first in mode `ar`, over all requests."""

    def __init__(self, address: str, requests: Iterator[Request], concurrency: int) -> None:
        self._address, self._requests, self._concurrency = address, requests, concurrency
        self.reference: dict[int, Answer] = {}

    async def run(
        self,
        seconds: float,
        speculation: Speculation,
        fates: Fates,
        at_least: int = 0,
        expected: Collection[str] = (),
    ) -> Tally:
        """Run the load for `seconds`, and until enough requests have begun; return when the last has ended.

        Clients may be told errors with an `expected` code; with DISCONNECTED among them a connection may break. Else
        EngineDeadError is raised when the engine is gone."""
        self._tally, self._speculation, self._fates, self._expected = Tally(), speculation, fates, expected
        began = time.perf_counter()
        self._until, self._owed = began + seconds, at_least
        async with WatchedClient(self._address) as self._shared:
            await self._ask_side_by_side()
            self._tally.seconds = time.perf_counter() - began
            await self._settle()
        return self._tally

    async def _ask_side_by_side(self) -> None:
        dead: Exception | None = None
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._concurrency):
                    group.create_task(self._keep_asking())
        except* EngineDeadError as errors:
            dead = errors.exceptions[0]
        if dead is not None:
            raise dead

    async def _keep_asking(self) -> None:
        while time.perf_counter() < self._until or self._owed > 0:
            self._owed -= 1
            await self._ask(next(self._requests))

    async def _ask(self, request: Request) -> None:
        fate, leave = self._fates.draw(request)
        heard = Heard(time.perf_counter())
        try:
            client = WatchedClient(self._address) if fate == "disconnect" else self._shared
            last = await self._listen(client, request, heard, None if fate == "whole" else leave)
        except RequestTimeoutError:
            self._tally.lost += 1
            self._tally.hung += 1
            return
        except RequestError as error:
            self._failed(request, heard, error.code)
            return
        except EngineDeadError:
            if DISCONNECTED not in self._expected:
                raise
            self._failed(request, heard, DISCONNECTED)
            await asyncio.sleep(_AGAIN_S)
            return
        self._tally.time(heard)
        self._count(request, heard, last, fate)

    def _failed(self, request: Request, heard: Heard, code: str) -> None:
        """Judge what came before the error: it must be right all the same."""
        (self._tally.told if code in self._expected else self._tally.errors)[code] += 1
        self._compare(request, heard)

    async def _listen(
        self, client: AsyncClient, request: Request, heard: Heard, leave: int | None
    ) -> StreamChunk | None:
        """Read the stream to its end, or until `leave` tokens have come."""
        params = replace(request.params, speculation=self._speculation)
        stream = client.stream(request.messages, params, timeout=_PATIENCE_S)
        try:
            async for chunk in stream:
                heard.take(chunk.token_ids, time.perf_counter())
                if chunk.completion is not None:
                    done = chunk.completion
                    heard.answer = Answer(done.token_ids, done.text, done.finish_reason)
                    return chunk
                if leave is not None and heard.tokens >= leave:
                    break
            return None
        finally:
            if client is not self._shared:
                await client.close()  # first: a connection that is gone cancels nothing
            await stream.aclose()

    def _count(self, request: Request, heard: Heard, last: StreamChunk | None, fate: Fate) -> None:
        tally = self._tally
        if last is None:
            tally.aborted += fate == "abort"
            tally.disconnected += fate == "disconnect"
        else:
            assert last.completion is not None and heard.answer is not None
            tally.finished += 1
            metrics = last.completion.metrics
            tally.rounds += metrics.rounds
            tally.accepted += metrics.accepted_tokens
            tally.hits += metrics.hits
            self.reference.setdefault(request.number, heard.answer)
        self._compare(request, heard)

    def _compare(self, request: Request, heard: Heard) -> None:
        expected = self.reference.get(request.number)
        if expected is not None:  # it had an answer when all were asked for
            verdict = judge(heard, expected)
            self._tally.altered += verdict == "altered"
            self._tally.duplicated += verdict == "duplicated"

    async def _settle(self) -> None:
        """Read the ends of aborted requests too, and count requests with no end or several."""
        for _ in range(_SETTLING):
            try:
                await self._shared.describe()  # reads what is there
            except EngineDeadError:
                if DISCONNECTED not in self._expected:
                    raise
            if not self._shared.without_end:
                break
            await asyncio.sleep(_AGAIN_S)
        self._tally.lost += self._shared.without_end
        self._tally.duplicated += self._shared.with_more
