"""What a client has not taken yet of one request's output."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Literal, TypeAlias

from msgspec.structs import replace

from ssd.ipc.messages import Emission
from ssd.ipc.public import Chunk, Done, Failed, TokenLogprob

Origin: TypeAlias = Literal["hit", "miss", "draft", "rejected", "plain"]
"""Where tokens come from. The first three are accepted draft tokens: of a speculation that was ready, of one made after
a miss, or of one that nothing was looked up for. `rejected` is the target's own token in place of a draft token that it
rejected, `plain` its own where nothing was drafted."""


class Part(Chunk, frozen=True):
    """A chunk whose tokens are all of one origin. It never leaves the frontend."""

    origin: Origin = "plain"


def by_origin(emission: Emission) -> Iterator[tuple[Origin, list[int]]]:
    """Yields the tokens of a step by their origin: accepted draft tokens, then the target's own."""
    accepted, own = emission.token_ids[: emission.accepted], emission.token_ids[emission.accepted :]
    if accepted:
        looked_up = emission.cache not in ("", "first_round")
        yield ("hit" if emission.cache == "hit" else "miss") if looked_up else "draft", accepted
    if own:
        yield "rejected" if emission.accepted < emission.drafted else "plain", own


class OutputCollector:
    """Merges the chunks that wait for a client into one, followed by the end of its request.
    Chunks of different origins stay apart. Whoever delivers takes `head`, and calls `sent` once it is on its way."""

    def __init__(self, name: int) -> None:
        self.tokens = 0
        self._since: float | None = None
        self.name = name
        self._chunks: deque[Chunk] = deque()
        self._origin: Origin | None = None  # of the last chunk
        self._end: Done | Failed | None = None

    @property
    def head(self) -> Chunk | Done | Failed | None:
        """What is to be sent next, or None."""
        return self._chunks[0] if self._chunks else self._end

    @property
    def seconds(self) -> float:
        """How long something has been waiting."""
        return 0.0 if self._since is None else time.monotonic() - self._since

    def add(
        self,
        text: str,
        token_ids: list[int],
        logprobs: list[TokenLogprob] | None = None,
        prompt_logprobs: list[TokenLogprob] | None = None,
        origin: Origin | None = None,
    ) -> None:
        """Adds tokens. They become a `Part` if their `origin` is given, which a request does always or never."""
        if self._chunks and origin == self._origin:
            waiting = self._chunks.pop()
            both = None if logprobs is None else [*(waiting.logprobs or ()), *logprobs]
            text, ids = waiting.text + text, waiting.token_ids + token_ids
            self._chunks.append(replace(waiting, text=text, token_ids=ids, logprobs=both))
        else:
            if not self._chunks:
                self._since = time.monotonic()
            fields = self.name, text, token_ids, logprobs, prompt_logprobs
            self._chunks.append(Chunk(*fields) if origin is None else Part(*fields, origin))
            self._origin = origin
        self.tokens += len(token_ids)

    def end(self, message: Done | Failed) -> None:
        """Sets the last message."""
        self._end = message
        self._since = self._since or time.monotonic()

    def drop(self, message: Failed) -> None:
        """Forgets the waiting chunks: the client learns only how the request ended."""
        self._chunks.clear()
        self.tokens, self._since = 0, None
        self.end(message)

    def sent(self) -> bool:
        """Notes that the head was sent. True if that was the end."""
        if not self._chunks:
            return True
        self.tokens -= len(self._chunks.popleft().token_ids)
        self._since = None if self.head is None else time.monotonic()
        return False
