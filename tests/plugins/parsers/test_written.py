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
JSON_FORMATS = ("mistral", "granite", "phi4_mini_json", "internlm")

GOLDENS = goldens_of(Path(__file__).parent, JSON_FORMATS)
assert GOLDENS.keys() == set(registered.names(registered.TOOLS)) - {"hermes", "llama3_json"}
ALL = [(format, *golden) for format, goldens in GOLDENS.items() for golden in goldens]


def test_ten_thousand_cuts_lose_and_leak_nothing() -> None:
    check_cuts(GOLDENS, CUTS)


@pytest.mark.parametrize(("format", "text", "expected"), ALL, ids=lambda value: str(value)[:40])
def test_an_answer_without_calls_is_content_to_the_letter(format: str, text: str, expected: list[Piece]) -> None:
    check_golden(format, text, expected)


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


def test_calls_come_after_thoughts() -> None:
    reading = AnswerParser(registered.load(registered.REASONING, "gemma4")(False), parser("gemma4"))
    answer = reading.finish("<|channel>thought\nHm.\n<channel|>" + GOLDENS["gemma4"][0][0])
    assert (answer.reasoning, answer.calls, answer.content) == ("Hm.", [ROME], "")
