"""The arena of hidden states: a row that is stale, torn, not finite or of another text is not read."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from ssd.config.engine import EngineConfig, Features
from ssd.ipc.features import FeatureArena, FeaturePart, extend_tags
from ssd.ipc.layouts import feature_layout
from ssd.ipc.process import memory_file

PAGE_SIZE, PAGES, WIDTH = 4, 6, 3
CONFIG = EngineConfig(
    target="target",
    draft="draft",
    max_num_seqs=2,
    max_model_len=12,
    page_size=PAGE_SIZE,
    num_pages=PAGES,
    features=Features(kind="", layers=(0, 1, 2), width=WIDTH),
)
TEXT = [7, 7, 3, 9, 1, 0, 5]


def tags(text: list[int]) -> list[int]:
    found: list[int] = []
    extend_tags(found, text)
    return found


def rows(count: int, first: float = 0.0) -> torch.Tensor:
    return torch.arange(first, first + WIDTH * count).reshape(count, WIDTH)


@pytest.fixture
def sides() -> Iterator[tuple[FeatureArena, FeatureArena]]:
    """The target's view, with TEXT in slot 1, and the draft's."""
    descriptor = memory_file("features", feature_layout(CONFIG).size_bytes)
    target, draft = FeatureArena(descriptor, CONFIG, writable=True), FeatureArena(descriptor, CONFIG)
    os.close(descriptor)
    target.write([FeaturePart(1, [4, 2], 0, tags(TEXT))], rows(len(TEXT)))
    yield target, draft


def test_what_was_written_is_read_from_any_position(sides: tuple[FeatureArena, FeatureArena]) -> None:
    for start in range(len(TEXT)):
        assert torch.equal(sides[1].read(1, start, tags(TEXT)[start:]), rows(len(TEXT))[start:])


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
    target.write([FeaturePart(0, [2], 0, tags([1, 2]))], rows(2, 100.0))
    assert len(draft.read(1, 0, tags(TEXT))) == 4
    assert torch.equal(draft.read(0, 0, tags([1, 2])), rows(2, 100.0))


def test_a_row_that_is_being_written_is_not_read(sides: tuple[FeatureArena, FeatureArena]) -> None:
    target, draft = sides
    target._versions[4 * PAGE_SIZE + 2] = 0
    assert len(draft.read(1, 0, tags(TEXT))) == 2


def test_a_row_that_is_overwritten_while_it_is_read_is_not_used(sides: tuple[FeatureArena, FeatureArena]) -> None:
    target, draft = sides

    class Overtaken(torch.Tensor):
        """Rows during whose copy the target writes the second one again."""

        def __getitem__(self, index: object) -> torch.Tensor:
            target.write([FeaturePart(0, [4], 1, tags(TEXT)[1:2])], rows(1, 50.0))
            return super().__getitem__(index).as_subclass(torch.Tensor)

    draft._rows = draft._rows.as_subclass(Overtaken)
    assert len(draft.read(1, 0, tags(TEXT))) == 1


def test_several_sequences_are_written_at_once_and_shown_when_the_device_is_done(
    sides: tuple[FeatureArena, FeatureArena], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = sides
    seen: list[int] = []
    monkeypatch.setattr("ssd.ipc.features.settle", lambda rows: seen.append(len(draft.read(0, 0, tags([1, 2])))))
    target.write(
        [FeaturePart(0, [5], 0, tags([1, 2])), FeaturePart(1, [4, 2], 3, tags([*TEXT[:3], 8])[3:])], rows(3, 60.0)
    )
    assert seen == [0]
    assert torch.equal(draft.read(0, 0, tags([1, 2])), rows(2, 60.0))
    assert torch.equal(draft.read(1, 3, tags([*TEXT[:3], 8])[3:]), rows(1, 60.0 + 2 * WIDTH))


def test_rows_elsewhere_are_not_there_until_they_are_written(sides: tuple[FeatureArena, FeatureArena]) -> None:
    target, draft = sides
    elsewhere = torch.zeros(feature_layout(CONFIG).row_bytes, dtype=torch.uint8)
    for side in sides:
        side.place(elsewhere)
    assert len(draft.read(1, 0, tags(TEXT))) == 0
    target.write([FeaturePart(1, [4, 2], 0, tags(TEXT))], rows(len(TEXT), 9.0))
    assert torch.equal(draft.read(1, 0, tags(TEXT)), rows(len(TEXT), 9.0)) and elsewhere.any()


def test_rows_are_of_the_targets_type() -> None:
    config = replace(CONFIG, dtype="bfloat16")
    assert feature_layout(config).row_bytes == feature_layout(CONFIG).row_bytes // 2
    descriptor = memory_file("features", feature_layout(config).size_bytes)
    arena = FeatureArena(descriptor, config, writable=True)
    os.close(descriptor)
    states = rows(len(TEXT)).div(3).bfloat16()
    arena.write([FeaturePart(1, [4, 2], 0, tags(TEXT))], states)
    assert torch.equal(arena.read(1, 0, tags(TEXT)), states)


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
        sides[1].write([FeaturePart(0, [0], 0, [1])], rows(1))
