"""Closed objects: what a grammar of a schema takes, with `jsonschema` as the judge."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from ssd.config.params import Structured
from ssd.grammar.closing import closed
from ssd.grammar.source import serialized

BYTES = LLTokenizer("byte")
INTEGER, TEXT = {"type": "integer"}, {"type": "string", "maxLength": 2}


def an(required: str = "", **properties: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "object", "properties": properties}
    return {**made, "required": required.split()} if required else made


def matcher(schema: Any) -> LLMatcher:
    return LLMatcher(BYTES, serialized(Structured("json", json.dumps(schema))), log_level=0)


def open_matcher(schema: Any, **options: bool) -> LLMatcher:
    return LLMatcher(BYTES, LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=options), log_level=0)


def takes(root: LLMatcher, value: Any) -> bool:
    fresh = root.deep_copy()
    return fresh.consume_tokens(list(json.dumps(value, separators=(",", ":")).encode())) and fresh.is_accepting()


def is_valid(value: Any, schema: Any) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)


NODE = an(value=INTEGER, next={"anyOf": [{"$ref": "#"}, {"type": "null"}]})
A, B = an(a=INTEGER), an(b=INTEGER)
CAT, DOG = an("kind", kind={"const": "cat"}, lives=INTEGER), an("kind", kind={"enum": ["dog"]}, tail=TEXT)
CASES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    # schema, what stays, what was possible while objects were open
    "object": (A, [{}, {"a": 1}], [{"b": 1}, {"a": 1, "b": 1}]),
    "no type": ({"properties": {"a": INTEGER}}, [{"a": 1}, 3], [{"b": 1}]),
    "no properties": ({"type": "object", "properties": {}}, [{}], [{"b": 1}]),
    "inner": (
        an(x=A, y={"type": "array", "items": A}),
        [{"x": {"a": 1}, "y": [{}]}],
        [{"x": {"b": 1}}, {"y": [{"b": 1}]}],
    ),
    "prefix": ({"prefixItems": [A], "items": False}, [[{"a": 1}]], [[{"b": 1}]]),
    "property named properties": (an(properties=A, items=B), [{"properties": {"a": 1}}], [{"items": {"a": 1}}]),
    "bare": ({"type": "object"}, [{}, {"b": {"c": 1}}], []),
    "anything": ({}, [{"b": 1}, 3], []),
    "said true": ({**A, "additionalProperties": True}, [{"a": 1, "b": "x"}], []),
    "said schema": ({**A, "additionalProperties": B}, [{"a": 1, "x": {"b": 1}}], [{"x": {"c": 1}}]),
    "said false": ({**A, "additionalProperties": False}, [{"a": 1}], []),
    "patterns": ({**A, "patternProperties": {"^x": B}}, [{"a": 1, "x1": {"b": 2}, "y": 1}], [{"x1": {"c": 2}}]),
    "required beside": ({**A, "required": ["b"]}, [{"a": 1, "b": "x"}, {"b": 1}], [{"b": 1, "c": 1}]),
    "more than are named": ({**an("a", a=INTEGER), "minProperties": 2}, [{"a": 1, "b": 1}], []),
    "definitions": (
        {"$ref": "#/$defs/x~1%20y", "$defs": {"x/ y": an(a={"$ref": "#/$defs/b"}), "b": B}},
        [{"a": {"b": 1}}],
        [{"b": 1}, {"a": {"a": 1}}],
    ),
    "note beside": ({"$ref": "#/$defs/a", "title": "x", "$defs": {"a": A}}, [{"a": 1}], [{"b": 1}]),
    "recursive": (NODE, [{"value": 1, "next": {"next": None}}], [{"next": {"x": 1}}, {"x": 1}]),
    "recursive definition": (
        {"$ref": "#/$defs/n", "$defs": {"n": an(n={"type": "array", "items": {"allOf": [{"$ref": "#/$defs/n"}]}})}},
        [{"n": [{"n": []}]}],
        [{"n": [{"x": 1}]}],
    ),
    "all, of one": ({"allOf": [A]}, [{"a": 1}], [{"b": 1}]),
    "any": ({"anyOf": [A, B, {"type": "null"}]}, [{"a": 1}, {"b": 1}, None], [{"a": 1, "b": 1}, {"c": 1}]),
    "any beside a type": ({"type": "object", "anyOf": [A, B]}, [{"a": 1}], [{"c": 1}]),
    "one, by text": ({"oneOf": [CAT, DOG]}, [{"kind": "cat", "lives": 9}], [{"kind": "cat", "tail": "x"}]),
    "one, by type": ({"oneOf": [A, {"type": "array", "maxItems": 0}, TEXT]}, [], []),
    "one object": ({"oneOf": [A, INTEGER, {"enum": ["x", None]}]}, [{"a": 1}, 3, "x"], [{"b": 1}]),
}


@pytest.mark.parametrize(("schema", "stays", "goes"), CASES.values(), ids=CASES.keys())
def test_an_object_that_says_nothing_of_other_keys_has_none(schema: Any, stays: list[Any], goes: list[Any]) -> None:
    before, after = open_matcher(schema), matcher(schema)
    for value in stays + goes:
        assert is_valid(value, schema) and takes(before, value), value
        assert takes(after, value) is (value in stays), value
    assert after.is_error() == before.is_error(), after.get_error()


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [an("a", a=INTEGER), an(b=INTEGER)]},  # {"a": 1} would obey both
        {"oneOf": [an("x", x=an("a", a=INTEGER)), an("x", x=an(b=INTEGER))]},
        {"oneOf": [an("k", k={"const": 1}), an("k", k={"const": 1.0})]},
        {"allOf": [A, B]},  # {"a": 1, "b": 1} obeys both, and would obey neither
        {**an(x=A, y={"allOf": [{"$ref": "#/$defs/a"}, B]}), "$defs": {"a": A}},
        {"$ref": "#/$defs/a", **B, "$defs": {"a": A}},
        {**an(k=TEXT), "anyOf": [A, B]},
        {**an(a=INTEGER), "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {**an(a=INTEGER), "not": an("a", a={"const": 1})},
        an(x={"if": A, "then": B, **an(b=INTEGER)}),
        {"oneOf": [{"$ref": "http://x/y"}, {"$ref": "#/$defs/a"}], "$defs": {"a": A}},
        {"oneOf": [{"$ref": "#/$defs/a"}, B]},
        {**an(x={"$ref": "#/$defs/x"}), "$defs": {"x": {"$id": "http://x/", **A}}},
        {"properties": [], "allOf": 3},
        {"properties": {"a": {"minProperties": "x", "properties": {"b": {}}}}},
        {"properties": {"a": A}, "$ref": "http://x/y"},
    ],
    ids=str,
)
def test_what_closing_would_change_is_left_as_it_is(schema: dict[str, Any]) -> None:
    before = json.dumps(schema)
    assert closed(schema) is schema and json.dumps(schema) == before


def test_a_one_of_that_is_read_as_any_of_is_closed() -> None:
    schema = {"oneOf": [an("a", a=INTEGER), an(b=INTEGER)]}
    root = open_matcher(closed(schema, coerces_one_of=True), coerce_one_of=True)
    assert takes(root, {"a": 1}) and takes(root, {"b": 1}) and not takes(root, {"a": 1, "c": 1})


def test_a_schema_that_is_too_deep_is_left_as_it_is() -> None:
    deep: Any = A
    for _ in range(5000):
        deep = an(a=deep)
    assert closed(deep) is deep


def test_a_structural_tag_has_closed_objects() -> None:
    tags = {"structures": [{"begin": "<f>", "schema": A, "end": "</f>"}], "triggers": ["<f>"]}
    root = LLMatcher(BYTES, serialized(Structured("structural_tag", json.dumps(tags))), log_level=0)
    for text, possible in (('<f>{"a":1}</f>', True), ('<f>{"b":1}</f>', False)):
        fresh = root.deep_copy()
        assert (fresh.consume_tokens(list(text.encode())) and fresh.is_accepting()) is possible


def made(dice: Random, depth: int = 0) -> Any:
    """A random schema of objects in each other."""
    if depth == 3 or (depth and dice.random() < 0.15):
        return dice.choice([INTEGER, {"type": "null"}, {"const": "x"}, {"$ref": "#/$defs/r"}, True])
    schema: dict[str, Any] = {}
    if dice.random() < 0.7:
        schema |= an(**{key: made(dice, depth + 1) for key in dice.sample("abc", dice.randint(0, 2))})
    if dice.random() < 0.3:
        schema["required"] = dice.sample("abc", 1)
    if dice.random() < 0.15:
        schema["additionalProperties"] = dice.choice([True, False, INTEGER])
    if dice.random() < 0.1:
        schema["$ref"] = "#/$defs/r"
    if dice.random() < 0.4:
        kind = dice.choice(["allOf", "anyOf", "oneOf"])
        schema[kind] = [made(dice, depth + 1) for _ in range(dice.randint(1, 2))]
    if dice.random() < 0.2:
        schema |= {"type": "array", "items": made(dice, depth + 1)}
    return schema


def value(dice: Random, depth: int = 0) -> Any:
    if depth == 3 or dice.random() < 0.3:
        return dice.choice([1, None, "x", []])
    if dice.random() < 0.1:
        return [value(dice, depth + 1)]
    return {key: value(dice, depth + 1) for key in sorted(dice.sample("abcd", dice.randint(0, 2)))}


def test_what_a_closed_schema_takes_obeys_the_schema() -> None:
    dice, closings, taken = Random(0), 0, 0
    values = [value(dice) for _ in range(100)]
    for _ in range(120):
        schema = {**made(dice), "$defs": {"r": an(a=INTEGER, b={"anyOf": [{"$ref": "#/$defs/r"}, INTEGER]})}}
        before, after = open_matcher(schema), matcher(schema)
        assert before.is_error() or not after.is_error(), (schema, after.get_error())
        if after.is_error():
            continue
        for one in values:
            if takes(after, one):
                assert is_valid(one, schema), (schema, one)
                assert takes(before, one), (schema, one)
                taken += 1
            else:
                closings += takes(before, one)
    assert closings > 100 and taken > 100
