"""Answers that the grammar of a format allows, drawn at random: its parser reads valid calls out of each."""

from __future__ import annotations

from pathlib import Path

import pytest

from ssd.frontend.parsers.rules import CallableFunction
from tests.frontend.parsers.enforced import check_allowed, check_beside_a_schema, check_forced, check_unfit, forms
from tests.frontend.parsers.random_calls import formats_of

FORMATS = formats_of(Path(__file__).parent)
MARKERS = {name: tuple(format["markers"]) for name, format in FORMATS.items() if "bad" in format}


@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize(("format", "markers"), forms(MARKERS))
def test_what_is_forced_is_calls_and_nothing_else(format: str, markers: tuple[str, ...], several: bool) -> None:
    check_forced(format, markers, several)


@pytest.mark.parametrize(("format", "markers"), forms(MARKERS))
def test_what_is_allowed_is_text_and_calls_that_obey(format: str, markers: tuple[str, ...]) -> None:
    check_allowed(format, markers, FORMATS[format]["bad"])


@pytest.mark.parametrize(("format", "markers"), forms(MARKERS))
def test_beside_a_schema_an_answer_is_calls_or_obeys_it(format: str, markers: tuple[str, ...]) -> None:
    check_beside_a_schema(format, markers, "<|channel|>final<|message|>" if format == "harmony" else "")


@pytest.mark.parametrize(
    "function",
    [
        CallableFunction("f", {"anyOf": [{"required": ["a"]}]}, False),
        CallableFunction("f", {"properties": {"not a name": {}}}, False),
        CallableFunction("f", {"properties": {}, "required": ["a"]}, False),
        CallableFunction("f", {"properties": []}, False),
        CallableFunction("f g", None, False),
    ],
)
def test_what_a_format_cannot_say_is_refused_by_name(function: CallableFunction) -> None:
    check_unfit("pythonic", function)
