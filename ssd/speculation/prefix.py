"""Compares texts token by token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile


def common_prefix_length(one: Sequence[int], other: Sequence[int], sure: int = 0) -> int:
    """Return how many leading tokens two texts share; the first `sure` are known to be equal."""
    pairs = zip(one[sure:], other[sure : len(one)], strict=False)
    return sure + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
