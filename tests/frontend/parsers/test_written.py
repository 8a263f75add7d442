"""Whole answers as models write them, format by format, cut at random: no call is lost, none leaks into content."""

from __future__ import annotations

from pathlib import Path

import pytest

from ssd.frontend.parsers.answer import AnswerParser
from ssd.frontend.parsers.tools import Piece
from ssd.system import registered
from tests.frontend.parsers.goldens import (
    CERTAIN,
    ROME,
    TOKYO,
    R,
    T,
    check_certain,
    check_cuts,
    check_exact,
    check_golden,
    check_noise,
    check_strict,
    goldens_of,
    parser,
)

CUTS = 10_000  # of all goldens together
JSON_FORMATS = ("hermes", "llama3_json")
GOLDENS = goldens_of(Path(__file__).parent, JSON_FORMATS)
ALL = [(format, *golden) for format, goldens in GOLDENS.items() for golden in goldens]


def test_ten_thousand_cuts_lose_and_leak_nothing() -> None:
    check_cuts(GOLDENS, CUTS)


@pytest.mark.parametrize(("format", "text", "expected"), ALL, ids=lambda value: str(value)[:40])
def test_an_answer_without_calls_is_content_to_the_letter(format: str, text: str, expected: list[Piece]) -> None:
    check_golden(format, text, expected)


def test_only_the_white_space_around_calls_is_left_out() -> None:
    for text, content in (
        (f"Two:\n\n```json\n{R}\n\n{T}\n```\n\nDone.", "Two:\n\nDone."),
        (f"{R}\n\nDone.\n", "Done."),
        (f"A\n<tools>\n{R}\n</tools>\nB\n\n{T} C", "A\nB C"),
        (f"A\n<tool_call>\n{R}\n</tool_call>\nB", "A\nB"),
    ):
        reading = parser("hermes")
        told = [*reading.feed(text), *reading.finish()]
        assert "".join(part for part in told if isinstance(part, str)) == content


@pytest.mark.parametrize("format", JSON_FORMATS)
@pytest.mark.parametrize(("text", "after", "certain"), CERTAIN)
def test_text_that_cannot_become_a_call_is_told_at_once(format: str, text: str, after: str, certain: str) -> None:
    check_certain(format, text, after, certain)


@pytest.mark.parametrize("format", JSON_FORMATS)
def test_noise_around_bare_calls_is_the_same_however_it_is_cut(format: str) -> None:
    check_noise(format)


@pytest.mark.parametrize("format", JSON_FORMATS)
def test_an_enforced_answer_has_no_bare_calls(format: str) -> None:
    check_exact(format)


@pytest.mark.parametrize("format", JSON_FORMATS)
def test_bare_calls_of_strict_tools_are_those_that_obey(format: str) -> None:
    check_strict(format)


def test_bare_calls_come_after_thoughts_and_no_more_than_asked() -> None:
    thoughts = registered.load(registered.REASONING, "think")
    for most, calls in ((None, [ROME, TOKYO]), (1, [ROME])):
        reading = AnswerParser(thoughts(True), parser("hermes"), most)
        answer = reading.finish(f"I call:\n{R}\n</think>\n\n```json\n{R}\n```\nand\n{T}\nDone.")
        assert (answer.reasoning, answer.calls) == (f"I call:\n{R}", calls)
        assert answer.content.split() == ["and", "Done."]
