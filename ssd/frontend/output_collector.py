"""What a client has not taken yet of one request's output."""

from __future__ import annotations

import time

from ssd.ipc.public import Chunk, Done, Failed, TokenLogprob


class OutputCollector:
    """Merges the chunks that wait for a client into one, followed by the end of its request.
    Whoever delivers takes `head`, and calls `sent` once it is on its way."""

    def __init__(self, name: int) -> None:
        self.tokens = 0
        self._since: float | None = None
        self.name = name
        self._chunk: Chunk | None = None
        self._end: Done | Failed | None = None

    @property
    def head(self) -> Chunk | Done | Failed | None:
        """What is to be sent next, or None."""
        return self._chunk or self._end

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
    ) -> None:
        waiting = self._chunk
        if waiting is None:
            self._chunk = Chunk(self.name, text, token_ids, logprobs, prompt_logprobs)
            self._since = time.monotonic()
        else:
            both = None if logprobs is None else [*(waiting.logprobs or ()), *logprobs]
            self._chunk = Chunk(
                self.name, waiting.text + text, waiting.token_ids + token_ids, both, waiting.prompt_logprobs
            )
        self.tokens += len(token_ids)

    def end(self, message: Done | Failed) -> None:
        """Sets the last message."""
        self._end = message
        self._since = self._since or time.monotonic()

    def drop(self, message: Failed) -> None:
        """Forgets the waiting chunks: the client learns only how the request ended."""
        self._clear()
        self.end(message)

    def sent(self) -> bool:
        """Notes that the head was sent. True if that was the end."""
        if self._chunk is None:
            return True
        self._clear()
        if self._end is not None:
            self._since = time.monotonic()
        return False

    def _clear(self) -> None:
        self._chunk, self.tokens, self._since = None, 0, None
