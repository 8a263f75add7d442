"""The unread answers of each open request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ssd.errors import EngineDeadError, RequestError
from ssd.ipc.connection import Answer
from ssd.ipc.public import Chunk, Description, Failed, printable

MAX_UNREAD = 4096
"""Most unread tokens of one stream while others are read; the engine has the same limit (code `slow_reader`)."""

DESCRIPTION = -1
"""The inbox of the one answer that belongs to no request."""


@dataclass
class _Inbox:
    limit: int | None
    answers: deque[Answer | EngineDeadError] = field(default_factory=deque)
    unread: int = 0
    ended: bool = False


class Inboxes:
    """Owns the unread answers, by request. `arrived` is called with the name of an inbox that got an answer."""

    def __init__(self, arrived: Callable[[int], None]) -> None:
        self._arrived = arrived
        self._open: dict[int, _Inbox] = {}

    def open(self, name: int, limit: int | None = None) -> None:
        """Keep the answers to `name` from now on: one of any size, or several with at most `limit` unread tokens."""
        self._open[name] = _Inbox(limit)

    def put(self, answer: Answer) -> int | None:
        """Keep an answer, or drop it if it is empty or its request is not open any more.

        Returns the name of a request over its limit, so that the caller cancels it. Its earlier answers can still be
        read; the failure `slow_reader` follows them."""
        name = DESCRIPTION if isinstance(answer, Description) else answer.id
        inbox = self._open.get(name)
        # With an empty chunk an engine tests if its client is still there.
        is_empty = isinstance(answer, Chunk) and not answer.token_ids and not answer.text
        if inbox is None or inbox.ended or is_empty:
            return None
        overflown = False
        if isinstance(answer, Chunk):
            overflown = inbox.limit is not None and 0 < inbox.unread > inbox.limit - len(answer.token_ids)
            inbox.unread += len(answer.token_ids)
        if overflown:
            answer = Failed(name, "slow_reader", f"more than {inbox.limit} tokens lay unread in this client")
        inbox.ended = not isinstance(answer, Chunk)
        inbox.answers.append(answer)
        self._arrived(name)
        return name if overflown else None

    def end(self, error: EngineDeadError) -> None:
        for name, inbox in self._open.items():
            if not inbox.ended:
                inbox.ended = True
                inbox.answers.append(EngineDeadError(str(error)))
                self._arrived(name)

    def take(self, name: int) -> Answer | None:
        """Return the next answer, or None. Raises the failure that ended the request."""
        inbox = self._open[name]
        if not inbox.answers:
            return None
        answer = inbox.answers.popleft()
        if isinstance(answer, Failed):
            raise RequestError(printable(answer.code, 64), printable(answer.message, 512))
        if isinstance(answer, EngineDeadError):
            raise answer
        if isinstance(answer, Chunk):
            inbox.unread -= len(answer.token_ids)
        return answer

    def close(self, name: int) -> bool:
        """Drop the answers to `name`; return True if its end has not arrived."""
        inbox = self._open.pop(name, None)
        return inbox is not None and not inbox.ended
