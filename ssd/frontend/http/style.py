"""The common part of chats and completions: a choice as it grows, and the end of an answer."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

from msgspec import UNSET, UnsetType

from ssd.frontend.detokenization import Vocabulary
from ssd.frontend.http import answers
from ssd.frontend.http.asked import AskedAnswer
from ssd.frontend.http.bodies import Sampling, StreamOptions
from ssd.frontend.http.errors import HttpError, error_object
from ssd.frontend.http.exchange import EVENTS, encoder
from ssd.frontend.http.structured import AnswerForm, form_of
from ssd.frontend.parsers.answer import Answer, AnswerFormat, AnswerParser
from ssd.frontend.parsers.reasoning import Thought
from ssd.frontend.parsers.tools import ToolCall
from ssd.frontend.request import Request
from ssd.ipc.public import Chunk, Done, Generate, TokenLogprob

Each: TypeAlias = Callable[[Callable[[TokenLogprob], Any], Sequence[TokenLogprob]], Awaitable[list[Any]]]
"""A call that makes the JSON of each entry by a function, without keeping other requests waiting."""


@dataclass(eq=False, slots=True)
class Choice:
    """One completion of an answer so far, with `told` characters of it sent in a stream.

    With a `parser`, `parts` has one entry for each message that came, and `calls` counts the calls in them."""

    index: int
    asked: Generate
    request: Request
    told: int = 0
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    done: Done | None = None
    parser: AnswerParser | None = None
    parts: list[Answer] = field(default_factory=list)
    calls: int = 0

    @property
    def end(self) -> Done:
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
        if self.parser is not None:
            self.parts.append(self.parser.finish(message.text) if self.done else self.parser.feed(message.text))
            self.calls += len(self.parts[-1].calls)


class Style(ABC):
    """The JSON of one interface.

    `prompt` is the name of its field for the prompt, `form` what the body asks of the answer."""

    prompt: ClassVar[str]
    end: ClassVar[bytes] = b"data: [DONE]\n\n"
    """The bytes after the last event."""
    kind: ClassVar[bytes] = EVENTS
    """The content type of a stream."""
    shown: frozenset[int] = frozenset()
    """Special tokens that the text of choices must have."""
    by_origin = False
    """True if each message is to have tokens of one origin."""

    def __init__(self, body: Sampling, name: str, vocabulary: Vocabulary, form: AnswerForm | None = None) -> None:
        self._vocabulary = vocabulary
        self.form = form or form_of(body)
        self._n = body.n or 1
        self._with_ids, self._with_metrics = bool(body.return_token_ids), bool(body.return_metrics)
        self._with_prompt_logprobs = body.prompt_logprobs is not None
        options = body.stream_options or StreamOptions()
        self._with_usage, self._with_usage_so_far = bool(options.include_usage), bool(options.continuous_usage_stats)
        self._named: dict[str, Any] = {"id": name, "created": int(time.time()), "model": body.model}

    def take(self, choice: Choice, message: Chunk | Done) -> None:
        choice.take(message)

    def free(self, prompt: Sequence[int]) -> str:
        """Return the grammar of the thoughts before an answer that has a grammar, or "" for none."""
        return ""

    @abstractmethod
    async def whole(self, choices: Sequence[Choice], each: Each) -> Any:
        """Return the answer that is not streamed; `each` converts log-probabilities, most of a large answer."""

    def first(self, choice: Choice) -> list[Any]:
        """Return the events that a choice's stream begins with."""
        return []

    @abstractmethod
    def events(self, choice: Choice, message: Chunk | Done) -> list[Any]:
        """Return the events of a message; the last one's event carries the finish reason."""

    def last(self, choices: Sequence[Choice]) -> list[Any]:
        if not self._with_usage and not self._with_metrics:
            return []
        usage = self._usage(choices) if self._with_usage else UNSET
        return [self._part([], usage=usage, metrics=self._metrics(choices))]

    def error(self, error: HttpError) -> Any:
        return error_object(error)

    def encode(self, event: Any) -> bytes:
        return b"data: %b\n\n" % encoder.encode(event)

    def tokens(self, choices: Sequence[Choice]) -> int:
        """Count the tokens of prompts, each once, and choices so far."""
        prompts = sum(len(choice.request.prompt) for choice in choices[:: self._n])
        return prompts + sum(choice.request.completion_tokens for choice in choices)

    def _part(self, choices: list[Any], **more: Any) -> Any:
        raise NotImplementedError

    def _event_usage(self, choice: Choice) -> answers.Usage | UnsetType | None:
        if not self._with_usage_so_far:
            return None if self._with_usage else UNSET
        prompt, made = len(choice.request.prompt), len(choice.token_ids)
        return answers.Usage(prompt, made, prompt + made)

    async def _prompt_logprobs(self, choice: Choice, each: Each) -> Any:
        if not self._with_prompt_logprobs:
            return UNSET
        return [None, *await each(self._prompt_logprob, choice.prompt_logprobs)]

    def _prompt_logprob(self, entry: TokenLogprob) -> dict[int, answers.PromptLogprob]:
        piece = self._vocabulary.piece
        shown = {entry.token_id: answers.PromptLogprob(entry.logprob, None, piece(entry.token_id))}
        for rank, (token, logprob) in enumerate(entry.top, 1):
            shown[token] = answers.PromptLogprob(logprob, rank, piece(token))
        return shown

    def _usage(self, choices: Sequence[Choice]) -> answers.Usage:
        return answers.usage([choice.end for choice in choices], self._n)

    def _metrics(self, choices: Sequence[Choice]) -> answers.RequestMetrics | UnsetType:
        if not self._with_metrics:
            return UNSET
        return answers.request_metrics(choices[0].end.metrics, len(choices[0].token_ids))


class ParsingStyle(Style):
    """Answers with thoughts and calls of tools in them. Their ids begin with `prefix`."""

    prefix: ClassVar[str] = ""

    def __init__(
        self, body: Sampling, name: str, vocabulary: Vocabulary, format: AnswerFormat, asked: AskedAnswer
    ) -> None:
        super().__init__(body, name, vocabulary, asked.form)
        self._format, self._asked = format, asked
        self._parses = asked.parser is not None or format.reasoning is not None
        if asked.structured is not None:
            self.form = self.form._replace(field="tools")
        self.shown = format.special(asked.parser)

    def take(self, choice: Choice, message: Chunk | Done) -> None:
        if self._parses and choice.parser is None:
            asked = self._asked
            offered = {tool.function.name: tool.function.parameters for tool in asked.tools}
            exact = asked.structured is not None and asked.obey is None
            choice.parser = self._format.parser(
                asked.parser, offered, choice.request.prompt, asked.most_calls, exact, asked.obey
            )
        super().take(choice, message)

    def free(self, prompt: Sequence[int]) -> str:
        return self._format.thoughts(prompt, self._asked.parser if self._asked.structured else None)


class GrowingAnswer(ABC):
    """The parts of an answer as it grows, and the events about them. `kinds` are those of thoughts and of text."""

    kinds: ClassVar[tuple[str, str]]

    def add(self, part: Answer) -> list[Any]:
        events = []
        for piece in part.pieces:
            if isinstance(piece, ToolCall):
                events += self._add_call(piece)
            elif isinstance(piece, Thought):
                events += self._add_text(self.kinds[0], piece.text)
            else:
                events += self._add_text(self.kinds[1], piece)
        return events

    @abstractmethod
    def _add_call(self, call: ToolCall) -> list[Any]:
        """Add a part that is complete at once."""

    @abstractmethod
    def _add_text(self, kind: str, text: str) -> list[Any]:
        """Add text to the open part of this kind, or to a new one."""
