"""The arena of hidden states: what is not the wanted text's, whole and sound is not there."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from ssd.config import EngineConfig, Features
from ssd.ipc.features import FeatureArena, extend_tags
from ssd.ipc.process import memory_file

PAGE_SIZE, PAGES, WIDTH = 4, 6, 3
CONFIG = EngineConfig(
    target="target",
    draft="draft",
    max_num_seqs=2,
    max_model_len=12,
    page_size=PAGE_SIZE,
    num_pages=PAGES,
    features=Features(layers=(0, 1, 2), width=WIDTH),
)
TEXT = [7, 7, 3, 9, 1, 0, 5]


def tags(text: list[int]) -> list[int]:
    found: list[int] = []
    extend_tags(found, text)
    return found


def rows(count: int, first: float = 0.0) -> np.ndarray:
    return np.arange(first, first + WIDTH * count, dtype=np.float32).reshape(count, WIDTH)


@pytest.fixture
def sides() -> Iterator[tuple[FeatureArena, FeatureArena]]:
    """The target's view, with TEXT in slot 1, and the draft's."""
    descriptor = memory_file("features", FeatureArena.size_bytes(CONFIG))
    target, draft = FeatureArena(descriptor, CONFIG, writable=True), FeatureArena(descriptor, CONFIG)
    os.close(descriptor)
    target.write(1, [4, 2], 0, tags(TEXT), rows(len(TEXT)))
    yield target, draft


def test_what_was_written_is_read_from_any_position(sides: tuple[FeatureArena, FeatureArena]) -> None:
    for start in range(len(TEXT)):
        assert np.array_equal(sides[1].read(1, start, tags(TEXT)[start:]), rows(len(TEXT))[start:])


def test_another_text_has_no_features_here(sides: tuple[FeatureArena, FeatureArena]) -> None:
    """Not from the token on that differs, not in another slot, not behind its end, nor behind that of the table."""
    _, draft = sides
    other = tags([*TEXT[:3], 8, *TEXT[4:]])
    assert len(draft.read(1, 0, other)) == 3 and len(draft.read(1, 4, other[4:])) == 0
    assert len(draft.read(0, 0, tags(TEXT))) == 0
    assert len(draft.read(1, 0, tags([*TEXT, 1]))) == len(TEXT)
    assert len(draft.read(1, 11, [1, 2, 3])) == len(draft.read(1, 12, [1])) == 0


def test_a_page_that_went_to_another_text_is_not_taken_for_the_old_one(
    sides: tuple[FeatureArena, FeatureArena],
) -> None:
    target, draft = sides
    target.write(0, [2], 0, tags([1, 2]), rows(2, 100.0))
    assert len(draft.read(1, 0, tags(TEXT))) == 4
    assert np.array_equal(draft.read(0, 0, tags([1, 2])), rows(2, 100.0))


def test_a_row_that_is_being_written_is_not_read(sides: tuple[FeatureArena, FeatureArena]) -> None:
    target, draft = sides
    target._versions[4 * PAGE_SIZE + 2] = 0
    assert len(draft.read(1, 0, tags(TEXT))) == 2


def test_a_row_that_is_overwritten_while_it_is_read_is_not_used(sides: tuple[FeatureArena, FeatureArena]) -> None:
    target, draft = sides

    class Overtaken(np.ndarray):
        """Rows during whose copy the target writes the second one again."""

        def __getitem__(self, index: object) -> object:
            target.write(0, [4], 1, tags(TEXT)[1:2], rows(1, 50.0))
            return np.asarray(super().__getitem__(index))

    draft._rows = draft._rows.view(Overtaken)
    assert len(draft.read(1, 0, tags(TEXT))) == 1


@pytest.mark.parametrize("page", [-1, PAGES, 2**60, -(2**60)])
def test_a_page_that_does_not_exist_is_not_followed(sides: tuple[FeatureArena, FeatureArena], page: int) -> None:
    target, draft = sides
    target._table[1, 1] = page
    assert len(draft.read(1, 0, tags(TEXT))) == 4


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_number_is_no_feature(sides: tuple[FeatureArena, FeatureArena], value: float) -> None:
    target, draft = sides
    target._rows[4 * PAGE_SIZE + 1, 2] = value
    assert len(draft.read(1, 0, tags(TEXT))) == 1


def test_the_draft_cannot_write(sides: tuple[FeatureArena, FeatureArena]) -> None:
    with pytest.raises(ValueError, match="read-only"):
        sides[1].write(0, [0], 0, [1], rows(1))
