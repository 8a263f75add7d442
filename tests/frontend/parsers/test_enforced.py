"""Answers that the grammar of a format allows, drawn at random: its parser reads valid calls out of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ssd.frontend.parsers.rules import CallableFunction, Rules
from tests.frontend.parsers.enforced import (
    World,
    check_allowed,
    check_beside_a_schema,
    check_forced,
    check_unfit,
    forms,
    parser,
)
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
    check_beside_a_schema(format, markers)


def test_what_a_format_cannot_say_is_refused_by_name() -> None:
    check_unfit("hermes", CallableFunction("f", {"type": "string"}, False))


def of_one(world: World, function: CallableFunction) -> str:
    rules = Rules([function], world.ids, False)
    return rules.grammar(parser("llama3_json").forced(rules))


NO_ARGUMENTS: list[Any] = [
    None,
    {},
    {"type": "object", "description": "Nothing."},
    {"type": "object", "properties": {}, "required": []},
]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("parameters", NO_ARGUMENTS, ids=str)
def test_a_tool_that_names_no_arguments_gets_none(parameters: Any, strict: bool) -> None:
    world = World(())
    forced = of_one(world, CallableFunction("f", parameters, strict))
    assert world.allows(forced, '{"name": "f", "parameters": {}}')
    assert not world.allows(forced, '{"name": "f", "parameters": {"a": 1}}')


@pytest.mark.parametrize("strict", [False, True])
def test_arguments_that_a_tool_does_not_name_are_not_there(strict: bool) -> None:
    world = World(())
    parameters = {"properties": {"a": {"properties": {"b": {"type": "integer"}}}}}
    for given, other, possible in (
        (parameters, '"c"', False),
        ({**parameters, "additionalProperties": True}, '"c"', True),
    ):
        forced = of_one(world, CallableFunction("f", given, strict))
        for name, fits in (('"a"', True), (other, possible)):
            assert world.allows(forced, f'{{"name": "f", "parameters": {{{name}: {{"b": 1}}}}}}') is fits
        assert not world.allows(forced, '{"name": "f", "parameters": {"a": {"c": 1}}}')
