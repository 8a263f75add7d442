"""What chats and completions have in common: a choice as it grows, and the end of an answer."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

from msgspec import UNSET, UnsetType

from ssd.frontend.detokenization import Vocabulary
from ssd.frontend.http import answers
from ssd.frontend.http.bodies import Sampling
from ssd.frontend.request_manager import Request
from ssd.ipc.public import Chunk, Done, Generate, TokenLogprob

Each: TypeAlias = Callable[[Callable[[TokenLogprob], Any], Sequence[TokenLogprob]], Awaitable[list[Any]]]
"""Returns what a function makes of each entry, without keeping other requests waiting."""


@dataclass(eq=False, slots=True)
class Choice:
    """One completion of an answer so far. `told` counts the characters that a stream has sent."""

    index: int
    asked: Generate
    request: Request
    told: int = 0
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    done: Done | None = None

    @property
    def end(self) -> Done:
        """The `Done` of a choice that has ended."""
        assert self.done is not None
        return self.done

    def take(self, message: Chunk | Done) -> None:
        self.text.append(message.text)
        if isinstance(message, Done):
            self.done = message
        else:
            self.token_ids += message.token_ids
            self.logprobs += message.logprobs or ()
            self.prompt_logprobs += message.prompt_logprobs or ()


class Style(ABC):
    """The JSON of one interface, as msgspec structs. `prompt` is the name of its field for the prompt."""

    prompt: ClassVar[str]

    def __init__(self, body: Sampling, name: str, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._n = body.n or 1
        self._with_ids, self._with_metrics = bool(body.return_token_ids), bool(body.return_metrics)
        self._with_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._named: dict[str, Any] = {"id": name, "created": now(), "model": body.model}

    @abstractmethod
    async def whole(self, choices: Sequence[Choice], each: Each) -> Any:
        """Returns the answer that is not streamed. `each` converts log-probabilities, most of a large answer."""

    @abstractmethod
    def first(self, choice: Choice) -> Any | None:
        """Returns the event that a choice's stream begins with, or None."""

    @abstractmethod
    def event(self, choice: Choice, message: Chunk | Done) -> Any:
        """Returns the event of a message; that of the last one carries the finish reason."""

    def last(self, choices: Sequence[Choice]) -> Any | None:
        """Returns the event after all choices have ended, or None."""
        if not self._with_usage and not self._with_metrics:
            return None
        usage = self._usage(choices) if self._with_usage else UNSET
        return self._part([], usage=usage, metrics=self._metrics(choices))

    @abstractmethod
    def _part(self, choices: list[Any], **more: Any) -> Any:
        """Returns an event with these choices."""

    def _usage(self, choices: Sequence[Choice]) -> answers.Usage:
        return answers.usage([choice.end for choice in choices], self._n)

    def _metrics(self, choices: Sequence[Choice]) -> answers.RequestMetrics | UnsetType:
        """Returns the metrics of the first choice, if they were asked for."""
        if not self._with_metrics:
            return UNSET
        return answers.request_metrics(choices[0].end.metrics, len(choices[0].token_ids))


def now() -> int:
    """Returns seconds since the epoch, for `created`."""
    return int(time.time())
