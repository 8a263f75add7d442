"""Turns token ids into text as they arrive: no split characters, and stop strings across token borders."""

from __future__ import annotations

import codecs
from collections.abc import Sequence, Set
from typing import TypeAlias

import msgspec

# (bytes that a token adds as the first of a text, bytes that it adds as a later one)
Piece: TypeAlias = tuple[bytes, bytes]
_NOTHING: Piece = (b"", b"")
_new_decoder = codecs.getincrementaldecoder("utf-8")


class TemplateFacts(msgspec.Struct, tag=True, frozen=True):
    """The facts of a chat template that answers depend on; parsers are those that fit it, "" for none."""

    takes_tools: bool = False
    tool_parser: str = ""
    reasoning_parser: str = ""
    takes_thinking: bool = False


class Vocabulary(msgspec.Struct, tag=True, frozen=True):
    """The text of every token: all that the frontend keeps of a tokenizer; empty for a model without one.

    `pieces`: the bytes that each token adds to a text. `first`: the bytes at the beginning of a text, where they
    differ. `silent`: special tokens, which add nothing. `longest_token`: characters of the longest token in the
    tokenizer's file, at least 1. `fill_in_ends`: tokens that end a text filled in between two others."""

    pieces: dict[int, bytes] = {}
    first: dict[int, bytes] = {}
    silent: frozenset[int] = frozenset()
    longest_token: int = 1
    has_chat: bool = False
    no_chat: str = ""
    template: TemplateFacts = TemplateFacts()
    fill_in_ends: frozenset[int] = frozenset()

    def piece(self, token_id: int) -> str:
        """Return the text of one token: special tokens by name, bytes that are no character as \\xNN."""
        return self.piece_bytes(token_id).decode("utf-8", "backslashreplace")

    def piece_bytes(self, token_id: int) -> bytes:
        return self.pieces.get(token_id, b"")

    def added_bytes(self, token_id: int, shown: Set[int] = frozenset()) -> Piece:
        """Return the bytes that a token adds to a text as its first token and as a later one.

        A special token adds its name if it is in `shown`, else nothing."""
        if token_id in self.silent and token_id not in shown:
            return _NOTHING
        later = self.pieces.get(token_id, b"")
        return self.first.get(token_id, later), later


class Detokenizer:
    """Turns the tokens of one request into text, piece by piece.

    The joined pieces equal the tokenizer's text of all ids, cut before the first stop string, for any division of the
    ids over calls. Only the bytes of an incomplete character and a possible beginning of a stop string are held back.
    For a tokenizer with a byte fallback, the number of U+FFFD that stand for invalid bytes may differ."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
        shown: Set[int] = frozenset(),
    ) -> None:
        """With `include_stop` the text ends with the stop string. It has the special tokens in `shown`."""
        self.stopped = False
        self.matched: str | None = None  # the stop string that has stopped it
        self._include_stop, self._shown = include_stop, shown
        self._vocabulary = vocabulary
        self._stop, self._min_tokens = tuple(stop), min_tokens
        self._decoder = _new_decoder("replace")
        self._begun = False
        self._count = 0
        self._held = ""

    def feed(self, token_ids: Sequence[int], ended: bool = False) -> tuple[str, int]:
        """Return (text that is now certain, how many of `token_ids` count).

        A stop string sets `stopped`: the ids behind it do not count. `ended`: the last id is a stop token. If it is
        special, only `include_stop` shows it."""
        hides = ended and not self._include_stop
        if hides and token_ids and token_ids[-1] in self._shown:
            text, count = self.feed(token_ids[:-1])
            return text, count + (not self.stopped)
        if not self._stop:
            return self._decoder.decode(self._bytes(token_ids)), len(token_ids)
        text = ""
        for count, token_id in enumerate(token_ids, start=1):
            self._count += 1
            text += self._screen(self._decoder.decode(self._bytes([token_id])))
            if self.stopped:
                return text, count
        return text, len(token_ids)

    def hides_stop(self, token_id: int) -> bool:
        return token_id in self._vocabulary.silent and not self._include_stop

    def finish(self) -> str:
        """Return the text still held back; "" after a stop string. May set `stopped`."""
        if self.stopped:
            return ""
        text = self._screen(self._decoder.decode(b"", final=True)) + self._held
        self._held = ""
        return text

    def _bytes(self, token_ids: Sequence[int]) -> bytes:
        added = []
        for token_id in token_ids:
            first, later = self._vocabulary.added_bytes(token_id, self._shown)
            added.append(later if self._begun else first)
            self._begun = self._begun or later != b""
        return b"".join(added)

    def _screen(self, piece: str) -> str:
        """Return the part of the held text and `piece` that is no part of a complete or possible stop string."""
        if not self._stop or not piece:
            return piece
        text, held = self._held + piece, len(self._held)
        found = [(text.find(stop, max(0, held - len(stop) + 1)), len(stop), stop) for stop in self._stop]
        if self._count > self._min_tokens and max(found)[0] >= 0:
            self.stopped, self._held = True, ""
            position, length, self.matched = min(one for one in found if one[0] >= 0)
            return text[: position + length * self._include_stop]
        kept = overlap(text, self._stop)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def text_of(token_ids: Sequence[int], vocabulary: Vocabulary) -> str:
    """Return the text of all ids without special tokens, with U+FFFD for bytes that are no character."""
    detokenizer = Detokenizer(vocabulary)
    return detokenizer.feed(token_ids)[0] + detokenizer.finish()


def overlap(text: str, markers: Sequence[str]) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of a marker."""
    longest = max(map(len, markers), default=1) - 1
    ends = (text[-length:] for length in range(min(len(text), longest), 0, -1))
    return next((len(end) for end in ends if any(end != marker and marker.startswith(end) for marker in markers)), 0)
