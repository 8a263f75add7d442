"""Prompt lookup decoding (Saxena, 2023): what followed the last tokens when they were written before.

The built-in speculator (`ssd.speculation.backups`), one for each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Two equal tokens in a row are often chance; texts that agree on more than six hardly ever go on differently.
SHORTEST, LONGEST = 2, 6


class Copied(NamedTuple):
    """The `token` that followed the last `matching` tokens when they were written before."""

    token: int
    matching: int


class PromptLookup:
    """An index of one sequence's n-grams, n from 2 to 6. A token is added in constant time.

    The evidence for a proposal is the n of the n-gram that was found."""

    def __init__(self) -> None:
        self.evidence = 0
        self._tokens: list[int] = []
        # n-gram -> (where it last ended, where it ended before): the last one is the end of the text itself.
        self._ends: dict[tuple[int, ...], tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add committed tokens."""
        for token in tokens:
            self._tokens.append(token)
            end = len(self._tokens)
            for n in range(SHORTEST, min(LONGEST, end) + 1):
                gram = tuple(self._tokens[end - n :])
                before = self._ends.get(gram)
                self._ends[gram] = (end, before[0] if before else 0)

    def propose(self, count: int) -> list[int]:
        """Returns `count` tokens that followed the latest occurrence of the longest known n-gram; [] without one.

        A repetition that reaches the end of the text goes on in circles: proposed tokens count as written."""
        size = len(self._tokens)
        for n in range(min(LONGEST, size), SHORTEST - 1, -1):
            end = self._ends[tuple(self._tokens[size - n :])][1]
            if end:
                self.evidence = n
                text = self._tokens[end:]
                return [text[index % len(text)] for index in range(count)]
        return []

    def after(self, tokens: Sequence[int], shortest: int = SHORTEST) -> Copied | None:
        """Returns what followed the longest known n-gram, n >= `shortest`, at the end of the text and `tokens`.

        Only the text is searched, not `tokens`. Takes microseconds."""
        size = len(self._tokens)
        last = [*self._tokens[-LONGEST:], *tokens[-LONGEST:]][-LONGEST:]
        for n in range(len(last), shortest - 1, -1):
            end, before = self._ends.get(tuple(last[-n:]), (0, 0))
            if end == size > 0:  # nothing of the text follows
                if tokens:
                    return Copied(tokens[0], n)
                end = before
            if end:
                return Copied(self._tokens[end], n)
        return None
