"""Keywords of schemas that no grammar holds: what is left of a schema without them, and what its grammar takes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from ssd.config.params import Structured
from ssd.grammar import keywords
from ssd.grammar.keywords import KeywordFilter, as_strict
from ssd.grammar.source import loosened, serialized

BYTES = LLTokenizer("byte")
INTEGER: dict[str, Any] = {"type": "integer"}
AN_A: dict[str, Any] = {"type": "object", "properties": {"a": INTEGER}}


def loose(schema: Any) -> tuple[LLMatcher, set[str]]:
    asked, left_out = loosened(Structured("json", json.dumps(schema)))
    matcher = LLMatcher(BYTES, serialized(asked), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher, left_out


def takes(root: LLMatcher, value: Any) -> bool:
    fresh = root.deep_copy()
    return fresh.consume_tokens(list(json.dumps(value, separators=(",", ":")).encode())) and fresh.is_accepting()


@pytest.mark.parametrize(
    "words",
    [
        {"propertyNames": {"maxLength": 3}},
        {"dependentRequired": {"b": ["a"]}},
        {"dependentSchemas": {"b": {"required": ["a"]}}},
        {"dependencies": {"b": ["a"]}},
    ],
    ids=str,
)
def test_an_object_stays_open_for_a_word_about_other_keys_that_is_left_out(words: dict[str, Any]) -> None:
    matcher, left_out = loose({**AN_A, **words})
    assert left_out == {*words} and takes(matcher, {"a": 1, "b": "x"})
    for value, possible in (({"a": 1, "b": "x"}, False), ({"a": 1}, True)):
        assert takes(loose({**AN_A, **words, "additionalProperties": False})[0], value) is possible


def test_unevaluated_properties_are_the_additional_ones_where_nothing_else_names_keys() -> None:
    for said, number, text in ((False, False, False), (True, True, True), (INTEGER, True, False)):
        matcher, left_out = loose({**AN_A, "unevaluatedProperties": said})
        assert not left_out and takes(matcher, {"a": 1})
        assert (takes(matcher, {"b": 1}), takes(matcher, {"b": "x"})) == (number, text)
    other = {"type": "object", "properties": {"b": INTEGER}}
    matcher, left_out = loose({**AN_A, "unevaluatedProperties": False, "allOf": [other]})
    assert left_out == {"unevaluatedProperties"} and takes(matcher, {"a": 1, "b": 1})


UNHELD = [
    r"a\Z",
    r"[^\0]",
    "(?>a)",
    "(?#x)a",
    "(?P<n>a)(?P=n)",
    r"(?<y>a)\k<y>",
    r"\cA",
    r"[\b]",
    "a^b",
    "a$b",
    "(?=a)",
]


@pytest.mark.parametrize("pattern", [*UNHELD, r"\ba", r"(a)\1", "["])
def test_a_pattern_that_llguidance_refuses_is_left_out(pattern: str) -> None:
    matcher, left_out = loose({"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}})
    assert left_out == {"pattern"} and takes(matcher, {"a": "anything"})
    by_key = {"type": "object", "patternProperties": {pattern: INTEGER, "^x": {"type": "null"}}}
    matcher, left_out = loose(by_key)
    assert left_out == {"patternProperties"} and takes(matcher, {"b": 1}) and not takes(matcher, {"x": 1})
    assert takes(loose({**AN_A, "patternProperties": {pattern: INTEGER}})[0], {"a": 1, "b": 1})
    matcher, _ = loose({**by_key, "additionalProperties": False})
    assert takes(matcher, {"b": 1, "x": None}) and not takes(matcher, {"b": "x"})


@pytest.mark.parametrize("pattern", [r"^\d+$", r"[(?=]", r"(?i)a|b", r"\p{L}{2}", r"^(a|b$)", "(?<y>a)", r"\w\/\-"])
def test_other_patterns_stay(pattern: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    keyword_filter = KeywordFilter()
    assert keyword_filter.applied(schema) == schema and not keyword_filter.left_out


def test_few_patterns_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def refused(pattern: str) -> bool:
        tried.append(pattern)
        return False

    monkeypatch.setattr(keywords, "_compiles", refused)
    schema = {"anyOf": [{"pattern": "a" * (1 + number % 2)} for number in range(1000)]}
    both = KeywordFilter()
    first, second = both.applied(schema), both.applied(schema)
    assert len("".join(tried)) + 32 * len(tried) <= 8192 and len(tried) > 200
    assert first["anyOf"][0] == {} and first["anyOf"][-1] == schema["anyOf"][-1] and second == schema


def test_a_reference_into_what_is_left_out_is_left_out() -> None:
    for name, part in (("if", INTEGER), ("not", INTEGER), ("dependencies", {"x": INTEGER})):
        pointer = f"#/{name}/x" if name == "dependencies" else f"#/{name}"
        schema = {"type": "object", "properties": {"a": {"$ref": pointer}, "b": {"$ref": "#/$defs/b"}}}
        matcher, left_out = loose({**schema, name: part, "$defs": {"b": INTEGER}})
        assert left_out == {name, "$ref"}
        assert takes(matcher, {"a": "anything", "b": 1}) and not takes(matcher, {"b": "x"})
    nowhere = {"not": {}, "properties": {"a": {"$ref": "#/nowhere"}, "not": {"$ref": "#/properties/a"}}}
    assert KeywordFilter().applied(nowhere) == {"properties": nowhere["properties"]}


def test_what_asks_for_nothing_is_neither_refused_nor_told() -> None:
    schema = {"type": "array", "items": {"enum": [{"uniqueItems": False}], "uniqueItems": False}, "uniqueItems": False}
    matcher, left_out = loose(schema)
    assert not left_out and takes(matcher, [{"uniqueItems": False}])
    strict = LLMatcher(BYTES, serialized(Structured("json", as_strict(json.dumps(schema)))), log_level=0)
    assert not strict.is_error() and takes(strict, [])
    for name in ("Output Format", "#output", "https://example.com/a%20b"):  # the last one is a URI
        source = json.dumps({"$id": name, "type": "integer"})
        strict = LLMatcher(BYTES, serialized(Structured("json", as_strict(source))), log_level=0)
        assert not strict.is_error() and takes(strict, 7) and takes(loose(json.loads(source))[0], 7)


def test_a_schema_that_is_too_deep_is_left_as_it_is() -> None:
    deep: Any = {"uniqueItems": True}
    for _ in range(5000):
        deep = {"items": deep}
    assert KeywordFilter().applied(deep) is deep
