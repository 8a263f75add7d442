"""Makes the requests of a load, and checks answers against the mock's oracle."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import Protocol

from ssd.config.params import SamplingParams
from ssd.frontend.tokenization import Tokenizer
from ssd.plugins.mock.oracle import Answer


@dataclass(slots=True)
class Request:
    """A request, when it was sent (monotonic seconds), and what has come so far."""

    name: int
    prompt: list[int]
    params: SamplingParams
    sent: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


class Sink(Protocol):
    """Receives what a transport reads; `name` is the request's."""

    def piece(self, name: int, ids: list[int], text: str) -> None: ...

    def end(self, name: int, reason: str, text: str) -> None: ...

    def fail(self, name: int, code: str) -> None: ...


class Transport(Protocol):
    """A connection to an engine."""

    def send(self, request: Request) -> bool:
        """Send a request. Returns False if it cannot be taken now."""

    def receive(self, timeout_s: float, sink: Sink) -> None:
        """Hand on what has arrived; wait for up to `timeout_s` seconds."""

    def close(self) -> None: ...


class Checker:
    """Makes requests that all differ, and knows their answers.

    Prompts are ids from 0 to `vocab_size`. The end of text is ignored: every answer has `tokens` tokens."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, max_model_len: int) -> None:
        self._tokenizer, self._vocab_size, self._max_model_len = tokenizer, vocab_size, max_model_len
        self._names = itertools.count()

    def request(self, prompt_tokens: int, tokens: int) -> Request:
        name = next(self._names)
        prompt = [(name + 31 * place) % self._vocab_size for place in range(prompt_tokens)]
        return Request(name, prompt, SamplingParams(seed=name, max_tokens=tokens, ignore_eos=True))

    def right(self, request: Request, reason: str) -> bool:
        """Return whether ids, text and finish reason are the oracle's."""
        answer = Answer(request.prompt, request.params, self._vocab_size, self._max_model_len)
        if (request.ids, reason) != answer.whole():
            return False
        return "".join(request.texts) == self._tokenizer.decode(request.ids)
