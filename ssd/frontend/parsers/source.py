"""Text that comes in pieces, for parsers that read it as if all of it were there.

A parser is a generator that yields where a `Source` needs more text. No decision depends on where the pieces end."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from functools import lru_cache
from typing import Any, Generic, TypeAlias, TypeVar

_Value = TypeVar("_Value")
Reading: TypeAlias = Generator[None, None, _Value]
"""A generator that reads a source and returns a value once enough text has come."""

MAX_DEPTH = 64
"""Limit of nested lists and objects; deeper text is malformed."""
SPACE = " \t\r\n"
_SPACE = re.compile(f"[{SPACE}]*")
_SCALAR = re.compile(r"[-+.0-9A-Za-z]*")
_NO_TAG = re.compile(r"[^<]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
NAME = re.compile(r"[\w.-]*")  # of a tool
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")


@lru_cache(maxsize=256)
def _search(markers: tuple[str, ...]) -> tuple[re.Pattern[str], frozenset[str], int]:
    beginnings = frozenset(marker[:length] for marker in markers for length in range(1, len(marker)))
    return re.compile("|".join(map(re.escape, markers))), beginnings, max(map(len, beginnings), default=0)


class Malformed(Exception):
    """Raised where text does not continue in the format that it began with."""


class Source:
    """Owns the text that has come, and the position in it. A span, which is kept, begins at a mark."""

    def __init__(self) -> None:
        self._read: list[str] = []  # since the mark, up to the buffer
        self._buffer, self._at, self._marked = "", 0, 0
        self.ended = False

    def add(self, text: str) -> None:
        self._cut()
        self._buffer, self._at, self._marked = self._buffer[self._at :] + text, 0, 0

    def mark(self) -> None:
        self._read.clear()
        self._marked = self._at

    def span(self) -> str:
        self._cut()
        return "".join(self._read)

    def _cut(self) -> int:
        if self._at > self._marked:
            self._read.append(self._buffer[self._marked : self._at])
            self._marked = self._at
        return len(self._read)

    # -- reading ----------------------------------------------------------------------------------------------------

    def peek(self) -> Reading[str]:
        """Return the next character without reading it; "" at the end."""
        while self._at == len(self._buffer) and not self.ended:
            yield
        return self._buffer[self._at : self._at + 1]

    def accept(self, literal: str) -> Reading[bool]:
        """Read exactly this text if it comes next; return True if it did."""
        while True:
            there = self._buffer[self._at : self._at + len(literal)]
            if there == literal:
                self._at += len(literal)
                return True
            if self.ended or not literal.startswith(there):
                return False
            yield

    def one_of(self, literals: Iterable[str]) -> Reading[str]:
        """Read one of these texts. Raises Malformed where other text comes."""
        for literal in literals:
            if (yield from self.accept(literal)):
                return literal
        raise Malformed

    def expect(self, literal: str) -> Reading[None]:
        """Read exactly this text. Raises Malformed where other text comes."""
        if not (yield from self.accept(literal)):
            raise Malformed

    def separator(self, literal: str) -> Reading[None]:
        """Read this text and white space around it. Raises Malformed where other text comes."""
        yield from self.skip_space()
        yield from self.expect(literal)
        yield from self.skip_space()

    def take(self, characters: re.Pattern[str]) -> Reading[str]:
        """Read and return as much as a pattern of single characters, such as `[a-z]*`, matches."""
        taken = []
        while True:
            found = characters.match(self._buffer, self._at)
            assert found is not None, "the pattern matches an empty text"
            taken.append(found[0])
            self._at = found.end()
            if self.ended or self._at < len(self._buffer):
                return "".join(taken)
            yield

    def skip_space(self) -> Reading[None]:
        yield from self.take(_SPACE)

    def until(self, markers: tuple[str, ...], passed: Callable[[str], None]) -> Reading[str]:
        """Read up to the first marker and return it, "" at the end; a new span begins at the marker.

        `passed` gets the text before the marker as soon as it is certain."""
        any_marker, beginnings, longest = _search(markers)
        while True:
            found = any_marker.search(self._buffer, self._at) if markers else None
            end = found.start() if found else len(self._buffer)
            if found is None and not self.ended:
                starts = range(max(self._at, end - longest), end)
                end = next((start for start in starts if self._buffer[start:] in beginnings), end)
            if end > self._at:
                passed(self._buffer[self._at : end])
            self._at = end
            self.mark()
            if found is not None:
                self._at = found.end()
                return found[0]
            if self.ended:
                return ""
            yield

    def back(self, length: int) -> None:
        """Go back over this many characters at the end of the marker that `until` has found."""
        self._at -= length

    def up_to(self, *markers: str) -> Reading[tuple[str, str]]:
        """Return the text before the first marker, and the marker; each begins with `<`. Raises Malformed."""
        parts = []
        while True:
            parts.append((yield from self.take(_NO_TAG)))
            for marker in markers:
                if (yield from self.accept(marker)):
                    return "".join(parts), marker
            parts.append((yield from self.character()))

    def json_object(self, beginning: str = "{") -> Reading[str]:
        """Read a JSON object (or, by its `beginning`, a string), return its text. Raises Malformed."""
        if not (char := (yield from self.peek())) or char not in beginning:
            raise Malformed
        before = self._cut()
        yield from self._json(0)
        self._cut()
        return "".join(self._read[before:])

    def _json(self, depth: int) -> Reading[None]:
        char = yield from self.peek()
        if char == "{":
            yield from self.items("}", self._member, depth)
        elif char == "[":
            yield from self.items("]", self._json, depth)
        elif char == '"':
            yield from self._json_string()
        else:
            text = yield from self.take(_SCALAR)
            if text not in ("true", "false", "null") and not NUMBER.fullmatch(text):
                raise Malformed

    def items(
        self, closing: str, item: Callable[[int], Reading[Any]], depth: int, trailing_comma: bool = False
    ) -> Reading[list[Any]]:
        """Read items with commas between them, in brackets. Raises Malformed."""
        if depth == MAX_DEPTH:
            raise Malformed
        self._at += 1
        values: list[Any] = []
        yield from self.skip_space()
        while not (yield from self.accept(closing)):
            if values:
                yield from self.expect(",")
                yield from self.skip_space()
                if trailing_comma and (yield from self.accept(closing)):
                    break
            values.append((yield from item(depth + 1)))
            yield from self.skip_space()
        return values

    def _member(self, depth: int) -> Reading[None]:
        yield from self._json_string()
        yield from self.separator(":")
        yield from self._json(depth)

    def _json_string(self) -> Reading[None]:
        yield from self.expect('"')
        while True:
            yield from self.take(_PLAIN)
            if (yield from self.accept('"')):
                return
            yield from self.expect("\\")
            if (escape := (yield from self.character())) == "u":
                yield from self.digits(4)
            elif escape not in '"\\/bfnrt':
                raise Malformed

    def character(self) -> Reading[str]:
        """Read one character. Raises Malformed at the end."""
        char = yield from self.peek()
        if not char:
            raise Malformed
        self._at += 1
        return char

    def digits(self, count: int) -> Reading[int]:
        """Read `count` hexadecimal digits and return their value."""
        text = ""
        while len(text) < count:
            text += yield from self.character()
            if text[-1] not in "0123456789abcdefABCDEF":
                raise Malformed
        return int(text, 16)


def with_held(held: list[str], text: str) -> str:
    """Return `held` white space and a text without the white space at its end, which is held instead.

    White space that never ends takes linear time."""
    certain = text.rstrip(SPACE)
    rest = text[len(certain) :]
    if certain:
        certain = "".join(held) + certain
        held.clear()
    if rest:
        held.append(rest)
    return certain


class Machine(ABC, Generic[_Value]):
    """Base of the parsers of one answer. A subclass's `_parse` reads the text and adds to `_pieces`."""

    def __init__(self) -> None:
        self._text = Source()
        self._pieces: list[_Value] = []
        self._machine = self._parse()
        self._finished = False

    @abstractmethod
    def _parse(self) -> Reading[None]:
        """Read `self._text` to its end."""

    def feed(self, text: str) -> list[_Value]:
        """Return the new pieces that are certain after this text."""
        self._advance(text, ended=False)
        return self._new()

    def finish(self) -> list[_Value]:
        self._advance("", ended=True)
        return self._new()

    def _new(self) -> list[_Value]:
        new, self._pieces = self._pieces, []
        return new

    def _advance(self, text: str, ended: bool) -> None:
        self._text.add(text)
        self._text.ended = ended
        if not self._finished:
            self._finished = next(self._machine, self) is self
