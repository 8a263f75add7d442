"""Leaves out the keywords of JSON Schemas that no grammar of `llguidance` holds, unless a schema is strict.

A schema is strict if its `x-guidance` has `lenient` false."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from ssd.grammar.closing import BY_NAME, OF_OTHER_KEYS, pointed_to

OPTIONS = "x-guidance"
LENIENT = {"lenient": True, "coerce_one_of": True}
"""The options with which `llguidance` leaves out formats that it does not know, and reads `oneOf` as `anyOf`."""
_NOT_HELD = {
    *("uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems", "propertyNames", "not"),
    *("if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"),
    *("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"),
}
_SUBSCHEMAS = {"items", "additionalItems", "additionalProperties", "anyOf", "oneOf", "allOf", "prefixItems"}
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NOT_ALONE = {
    *("additionalProperties", "$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "if"),
    *("dependentSchemas", "dependencies"),
}
"""Keywords beside which `unevaluatedProperties` is no `additionalProperties`."""
_URI = re.compile(r"(?:[\w.~:/?\[\]@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*", re.ASCII)  # without a fragment
_TRIED = 32  # characters that each pattern counts for, beside its own; a character takes up to 20 us
_MOST_TRIED = 8192  # characters; further patterns are taken as they are


def as_strict(source: str) -> str:
    try:
        schema = _FIELDS.decode(source)
        options = msgspec.json.decode(schema.get(OPTIONS, b"{}"))
    except msgspec.DecodeError:
        return source  # compiling it tells the error
    given = options if isinstance(options, dict) else {}
    return msgspec.json.encode({**schema, OPTIONS: {**given, "lenient": False}}).decode()


def take_strict(schema: dict[str, Any]) -> bool:
    """Tell if a schema is strict, and remove the mark: strict is the default of `llguidance`."""
    options = schema.get(OPTIONS)
    if not isinstance(options, dict) or options.get("lenient") is not False:
        return False
    schema[OPTIONS] = {name: value for name, value in options.items() if name != "lenient"}
    if not schema[OPTIONS]:
        del schema[OPTIONS]
    return True


class KeywordFilter:
    """Copies the schemas of one grammar without the keywords that no grammar holds; `left_out` collects their names.

    Of a `strict` schema it leaves out only what `llguidance` refuses needlessly: `uniqueItems: false`, and an `$id`
    that is no URI. References into a part that is left out are left out too. An object stays open if it has a word
    about other keys, even one that is left out."""

    def __init__(self, strict: bool = False) -> None:
        self._strict, self._untried = strict, _MOST_TRIED
        self._referring: list[dict[str, Any]] = []
        self.left_out: set[str] = set()

    def applied(self, schema: Any) -> Any:
        self._referring.clear()
        try:
            made = self._copied(schema)
        except RecursionError:
            return schema
        for part in self._referring:
            if self.left_out and _is_there(schema, part["$ref"]) and not _is_there(made, part["$ref"]):
                del part["$ref"]
                self.left_out.add("$ref")
        return made

    def _copied(self, schema: Any) -> Any:
        if isinstance(schema, list):
            return [self._copied(part) for part in schema]
        if not isinstance(schema, dict):
            return schema
        if not self._strict and "unevaluatedProperties" in schema and not schema.keys() & _NOT_ALONE:
            schema = {**schema, "additionalProperties": schema["unevaluatedProperties"]}
            del schema["unevaluatedProperties"]
        made = {}
        for key, value in schema.items():
            if (key == "uniqueItems" and value is False) or (key == "$id" and not _URI.fullmatch(str(value))):
                continue
            if not self._strict and (key in _NOT_HELD or (key == "pattern" and self._is_unheld(value))):
                self.left_out.add(key)
            elif key in BY_NAME and isinstance(value, dict):
                made[key] = {name: self._copied(part) for name, part in value.items()}
            else:
                made[key] = self._copied(value) if key in _SUBSCHEMAS else value
        if not self._strict:
            self._keep_open(schema, made)
        if isinstance(made.get("$ref"), str):
            self._referring.append(made)
        return made

    def _keep_open(self, schema: dict[str, Any], made: dict[str, Any]) -> None:
        given = made.get("patternProperties")
        patterns = given if isinstance(given, dict) else {}
        if lost := [patterns.pop(name) for name in [*patterns] if self._is_unheld(name)]:
            self.left_out.add("patternProperties")
            if made.get("additionalProperties") is False:
                made["additionalProperties"] = {"anyOf": lost}
        if "properties" in schema and schema.keys() & OF_OTHER_KEYS & _NOT_HELD:
            made.setdefault("additionalProperties", True)

    def _is_unheld(self, pattern: Any) -> bool:
        if not isinstance(pattern, str) or (cost := _TRIED + len(pattern)) > self._untried:
            return False
        self._untried -= cost
        return not _compiles(pattern)


def _compiles(pattern: str) -> bool:
    from llguidance import LLMatcher

    schema = json.dumps({"type": "string", "pattern": pattern})
    try:
        return not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))
    except BaseException:  # a panic of the library is no Exception
        return False


def _is_there(schema: Any, pointer: str) -> bool:
    try:
        pointed_to(schema, pointer)
    except (LookupError, TypeError, ValueError):
        return False
    return True
