"""Calls of tools as a list of Python calls, whose arguments are Python literals."""

from __future__ import annotations

import json
import re
from typing import Any

from ssd.frontend.parsers.rules import Rules
from ssd.frontend.parsers.source import NAME, NUMBER, Malformed, Reading
from ssd.frontend.parsers.tools import ToolParser

_SCALAR = re.compile(r"[-+.\w]*")
_PLAIN = {quote: re.compile(rf"[^\\\n{quote}]*") for quote in "\"'"}
_ESCAPES = {
    **{char: char for char in "\\'\""},
    **{"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""},
}
_CODES = {"x": 2, "u": 4, "U": 8}
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_OPENING = {"<|python_start|>": "<|python_end|>", "<|tool_call_start|>": "<|tool_call_end|>"}


class Pythonic(ToolParser):
    """`[f(a="b", c=1), g()]` as the whole answer (Llama 3.2 and 4), or between marks (Llama 4, LFM2).

    Without marks, only calls of the request's tools are calls."""

    special = frozenset({*_OPENING, *_OPENING.values()})

    @classmethod
    def fits(cls, template: str) -> bool:
        return any(text in template for text in ("[func_name1(", "<|tool_call_start|>", "<|tool_list_start|>"))

    @classmethod
    def forced(cls, rules: Rules) -> str:
        calls = cls._calls(rules)
        marked = [
            f"{rules.marker(opening)} {calls} {rules.marker(closing)}"
            for opening, closing in _OPENING.items()
            if rules.knows(opening)
        ]
        return rules.any_of([calls, *marked])

    @classmethod
    def allowed(cls, rules: Rules) -> str:
        names = "|".join(re.escape(function.name) for function in rules.functions)
        plain, calls = rules.plain([*_OPENING], rf"\s*\[\s*({names})\("), cls._calls(rules)
        opening = next(filter(rules.knows, _OPENING), "<|python_start|>")
        return f"{calls} | {rules.calls_in_text(opening, f'{calls} {rules.marker(_OPENING[opening])}', plain)}"

    @classmethod
    def _calls(cls, rules: Rules) -> str:
        """Return the expression of a list of calls; `[name(` is one text, so it differs from plain text."""
        arguments = [(each, rules.any_of([f'{rules.keywords(each)} ")"'])) for each in rules.functions]
        first, others = (
            rules.any_of([f"{rules.name(each, before, '(')} {given}" for each, given in arguments])
            for before in ("[", ", ")
        )
        return rules.any_of([f'{first} {rules.at_will(others)} "]"'])

    def parse(self) -> Reading[None]:
        opening = ""
        while True:
            yield from self._text.skip_space()
            try:
                yield from self._list(known=not opening)
            except Malformed:
                self._give_back()
            else:
                if opening:
                    yield from self._drop(_OPENING[opening])
            opening = yield from self._content(*_OPENING)
            if not opening:
                return

    def _list(self, known: bool) -> Reading[None]:
        yield from self._text.expect("[")
        while True:
            yield from self._text.skip_space()
            name = yield from self._text.take(NAME)
            if not name or (known and name not in self._offered) or (yield from self._text.peek()) != "(":
                raise Malformed
            arguments = yield from self._text.items(")", self._argument, 0, trailing_comma=True)
            if len(dict(arguments)) < len(arguments):  # one was given twice
                raise Malformed
            self._call(name, _object(arguments))
            yield from self._text.skip_space()
            if (yield from self._text.accept("]")):
                self._text.mark()
                return
            yield from self._text.expect(",")

    def _argument(self, depth: int) -> Reading[tuple[str, str]]:
        name = yield from self._text.take(NAME)
        if not name.isidentifier():
            raise Malformed
        yield from self._text.separator("=")
        return json.dumps(name), (yield from self._value(depth))

    def _value(self, depth: int) -> Reading[str]:
        char = yield from self._text.peek()
        if char in ("[", "("):
            closing = "]" if char == "[" else ")"
            values = yield from self._text.items(closing, self._value, depth, trailing_comma=True)
            return f"[{', '.join(values)}]"
        if char == "{":
            return _object((yield from self._text.items("}", self._member, depth, trailing_comma=True)))
        if char in ('"', "'"):
            return (yield from self._string())
        word = yield from self._text.take(_SCALAR)
        if word not in _WORDS and not NUMBER.fullmatch(word):
            raise Malformed
        return _WORDS.get(word, word)

    def _member(self, depth: int) -> Reading[tuple[str, str]]:
        if (yield from self._text.peek()) not in ('"', "'"):
            raise Malformed
        key = yield from self._string()
        yield from self._text.separator(":")
        return key, (yield from self._value(depth))

    def _string(self) -> Reading[str]:
        quote = yield from self._text.character()
        parts = []
        while True:
            parts.append((yield from self._text.take(_PLAIN[quote])))
            char = yield from self._text.character()
            if char == quote:
                return json.dumps("".join(parts), ensure_ascii=False)
            if char == "\n":
                raise Malformed
            parts.append((yield from self._escape()))

    def _escape(self) -> Reading[str]:
        char = yield from self._text.character()
        if char not in _CODES:
            return _ESCAPES.get(char, "\\" + char)
        code = yield from self._text.digits(_CODES[char])
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            raise Malformed
        return chr(code)


def _object(members: list[Any]) -> str:
    return f"{{{', '.join(f'{key}: {value}' for key, value in members)}}}"
