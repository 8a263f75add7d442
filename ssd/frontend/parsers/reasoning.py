"""Thoughts in front of a model's answer."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from ssd.frontend.parsers.rules import Rules
from ssd.frontend.parsers.source import Machine, Reading, with_held


class Thought(NamedTuple):
    """Text of the thoughts."""

    text: str


class ReasoningParser(Machine[Thought | str]):
    """Divides an answer that begins with thoughts, without white space around them, between two marks.

    A subclass sets the marks. The prompt may end with the opening mark."""

    opening: ClassVar[str]
    closing: ClassVar[str]
    special: ClassVar[frozenset[str]] = frozenset()
    """Special tokens of the format beside the marks. The parsed text must have them."""

    def __init__(self, opened: bool) -> None:
        """`opened`: the prompt ends with the opening mark."""
        self._opened = opened
        self._held: list[str] = []  # white space that is left out at the end of thoughts
        super().__init__()

    @classmethod
    def fits(cls, template: str) -> bool:
        """Return True if a model with a chat template of this text thinks between these marks."""
        return cls.closing in template

    @classmethod
    def turn(cls, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message in OpenAI's format as the format's chat templates take it."""
        return message

    @classmethod
    def before(cls, rules: Rules, opened: bool, calls: bool) -> str:
        """Return the grammar expression of the text before a structured answer or `calls`; "" for none."""
        rest = rf"{rules.up_to(cls.closing, rules.plain([cls.closing]))} (/[ \n]{{1,4}}/)?"
        return rest if opened else f"({rules.marker(cls.opening)} {rest})?"

    def _parse(self) -> Reading[None]:
        text = self._text
        yield from text.skip_space()
        if (yield from text.accept(self.opening)) or self._opened:
            yield from text.skip_space()
            yield from text.until((self.closing,), self._think)
            yield from text.skip_space()
        else:
            self._answer(text.span())
        yield from text.until((), self._answer)

    def _think(self, text: str) -> None:
        if certain := with_held(self._held, text):
            self._pieces.append(Thought(certain))

    def _answer(self, text: str) -> None:
        self._pieces.append(text)


class Think(ReasoningParser):
    """`<think>...</think>`: DeepSeek-R1, Qwen 3, QwQ and most others."""

    opening, closing = "<think>", "</think>"
