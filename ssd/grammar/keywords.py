"""Leaves out the keywords of JSON Schemas that no grammar of `llguidance` holds, unless a schema is strict.

A schema is strict if its `x-guidance` has `lenient` false, which is also the option of `llguidance` for it."""

from __future__ import annotations

import re
from typing import Any

import msgspec

OPTIONS = "x-guidance"
LENIENT = {"lenient": True, "coerce_one_of": True}
"""The options with which `llguidance` leaves out formats that it does not know, and reads `oneOf` as `anyOf`."""
_NOT_HELD = {
    *("uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems", "propertyNames", "not"),
    *("if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"),
    *("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"),
}
_BY_NAME = {"properties", "patternProperties", "$defs", "definitions"}
_SUBSCHEMAS = {"items", "additionalItems", "additionalProperties", "anyOf", "oneOf", "allOf", "prefixItems"}
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
# A class of characters, which may lack its end (reading takes linear time), or an escape; else a look-around.
_PARTS = re.compile(r"\[[^\]\\]*(?:\\.[^\]\\]*)*\]?|\\.|\(\?<?[=!]", re.DOTALL)
_NOT_REGULAR = re.compile(r"\\[bB1-9]|\(")


def as_strict(source: str) -> str:
    """Return the JSON of a schema, marked as strict; of anything but an object, unchanged."""
    try:
        schema = _FIELDS.decode(source)
        options = msgspec.json.decode(schema.get(OPTIONS, b"{}"))
    except msgspec.DecodeError:
        return source  # compiling it tells the error
    given = options if isinstance(options, dict) else {}
    return msgspec.json.encode({**schema, OPTIONS: {**given, "lenient": False}}).decode()


def take_strict(schema: dict[str, Any]) -> bool:
    """Return True for a strict schema, whose mark is removed: it is the default of `llguidance`."""
    options = schema.get(OPTIONS)
    if not isinstance(options, dict) or options.get("lenient") is not False:
        return False
    schema[OPTIONS] = {name: value for name, value in options.items() if name != "lenient"}
    if not schema[OPTIONS]:
        del schema[OPTIONS]
    return True


def held(schema: Any) -> tuple[Any, set[str]]:
    """Return a schema without the keywords that no grammar holds, and their names. Its references stay valid.

    One that is nested too deeply to be read is returned unchanged."""
    left_out: set[str] = set()
    try:
        return _held(schema, left_out), left_out
    except RecursionError:
        return schema, set()


def _held(schema: Any, left_out: set[str]) -> Any:
    if isinstance(schema, list):
        return [_held(part, left_out) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {}
    for key, value in schema.items():
        if key in _NOT_HELD or (key == "pattern" and isinstance(value, str) and not _is_regular(value)):
            left_out.add(key)
        elif key in _BY_NAME and isinstance(value, dict):
            made[key] = {name: _held(part, left_out) for name, part in value.items()}
        else:
            made[key] = _held(value, left_out) if key in _SUBSCHEMAS else value
    return made


def _is_regular(pattern: str) -> bool:
    """Return False for a pattern with a look-around, a word's border or a reference back."""
    return not any(_NOT_REGULAR.match(part) for part in _PARTS.findall(pattern))
