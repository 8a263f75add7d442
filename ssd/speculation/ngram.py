"""Prompt lookup decoding (Saxena, 2023): proposes what followed the last tokens earlier in the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# A match of two tokens is often chance; after a match of six or more, texts nearly always continue alike.
SHORTEST, LONGEST = 2, 6


class Copied(NamedTuple):
    """The `token` that followed an earlier occurrence of the last `matching` tokens."""

    token: int
    matching: int


class PromptLookup:
    """The speculator `ngram`: an index of one sequence's n-grams, n from 2 to 6.

    Adding a token takes constant time. The evidence is the n of the n-gram that was found."""

    def __init__(self) -> None:
        self.evidence = 0
        self._tokens: list[int] = []
        # n-gram -> (end of its last occurrence, end of the one before); 0 for none.
        self._ends: dict[tuple[int, ...], tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._tokens.append(token)
            end = len(self._tokens)
            for n in range(SHORTEST, min(LONGEST, end) + 1):
                gram = tuple(self._tokens[end - n :])
                before = self._ends.get(gram)
                self._ends[gram] = (end, before[0] if before else 0)

    def propose(self, count: int) -> list[int]:
        """Return `count` tokens that followed the longest known n-gram when it last occurred; [] without one.

        A proposal that reaches the end of the text starts over."""
        size = len(self._tokens)
        for n in range(min(LONGEST, size), SHORTEST - 1, -1):
            end = self._ends[tuple(self._tokens[size - n :])][1]
            if end:
                self.evidence = n
                text = self._tokens[end:]
                return [text[index % len(text)] for index in range(count)]
        return []

    def after(self, tokens: Sequence[int], shortest: int = SHORTEST) -> Copied | None:
        """Return the token that followed the longest known n-gram, n >= `shortest`, that ends text + `tokens`.

        Only the text is searched. Takes microseconds."""
        size = len(self._tokens)
        last = [*self._tokens[-LONGEST:], *tokens[-LONGEST:]][-LONGEST:]
        for n in range(len(last), shortest - 1, -1):
            end, before = self._ends.get(tuple(last[-n:]), (0, 0))
            if end == size > 0:  # the last occurrence ends the text
                if tokens:
                    return Copied(tokens[0], n)
                end = before
            if end:
                return Copied(self._tokens[end], n)
        return None
