"""Padded shapes for CUDA graphs. It must not import torch, for `ssd.launch.memory`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

# A larger batch of the target runs unpadded: a longer row is a prompt, and with more tokens launches take a small part
# of the time.
LONGEST_ROW = 16
MOST_TOKENS = 256
# Path tokens that a draft's forward computes at most, so that a long prompt does not delay other sequences' chains.
PATH_TOKENS = 128


class GraphShape(NamedTuple):
    """Holds up to `rows` rows and `tokens` tokens, no row longer than `longest`."""

    rows: int
    tokens: int
    longest: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return tokens, rows with the padding's, longest row, for `BatchTensors`."""
        return self.tokens, self.rows + -(-self.tokens // self.longest), self.longest


def graph_shapes(most_rows: int, longest: int) -> list[GraphShape]:
    """Return shapes up to `most_rows` rows of `longest` tokens: powers of two, smallest first."""
    found, rows = [], 1
    while True:
        tokens = rows
        while tokens <= max(rows, MOST_TOKENS):
            # More than half of the rows are used, or the batch would take a smaller shape.
            found.append(GraphShape(rows, tokens, min(LONGEST_ROW, tokens - rows // 2)))
            if tokens >= rows * min(longest, LONGEST_ROW):
                break
            tokens *= 2
        if rows >= most_rows:
            return found
        rows *= 2


def smallest_fitting(counts: Sequence[int], shapes: Iterable[GraphShape]) -> GraphShape | None:
    """Return the first of `shapes`, smallest first, that holds rows of these lengths, or None."""
    tokens, longest = sum(counts), max(counts)
    fits = (s for s in shapes if len(counts) <= s.rows and tokens <= s.tokens and longest <= s.longest)
    return next(fits, None)


def target_shapes(sequences: int, longest: int, deterministic: bool) -> list[GraphShape]:
    """Return the shapes of verifications of up to `longest` tokens a row."""
    if not deterministic:
        return graph_shapes(sequences, longest)
    tokens = max(LONGEST_ROW, graph_shapes(sequences, 1)[-1].tokens)
    return [GraphShape(sequences, tokens, LONGEST_ROW)]


def draft_shapes(sequences: int, chains: int) -> list[GraphShape]:
    """Return the shapes of a draft's steps: the paths of all sequences, a prompt, all chains."""
    rows = 2 * sequences + (PATH_TOKENS + min(chains, MOST_TOKENS)) // LONGEST_ROW
    return graph_shapes(min(rows, MOST_TOKENS), LONGEST_ROW)
