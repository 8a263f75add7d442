"""A client that also counts what its callers cannot see: several ends, no end, tokens after an end."""

from __future__ import annotations

from collections.abc import Callable

from ssd.client import AsyncClient
from ssd.client.inboxes import DESCRIPTION, Inboxes
from ssd.errors import EngineDeadError
from ssd.ipc.connection import Answer
from ssd.ipc.public import Chunk, Description


class WatchedInboxes(Inboxes):
    """Sorts answers like its base, and counts the ends of every request that was ever opened."""

    def __init__(self, arrived: Callable[[int], None]) -> None:
        super().__init__(arrived)
        self.ends: dict[int, int] = {}
        self.late = 0  # chunks with tokens that came after the end of their request

    def open(self, name: int, limit: int | None = None) -> None:
        if name != DESCRIPTION:
            self.ends[name] = 0
        super().open(name, limit)

    def put(self, answer: Answer) -> int | None:
        if isinstance(answer, Chunk):
            self.late += bool(answer.token_ids and self.ends.get(answer.id))
        elif not isinstance(answer, Description):
            self.ends[answer.id] = self.ends.get(answer.id, 0) + 1
        return super().put(answer)

    def broken(self) -> None:
        """The connection is lost: every open request is told so, which is its end."""
        self.ends = {name: count or 1 for name, count in self.ends.items()}


class WatchedClient(AsyncClient):
    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._inboxes = self.seen = WatchedInboxes(self._arrived)

    def _lose(self, cause: EngineDeadError) -> None:
        if not self._closed:  # by this client itself
            self.seen.broken()
        super()._lose(cause)

    @property
    def without_end(self) -> int:
        return sum(not count for count in self.seen.ends.values())

    @property
    def with_more(self) -> int:
        """Return the requests that ended more than once, and the chunks after an end."""
        return self.seen.late + sum(count > 1 for count in self.seen.ends.values())
