"""What has arrived for each open request and was not read yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ssd.errors import EngineDeadError, RequestError
from ssd.ipc.connection import Answer
from ssd.ipc.public import Chunk, Description, Failed, printable

MAX_UNREAD = 4096
"""Tokens that may lie unread in one stream while others are read, as many as at the engine (code `slow_reader`)."""

DESCRIPTION = -1
"""The inbox of the one answer that belongs to no request."""


@dataclass
class _Inbox:
    limit: int | None
    answers: deque[Answer | EngineDeadError] = field(default_factory=deque)
    unread: int = 0
    ended: bool = False


class Inboxes:
    """Sorts answers by request. `arrived` is called with the name of an inbox that got something."""

    def __init__(self, arrived: Callable[[int], None]) -> None:
        self._arrived = arrived
        self._open: dict[int, _Inbox] = {}

    def open(self, name: int, limit: int | None = None) -> None:
        """Keeps what arrives for `name`: one message, or several with at most `limit` tokens."""
        self._open[name] = _Inbox(limit)

    def put(self, answer: Answer) -> int | None:
        """Keeps an answer, or drops it if nobody waits for it or it is empty.
        Returns a request to cancel, if that was more than may lie unread. What came before can still be read, and
        the failure `slow_reader` follows."""
        name = DESCRIPTION if isinstance(answer, Description) else answer.id
        inbox = self._open.get(name)
        if inbox is None or inbox.ended or _says_nothing(answer):
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
        """Nothing comes any more for what is open; what has arrived can still be read."""
        for name, inbox in self._open.items():
            if not inbox.ended:
                inbox.ended = True
                inbox.answers.append(EngineDeadError(str(error)))
                self._arrived(name)

    def take(self, name: int) -> Answer | None:
        """Returns the next answer, or None. Raises the failure that ended the request."""
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
        """Keeps nothing more for `name`. True if its end has not arrived."""
        inbox = self._open.pop(name, None)
        return inbox is not None and not inbox.ended


def _says_nothing(answer: Answer) -> bool:
    """True for the empty chunk with which an engine tests whether its client is still there."""
    return isinstance(answer, Chunk) and not answer.token_ids and not answer.text
