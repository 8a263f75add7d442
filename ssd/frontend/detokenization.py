"""Token ids to text as they arrive: no split characters, stop strings across token borders."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from ssd.frontend.vocabulary import Vocabulary

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one request.

    All pieces together are what the tokenizer decodes all ids to, cut before the first stop string; how the ids were
    divided over calls makes no difference. The bytes of a character that is not complete, and what may be the beginning
    of a stop string, are held back: nothing else is, and no token is looked at twice. A stop string ends nothing
    before there are more than `min_tokens` tokens. (Of bytes that are no characters, a tokenizer shows others as U+FFFD
    where its vocabulary has single bytes as a fallback.)
    """

    def __init__(self, vocabulary: Vocabulary, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        self.stopped = False
        self._vocabulary = vocabulary
        self._stop, self._min_tokens = tuple(stop), min_tokens
        self._decoder = _new_decoder("replace")
        self._begun = False
        self._count = 0
        self._held = ""

    def feed(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """(text that is now certain, how many of `token_ids` count).

        The second is less than len(token_ids) when a stop string completes before the last of them; `stopped` is then
        true and nothing may be fed any more.
        """
        if not self._stop:
            return self._decoder.decode(self._bytes(token_ids)), len(token_ids)
        text = ""
        for count, token_id in enumerate(token_ids, start=1):
            self._count += 1
            text += self._screen(self._decoder.decode(self._bytes([token_id])))
            if self.stopped:
                return text, count
        return text, len(token_ids)

    def finish(self) -> str:
        """The text still held back, now that no token will follow; may set `stopped`. Empty after a stop string."""
        if self.stopped:
            return ""
        text = self._screen(self._decoder.decode(b"", final=True)) + self._held
        self._held = ""
        return text

    def _bytes(self, token_ids: Sequence[int]) -> bytes:
        """What these tokens add to the text. The first that adds something may add less there than after others."""
        added = []
        for token_id in token_ids:
            first, later = self._vocabulary.added_bytes(token_id)
            added.append(later if self._begun else first)
            self._begun = self._begun or later != b""
        return b"".join(added)

    def _screen(self, piece: str) -> str:
        """What of the held text and `piece` can be shown: up to a stop string that `piece` completes, or to what may
        become one."""
        if not self._stop or not piece:
            return piece
        text, held = self._held + piece, len(self._held)
        found = [text.find(stop, max(0, held - len(stop) + 1)) for stop in self._stop]
        if self._count > self._min_tokens and max(found) >= 0:
            self.stopped, self._held = True, ""
            return text[: min(position for position in found if position >= 0)]
        overlap = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - overlap :]
        return text[: len(text) - overlap]


def text_of(token_ids: Sequence[int], vocabulary: Vocabulary) -> str:
    """The text of all ids, without special tokens; bytes that are no character come out as U+FFFD."""
    detokenizer = Detokenizer(vocabulary)
    return detokenizer.feed(token_ids)[0] + detokenizer.finish()


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
