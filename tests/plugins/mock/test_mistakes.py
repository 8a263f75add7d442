"""Mistakes that are answered by naming the mock too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_mistakes import Mistake, check, mistakes, no_start, place

__all__ = ["no_start", "place"]


@pytest.mark.parametrize(
    "mistake", mistakes(Path(__file__).with_name("mistakes.txt")), ids=lambda mistake: mistake.command
)
def test_a_mistake_is_answered_by_one_clear_line(mistake: Mistake, place: Path, no_start: None) -> None:
    check(mistake, place, {})
