"""Chooses the parsers of a served model, and parses its answers with them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from ssd.config.engine import ServerConfig
from ssd.frontend.detokenization import Vocabulary
from ssd.frontend.parsers.marked import Llama3Json
from ssd.frontend.parsers.reasoning import ReasoningParser, Thought
from ssd.frontend.parsers.rules import Rules
from ssd.frontend.parsers.tools import ArgumentCheck, Offered, Piece, ToolCall, ToolParser
from ssd.system import registered

log = logging.getLogger("ssd.frontend")

_PROMPT_END = 16  # tokens of a prompt that may hold the opening mark of thoughts


class Answer(NamedTuple):
    """A parsed answer, or a part of one: thoughts, content and calls in their order."""

    pieces: Sequence[Thought | Piece] = ()

    @property
    def reasoning(self) -> str:
        return "".join(piece.text for piece in self.pieces if isinstance(piece, Thought))

    @property
    def content(self) -> str:
        return "".join(piece for piece in self.pieces if isinstance(piece, str))

    @property
    def calls(self) -> list[ToolCall]:
        return [piece for piece in self.pieces if isinstance(piece, ToolCall)]


def joined(parts: Sequence[Answer]) -> Answer:
    return Answer([piece for part in parts for piece in part.pieces])


class AnswerFormat:
    """Owns the choice of a model's parsers, by the server's options or its chat template.

    With `plain_tools` the prompt describes the tools in plain text, and `Llama3Json` reads the calls. With `--tools
    refuse` requests may have no tools."""

    def __init__(self, server: ServerConfig, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        calls = _chosen(server.tool_call_parser, vocabulary.template.tool_parser)
        self.plain_tools = calls is None or not vocabulary.template.takes_tools
        self.refuses_tools = self.plain_tools and server.tools == "refuse"
        if self.plain_tools and calls is not None:
            log.warning("tools are told in plain text, not for %s: the chat template has no place for them", calls)
        self.names = {
            "tool_call_parser": None if self.plain_tools else calls,
            "reasoning_parser": _chosen(server.reasoning_parser, vocabulary.template.reasoning_parser),
        }
        self.tools: type[ToolParser] = _loaded(registered.TOOLS, self.names["tool_call_parser"]) or Llama3Json
        self.reasoning: type[ReasoningParser] | None = _loaded(registered.REASONING, self.names["reasoning_parser"])

        self.ids: Callable[[str], Sequence[int]] = cache(self._ids)

    def special(self, tools: type[ToolParser] | None) -> frozenset[int]:
        """Return the special tokens that the parsers of an answer read. Its text must have them."""
        thoughts = self.reasoning
        read = set() if thoughts is None else {thoughts.opening, thoughts.closing, *thoughts.special}
        if tools is not None:
            read |= tools.special
        written = {text.encode() for text in read}
        silent = self._vocabulary.silent if written else ()
        return frozenset(token for token in silent if self._vocabulary.piece_bytes(token) in written)

    def parser(
        self,
        tools: type[ToolParser] | None,
        offered: Offered,
        prompt: Sequence[int],
        most_calls: int | None = None,
        exact: bool = False,
        obey: ArgumentCheck | None = None,
    ) -> AnswerParser:
        """Return the parser of the answer to `prompt`, which reports at most `most_calls` calls.

        `tools` reads calls of the tools in `offered`, as `exact` and `obey` tell it."""
        reasoning = None if self.reasoning is None else self.reasoning(self._opened(prompt))
        return AnswerParser(reasoning, None if tools is None else tools(offered, exact, obey), most_calls)

    def thoughts(self, prompt: Sequence[int], tools: type[ToolParser] | None) -> str:
        """Return grammar rules of the thoughts before a structured answer or enforced calls; "" for none."""
        if self.reasoning is None:
            return ""
        rules, calls = Rules((), self.ids, False), tools is not None and tools is self.tools
        before = self.reasoning.before(rules, self._opened(prompt), calls)
        return rules.grammar(before, "free") if before else ""

    def _ids(self, marker: str) -> list[int]:
        written = marker.encode()
        return [token for token, piece in self._vocabulary.pieces.items() if piece == written]

    def _opened(self, prompt: Sequence[int]) -> bool:
        assert self.reasoning is not None
        end = b"".join(map(self._vocabulary.piece_bytes, prompt[-_PROMPT_END:]))
        return end.rstrip().endswith(self.reasoning.opening.encode())


class AnswerParser:
    """Parses one answer, in pieces of any size, into thoughts, content and calls."""

    def __init__(
        self, reasoning: ReasoningParser | None, tools: ToolParser | None, most_calls: int | None = None
    ) -> None:
        self._reasoning, self._tools, self._calls_left = reasoning, tools, most_calls

    def feed(self, text: str) -> Answer:
        """Return the new part of the answer that is certain after this text."""
        return self._answer([text] if self._reasoning is None else self._reasoning.feed(text))

    def finish(self, text: str) -> Answer:
        """Return the rest of the answer; `text` is its last text."""
        parts = [self.feed(text)]
        if self._reasoning is not None:
            parts.append(self._answer(self._reasoning.finish()))
        if self._tools is not None:
            parts.append(Answer(self._limited(self._tools.finish())))
        return joined(parts)

    def _answer(self, parts: Sequence[Thought | str]) -> Answer:
        pieces: list[Thought | Piece] = []
        for part in parts:
            if isinstance(part, Thought) or self._tools is None:
                pieces += [part] if part else []
            else:
                pieces += self._limited(self._tools.feed(part))
        return Answer(pieces)

    def _limited(self, pieces: Sequence[Piece]) -> list[Piece]:
        kept = []
        for piece in pieces:
            if isinstance(piece, ToolCall) and self._calls_left is not None:
                if self._calls_left == 0:
                    continue
                self._calls_left -= 1
            kept.append(piece)
        return kept


def _chosen(asked: str, fitting: str) -> str | None:
    name = fitting if asked == registered.AUTO else asked
    return None if name in ("", registered.NONE) else name


def _loaded(group: str, name: str | None) -> Any:
    return None if name is None else registered.load(group, name)
