"""Token ids to text as they arrive: no split characters, stop strings across token borders."""

from __future__ import annotations

from collections.abc import Sequence

from ssd.frontend.tokenization import Tokenizer

_INCOMPLETE = "\ufffd"


class Detokenizer:
    """The text of one request.

    All pieces together are `tokenizer.decode(all ids)`, cut before the first stop string; how the ids were divided
    over calls makes no difference. Text that later tokens could still change, or that may be the beginning of a stop
    string, is held back. (With byte-fallback vocabularies an output that ends within a character may show other
    replacement characters than `decode`.)
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids: list[int] = []
        # Decoding starts over not at the first id but at `_start`, one piece before the last `_border` between whole
        # characters (some decoders treat the first token differently). Of that text, `_shown` characters are out.
        self._start = 0
        self._border = 0
        self._shown = 0
        self._held = ""

    def feed(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """(text that is now certain, how many of `token_ids` count).

        The second is less than len(token_ids) when a stop string completes before the last of them; `stopped` is then
        true and nothing may be fed any more.
        """
        if not self._stop:
            self._ids += token_ids
            return self._decode(final=False), len(token_ids)
        text = ""
        for count, token_id in enumerate(token_ids, start=1):
            self._ids.append(token_id)
            text += self._screen(self._decode(final=False))
            if self.stopped:
                return text, count
        return text, len(token_ids)

    def finish(self) -> str:
        """The text still held back, now that no token will follow; may set `stopped`. Empty after a stop string."""
        if self.stopped:
            return ""
        text = self._screen(self._decode(final=True)) + self._held
        self._held = ""
        return text

    def _decode(self, final: bool) -> str:
        """The text that the ids since the last call make certain; all of it if `final`."""
        text = self._tokenizer.decode(self._ids[self._start :])
        certain = len(text if final else text.rstrip(_INCOMPLETE))
        piece = text[self._shown : certain]
        self._shown = max(self._shown, certain)
        if piece and certain == len(text):
            self._start, self._border = self._border, len(self._ids)
            self._shown = len(self._tokenizer.decode(self._ids[self._start :]))
        return piece

    def _screen(self, piece: str) -> str:
        """What of the held text and `piece` can be shown: up to a stop string, or to what may become one."""
        if not self._stop or not piece:
            return piece
        text = self._held + piece
        found = [position for stop in self._stop if (position := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        held = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
