"""The static shapes that verifications and draft steps run in where there is a GPU. Numbers alone, without torch:
whoever shares out memory asks for them, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

# Rows longer than this are no verification, and batches of more tokens have more to compute than to launch.
LONGEST_ROW = 16
MOST_TOKENS = 256


class Room(NamedTuple):
    """A static shape: room for so many rows, and for so many tokens, `longest` of them in a row at most."""

    rows: int
    tokens: int
    longest: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Of its `BatchTensors`: tokens, rows, those of what fills it among them, and the longest row."""
        return self.tokens, self.rows + -(-self.tokens // self.longest), self.longest


def rooms(most_rows: int, longest: int) -> list[Room]:
    """Shapes for verifications of up to `most_rows` rows of up to `longest` tokens: powers of two, smallest first."""
    found, rows = [], 1
    while True:
        tokens = rows
        while tokens <= max(rows, MOST_TOKENS):
            # More than half of the rows are there, or the batch would take a smaller shape.
            found.append(Room(rows, tokens, min(LONGEST_ROW, tokens - rows // 2)))
            if tokens >= rows * min(longest, LONGEST_ROW):
                break
            tokens *= 2
        if rows >= most_rows:
            return found
        rows *= 2


def only_room(most_rows: int) -> Room:
    """The one shape of a deterministic engine."""
    tokens = max(LONGEST_ROW, rooms(most_rows, 1)[-1].tokens)
    return Room(most_rows, tokens, LONGEST_ROW)


def fitting(counts: Sequence[int], found: Iterable[Room]) -> Room | None:
    """The first of the rooms that has enough of it for rows of so many tokens."""
    tokens, longest = sum(counts), max(counts)
    fits = (r for r in found if len(counts) <= r.rows and tokens <= r.tokens and longest <= r.longest)
    return next(fits, None)


def rooms_of_target(sequences: int, longest: int, deterministic: bool) -> list[Room]:
    """Those of a target's verifications, of up to `longest` tokens each."""
    return [only_room(sequences)] if deterministic else rooms(sequences, longest)


def rooms_of_draft(sequences: int, chains: int) -> list[Room]:
    """Those of a draft's steps: a row for the path of each sequence, and some for the chains of all of them."""
    return rooms(min(2 * sequences + chains // LONGEST_ROW, MOST_TOKENS), LONGEST_ROW)
