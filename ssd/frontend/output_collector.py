"""The output of one request that its client has not taken yet."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Literal, TypeAlias

from msgspec.structs import replace

from ssd.ipc.messages import Emission
from ssd.ipc.public import Chunk, Done, Failed, TokenLogprob

Origin: TypeAlias = Literal["hit", "miss", "draft", "rejected", "plain"]
"""Origin of tokens: the kind of round that made them. The first three are accepted draft tokens: of a speculation that
was prepared (`hit`), of one made after a miss (`miss`), or of one without a look-up (`draft`); their `Source` says who
proposed them. `rejected` is the target's own token in place of a rejected draft token. `plain` is any other token of
the target: the bonus token if all draft tokens were accepted, or a token where nothing was drafted."""


class Part(Chunk, frozen=True):
    """A chunk whose tokens are all of one origin. It never leaves the frontend."""

    origin: Origin = "plain"


def by_origin(emission: Emission) -> Iterator[tuple[Origin, list[int]]]:
    """Yield the tokens of a step by their origin: accepted draft tokens, then the target's own."""
    accepted, own = emission.token_ids[: emission.accepted], emission.token_ids[emission.accepted :]
    if accepted:
        looked_up = emission.cache not in ("", "first_round")
        yield ("hit" if emission.cache == "hit" else "miss") if looked_up else "draft", accepted
    if own:
        yield "rejected" if emission.accepted < emission.drafted else "plain", own


class OutputCollector:
    """Owns the undelivered output of one request: its waiting chunks, merged into one, and its last message.

    Chunks of different origins stay apart. The gateway or HTTP sends `head`, then calls `sent`."""

    def __init__(self, name: int) -> None:
        self.tokens = 0
        self._since: float | None = None
        self.name = name
        self._chunks: deque[Chunk] = deque()
        self._origin: Origin | None = None  # of the last chunk
        self._end: Done | Failed | None = None

    @property
    def head(self) -> Chunk | Done | Failed | None:
        return self._chunks[0] if self._chunks else self._end

    @property
    def seconds(self) -> float:
        """Return how long output has waited since the last message was sent, in seconds; 0 if none waits."""
        return 0.0 if self._since is None else time.monotonic() - self._since

    def add(
        self,
        text: str,
        token_ids: list[int],
        logprobs: list[TokenLogprob] | None = None,
        prompt_logprobs: list[TokenLogprob] | None = None,
        origin: Origin | None = None,
    ) -> None:
        """Add tokens, as a `Part` if `origin` is given. A request gives it always or never."""
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
        self._end = message
        self._since = self._since or time.monotonic()

    def drop(self, message: Failed) -> None:
        """Discard the waiting chunks: the client learns only how the request ended."""
        self._chunks.clear()
        self.tokens, self._since = 0, None
        self.end(message)

    def sent(self) -> bool:
        """Remove the head, which was sent; return True if it was the last message."""
        if not self._chunks:
            return True
        self.tokens -= len(self._chunks.popleft().token_ids)
        self._since = None if self.head is None else time.monotonic()
        return False
