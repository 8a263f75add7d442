"""Prompt lookup against a search that anyone can check."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.speculation.ngram import Copied, PromptLookup


def searched(tokens: list[int], count: int) -> list[int]:
    """The longest suffix of 6 to 2 tokens that occurs earlier, at its latest occurrence: what follows, in circles."""
    for n in range(min(6, len(tokens)), 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                circle = tokens[end:]
                return (circle * count)[:count]
    return []


@settings(max_examples=500)
@given(st.lists(st.integers(0, 3), max_size=60), st.lists(st.integers(1, 7), max_size=20), st.integers(0, 8))
def test_it_finds_what_a_search_finds(tokens: list[int], cuts: list[int], count: int) -> None:
    """However the text arrives."""
    lookup, rest = PromptLookup(), list(tokens)
    for cut in cuts:
        lookup.extend(rest[:cut])
        rest = rest[cut:]
    lookup.extend(rest)
    assert lookup.propose(count) == searched(tokens, count)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], []),
        ([1], []),
        ([1, 2, 3, 4], []),
        ([1, 2, 3, 1, 2], [3, 1, 2, 3]),
        ([7, 7, 7], [7, 7, 7, 7]),
        ([1, 2, 9, 8, 1, 2, 5, 6, 1, 2], [5, 6, 1, 2]),
    ],
)
def test_by_hand(tokens: list[int], expected: list[int]) -> None:
    lookup = PromptLookup()
    lookup.extend(tokens)
    assert lookup.propose(4) == expected


@settings(max_examples=500)
@given(st.lists(st.integers(0, 3), max_size=60), st.lists(st.integers(0, 3), max_size=9), st.integers(2, 6))
def test_what_comes_after_tokens_that_are_not_committed(text: list[int], more: list[int], shortest: int) -> None:
    """The longest suffix of both that ended in the text, at its latest end there, and what is written behind it."""
    lookup, whole = PromptLookup(), [*text, *more]
    lookup.extend(text)
    found = (
        Copied(whole[end], n)
        for n in range(6, shortest - 1, -1)
        for end in range(min(len(text), len(whole) - 1), n - 1, -1)
        if whole[end - n : end] == whole[-n:]
    )
    assert lookup.after(more, shortest) == next(found, None)
