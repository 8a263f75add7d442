"""Calls of Gemma: a name and, in braces, keys and values without JSON's quotes; thoughts of Gemma 4."""

from __future__ import annotations

import json
import re
from typing import ClassVar

from ssd.frontend.parsers.reasoning import ReasoningParser
from ssd.frontend.parsers.source import NAME, NUMBER, SPACE, Malformed, Reading
from ssd.frontend.parsers.tools import ToolParser

_KEY = re.compile(r"[^:{}\[\],<\"\s]*")
_SCALAR = re.compile(r"[^,{}\[\]<\"\n]*")
_WORDS = {"true", "false", "null"}
_NULL = {"None": "null", "True": "true", "False": "false"}


class FunctionGemma(ToolParser):
    """`<start_function_call>call:f{a:<escape>text<escape>,b:1}<end_function_call>`: FunctionGemma.

    A string stands between two marks, is JSON, or is a value without quotes that is nothing else."""

    opening: ClassVar[str] = "<start_function_call>"
    closing: ClassVar[str] = "<end_function_call>"
    quote: ClassVar[str] = "<escape>"
    special = frozenset({opening, closing, quote})

    @classmethod
    def fits(cls, template: str) -> bool:
        return cls.opening in template

    def parse(self) -> Reading[None]:
        yield from self._marked_calls(self._one, self.opening)

    def _one(self, _: str) -> Reading[None]:
        yield from self._text.skip_space()
        yield from self._text.expect("call:")
        name = yield from self._text.take(NAME)
        if not name or (yield from self._text.peek()) != "{":
            raise Malformed
        self._call(name, (yield from self._object(0)))
        yield from self._drop(self.closing)

    def _object(self, depth: int) -> Reading[str]:
        members = yield from self._text.items("}", self._member, depth, trailing_comma=True)
        return f"{{{', '.join(members)}}}"

    def _member(self, depth: int) -> Reading[str]:
        if (yield from self._text.peek()) in ("<", '"'):
            key = yield from self._quoted()
        elif name := (yield from self._text.take(_KEY)):
            key = json.dumps(name, ensure_ascii=False)
        else:
            raise Malformed
        yield from self._text.separator(":")
        return f"{key}: {(yield from self._value(depth))}"

    def _value(self, depth: int) -> Reading[str]:
        """Read a value and return it as JSON. Raises Malformed."""
        char = yield from self._text.peek()
        if char == "{":
            return (yield from self._object(depth))
        if char == "[":
            return f"[{', '.join((yield from self._text.items(']', self._value, depth, trailing_comma=True)))}]"
        if char in ("<", '"'):
            return (yield from self._quoted())
        text = (yield from self._text.take(_SCALAR)).strip(SPACE)
        text = _NULL.get(text, text)
        if not text:
            raise Malformed
        return text if text in _WORDS or NUMBER.fullmatch(text) else json.dumps(text, ensure_ascii=False)

    def _quoted(self) -> Reading[str]:
        if (yield from self._text.accept(self.quote)):
            text, _ = yield from self._text.up_to(self.quote)
            return json.dumps(text, ensure_ascii=False)
        return (yield from self._text.json_object(beginning='"'))


class Gemma4Calls(FunctionGemma):
    """`<|tool_call>call:f{a:<|"|>text<|"|>,b:1}<tool_call|>`: Gemma 4."""

    opening, closing, quote = "<|tool_call>", "<tool_call|>", '<|"|>'
    special = frozenset({opening, closing, quote})


class Gemma4Think(ReasoningParser):
    """`<|channel>thought...<channel|>`: Gemma 4."""

    opening, closing = "<|channel>thought", "<channel|>"
    special = frozenset({"<|channel>"})
