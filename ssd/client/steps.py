"""The logic of a client without waiting: generators of steps, which the blocking and the asyncio client drive."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Generator, Sequence
from heapq import heappop, heappush
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar

from ssd.client import results
from ssd.client.inboxes import DESCRIPTION, MAX_UNREAD, Inboxes
from ssd.client.results import Completion, Conversation, Params, Prompt, StreamChunk
from ssd.config.params import SamplingParams
from ssd.errors import EngineDeadError, RequestError, RequestTimeoutError
from ssd.ipc.connection import Answer, Connection, validate
from ssd.ipc.curve import client_keys
from ssd.ipc.public import PROTOCOL_VERSION, Cancel, Chunk, Describe, Description, Done, Generate, Message
from ssd.ipc.running import address_of

_WINDOW = 1024  # requests of one batch that are open at once: more than an engine runs


class Wait(NamedTuple):
    """Asks the driver to wait until `inbox` has an answer or, if `inbox` is None, until sending may succeed.

    It waits until `deadline` (time.monotonic) at most. Going on too early is harmless."""

    inbox: int | None
    deadline: float | None


_Result = TypeVar("_Result")
Steps: TypeAlias = Generator[Wait | _Result, None, None]
_Part: TypeAlias = Generator[Wait, None, _Result]  # waits, then returns


class Batch:
    """Decides which of the requests 0 to `size` - 1 to send next, and which to follow.

    It keeps as many open as the engine takes: a request refused because too many are open is sent again when one of the
    requests sent before it has ended."""

    def __init__(self, size: int) -> None:
        self._window = _WINDOW
        self._unsent = list(range(size))  # a heap
        self._open = deque[int]()
        self._before: dict[int, int] = {}

    def send(self) -> int | None:
        """Return the next request to send now; None where an open one must end first, or all were sent."""
        if not self._unsent or len(self._open) >= self._window:
            return None
        request = heappop(self._unsent)
        self._before[request] = len(self._open)
        self._open.append(request)
        return request

    def follow(self) -> int:
        """Return the next request to follow to its end: the open one sent first, so that refusals are known early."""
        return self._open.popleft()

    def refused(self, request: int) -> bool:
        """Queue a refused request to be sent again; return False if no request of this batch can end to make room."""
        if self._before[request] == 0:
            return False
        self._window = min(self._window, self._before[request])
        heappush(self._unsent, request)
        return True


class ClientSteps:
    """Owns a client's connection and inboxes, and makes its steps, which a subclass drives."""

    def __init__(self, address: str, timeout: float, request_timeout: float | None, keys: str | Path | None) -> None:
        self.address = address_of(address)
        self._timeout = timeout
        self._request_timeout = request_timeout
        self._keys = None if keys is None else client_keys(Path(keys))
        self._names = itertools.count(1)
        self._inboxes = Inboxes(self._arrived)
        self._closed = False
        self._uncancelled: deque[int] = deque()  # requests to cancel as soon as the queue has room
        self._connection = Connection(self.address, self._keys)

    # -- for subclasses -----------------------------------------------------------------------------------------------

    def _describing(self) -> Steps[Description]:
        dead = EngineDeadError(
            f"what is at {self.address} does not answer as an engine of protocol version {PROTOCOL_VERSION}"
        )
        connect_and_send = 2 * self._timeout
        try:
            if not (yield from self._sending(Describe(), time.monotonic() + connect_and_send)):
                raise dead
            self._inboxes.open(DESCRIPTION)
            answer = yield from self._answer(DESCRIPTION, time.monotonic() + self._timeout)
            if answer is None:
                raise dead
            assert isinstance(answer, Description)
            yield answer
        finally:
            self._inboxes.close(DESCRIPTION)

    def _streaming(self, request: Generate, timeout: float | None) -> Steps[StreamChunk]:
        deadline = self._deadline(timeout)
        try:
            yield from self._open(request, deadline, MAX_UNREAD)
            yield from self._follow(request, deadline)
        finally:
            self._forget(request)

    def _completing(self, requests: Sequence[Generate], timeout: float | None) -> Steps[Completion]:
        deadline = self._deadline(timeout)
        batch = Batch(len(requests))
        completions: dict[int, Completion] = {}
        try:
            for due in range(len(requests)):
                while due not in completions:
                    while (index := batch.send()) is not None:
                        yield from self._open(requests[index], deadline, None)
                    index = batch.follow()
                    try:
                        completions[index] = yield from self._completion(requests[index], deadline)
                    except RequestError as error:
                        if error.code != "overloaded" or not batch.refused(index):
                            error.index = index
                            raise
                yield completions.pop(due)
        finally:
            for request in requests:
                self._forget(request)

    def _request(self, prompt: Prompt | Conversation, params: SamplingParams | None) -> Generate:
        return results.request(next(self._names), prompt, params)

    def _requests(
        self, prompts: str | Sequence[Prompt | Conversation], params: Params, chat: bool = False
    ) -> list[Generate]:
        batch: Sequence[Prompt | Conversation] = [prompts] if isinstance(prompts, str) else prompts
        each = params if isinstance(params, Sequence) else [params] * len(batch)
        if len(each) != len(batch):
            raise ValueError(f"{len(batch)} prompts, but {len(each)} sampling parameters")
        return [results.request(next(self._names), *pair, chat) for pair in zip(batch, each, strict=True)]

    def _take_in(self) -> bool:
        answer = None if self._connection.closed else self._connection.take()
        if answer is None:
            return False
        if isinstance(answer, EngineDeadError):
            self._lose(answer)
        elif (overflown := self._inboxes.put(answer)) is not None:
            self._cancel(overflown)
        return True

    def _arrived(self, inbox: int) -> None:
        """Do nothing; a subclass may wake the task that waits for `inbox`, which has an answer now."""

    def _lose(self, cause: EngineDeadError) -> None:
        self._uncancelled.clear()
        self._connection.close()
        self._inboxes.end(cause)

    def _leave(self) -> None:
        if not self._closed:
            self._closed = True
            self._lose(EngineDeadError("this client is closed"))

    # -- one request --------------------------------------------------------------------------------------------------

    def _deadline(self, timeout: float | None) -> float | None:
        timeout = self._request_timeout if timeout is None else timeout
        return None if timeout is None else time.monotonic() + timeout

    def _open(self, request: Generate, deadline: float | None, limit: int | None) -> _Part[None]:
        validate(request)
        if not (yield from self._sending(request, deadline)):
            raise RequestTimeoutError()
        self._inboxes.open(request.id, limit)

    def _follow(self, request: Generate, deadline: float | None) -> Steps[StreamChunk]:
        chunks: list[Chunk] = []
        while True:
            answer = yield from self._answer(request.id, deadline)
            if answer is None:
                raise RequestTimeoutError()
            if isinstance(answer, Chunk):
                chunks.append(answer)
                yield StreamChunk(answer.text, answer.token_ids, answer.logprobs, None, answer.prompt_logprobs)
            elif isinstance(answer, Done):
                yield StreamChunk(answer.text, [], completion=results.completion(request, chunks, answer))
                return

    def _completion(self, request: Generate, deadline: float | None) -> _Part[Completion]:
        completion = None
        for step in self._follow(request, deadline):
            if isinstance(step, Wait):
                yield step
            else:
                completion = step.completion
        assert completion is not None, "a stream ends with its completion, or raises"
        return completion

    def _forget(self, request: Generate) -> None:
        if self._inboxes.close(request.id):
            self._cancel(request.id)

    def _cancel(self, name: int) -> None:
        if not self._connection.closed:
            self._uncancelled.append(name)
            self._offer_cancels()

    # -- messages -----------------------------------------------------------------------------------------------------

    def _answer(self, inbox: int, deadline: float | None) -> _Part[Answer | None]:
        while (answer := self._inboxes.take(inbox)) is None:
            if deadline is not None and time.monotonic() >= deadline:
                return None
            yield Wait(inbox, deadline)
        return answer

    def _sending(self, message: Message, deadline: float | None) -> _Part[bool]:
        """Send a message, connecting if need be; return False if that was not possible before the deadline.

        Raises EngineDeadError if the engine refuses the connection, or none comes up within the client's time-out."""
        given_up = time.monotonic() + self._timeout
        while not self._offer(message):
            now = time.monotonic()
            if self._connection.refused:
                self._lose(EngineDeadError(self._connection.trouble))
                raise EngineDeadError(self._connection.trouble)
            if not self._connection.up and now >= given_up:
                raise EngineDeadError(
                    f"no engine answers at {self.address} (waited {self._timeout:g} s){self._connection.trouble}"
                )
            if deadline is not None and now >= deadline:
                return False
            limits = (deadline, None if self._connection.up else given_up)
            yield Wait(None, min((limit for limit in limits if limit is not None), default=None))
        return True

    def _offer(self, message: Message) -> bool:
        if self._closed:
            raise EngineDeadError("this client is closed")
        if self._connection.closed:
            self._connection = Connection(self.address, self._keys)
        return self._offer_cancels() and self._connection.offer(message)

    def _offer_cancels(self) -> bool:
        while self._uncancelled and self._connection.offer(Cancel(self._uncancelled[0])):
            self._uncancelled.popleft()
        return not self._uncancelled
