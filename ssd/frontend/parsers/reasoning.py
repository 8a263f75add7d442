"""Thoughts in front of a model's answer."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from ssd.frontend.parsers.source import SPACE, Machine, Reading


class Split(NamedTuple):
    """New text of the thoughts, and of the answer after them."""

    reasoning: str
    rest: str


class ReasoningParser(Machine):
    """Divides an answer that begins with thoughts between two marks. White space around the thoughts is left out.

    A subclass sets the marks. The prompt may end with the opening mark."""

    opening: ClassVar[str]
    closing: ClassVar[str]

    def __init__(self, opened: bool) -> None:
        """`opened`: the prompt ends with the opening mark."""
        self._opened = opened
        self._thoughts: list[str] = []
        self._rest: list[str] = []
        self._held = ""
        super().__init__()

    @classmethod
    def fits(cls, template: str) -> bool:
        """Return True if a chat template with this text belongs to a model that thinks between these marks."""
        return cls.closing in template

    def feed(self, text: str) -> Split:
        """Return the text that is certain after this piece and was not returned before."""
        self._advance(text, ended=False)
        return self._new()

    def finish(self) -> Split:
        """Return the text still held back, since no text follows."""
        self._advance("", ended=True)
        return self._new()

    def _new(self) -> Split:
        new = Split("".join(self._thoughts), "".join(self._rest))
        self._thoughts, self._rest = [], []
        return new

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
        """Pass thoughts on; hold white space back until more thoughts follow."""
        text = self._held + text
        certain = text.rstrip(SPACE)
        self._held = text[len(certain) :]
        self._thoughts.append(certain)

    def _answer(self, text: str) -> None:
        self._rest.append(text)


class Think(ReasoningParser):
    """`<think>...</think>`: DeepSeek-R1, Qwen 3, QwQ and most others."""

    opening, closing = "<think>", "</think>"


class MistralThink(ReasoningParser):
    """`[THINK]...[/THINK]`: Magistral."""

    opening, closing = "[THINK]", "[/THINK]"
