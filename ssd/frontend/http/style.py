"""What the two interfaces have in common: a choice as it grows, and what an answer ends with."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

from msgspec import UNSET, UnsetType

from ssd.frontend.desk import Request
from ssd.frontend.http import answers
from ssd.frontend.http.bodies import Sampling
from ssd.frontend.vocabulary import Vocabulary
from ssd.ipc.messages import Chunk, Done, Generate, TokenLogprob

_Item = TypeVar("_Item")
_Made = TypeVar("_Made")


class Each(Protocol):
    """`make` of each item, without keeping other requests waiting for all of them."""

    def __call__(self, make: Callable[[_Item], _Made], items: Sequence[_Item]) -> Awaitable[list[_Made]]: ...


@dataclass(eq=False, slots=True)
class Choice:
    """One completion of an answer: what it has so far. `told` counts the characters that a stream has sent."""

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
        """How it ended; of a choice that has."""
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
    """The look of one interface. Objects are msgspec Structs, to be encoded as JSON. `prompt` is its field for that."""

    prompt: ClassVar[str]

    def __init__(self, body: Sampling, name: str, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._n = body.n or 1
        self._with_ids, self._with_metrics = bool(body.return_token_ids), bool(body.return_metrics)
        self._with_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._named: dict[str, Any] = {"id": name, "created": now(), "model": body.model}

    @abstractmethod
    async def whole(self, choices: Sequence[Choice], each: Each) -> Any:
        """The answer that is not streamed. Most of a large one are log-probabilities: `each` makes JSON of them."""

    @abstractmethod
    def first(self, choice: Choice) -> Any | None:
        """The event that a choice's stream begins with, or None."""

    @abstractmethod
    def event(self, choice: Choice, message: Chunk | Done) -> Any:
        """The event for what has come; the last one carries the reason of the end."""

    def last(self, choices: Sequence[Choice]) -> Any | None:
        """The event after all choices have ended, or None."""
        if not self._with_usage and not self._with_metrics:
            return None
        usage = self._usage(choices) if self._with_usage else UNSET
        return self._part([], usage=usage, metrics=self._metrics(choices))

    @abstractmethod
    def _part(self, choices: list[Any], **more: Any) -> Any:
        """An event with these choices."""

    def _usage(self, choices: Sequence[Choice]) -> answers.Usage:
        return answers.usage([choice.end for choice in choices], self._n)

    def _metrics(self, choices: Sequence[Choice]) -> answers.RequestMetrics | UnsetType:
        """Of the first choice, if they are asked for."""
        if not self._with_metrics:
            return UNSET
        return answers.request_metrics(choices[0].end.metrics, len(choices[0].token_ids))


def now() -> int:
    """Seconds since the epoch, for `created`."""
    return int(time.time())
