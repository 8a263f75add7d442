"""Closes the objects of JSON Schemas: without a word about other keys they get none, so that an answer ends."""

from __future__ import annotations

from typing import Any, TypeAlias
from urllib.parse import unquote

_Schema: TypeAlias = dict[str, Any]

_NOTES = {
    *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "nullable"),
    *("$schema", "$id", "$comment", "$anchor", "$defs", "definitions", "discriminator", "x-guidance"),
}
OF_OTHER_KEYS = {
    *("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"),
    *("dependentSchemas", "dependentRequired", "dependencies"),
}
"""Keywords about keys that `properties` does not name."""
BY_NAME = {"properties", "patternProperties", "$defs", "definitions"}
_SINGLE = {"items", "additionalItems", "additionalProperties"}
_LISTS = {"anyOf", "oneOf", "allOf", "prefixItems", "items"}


class _Open(Exception):
    """The schema must stay as it is."""


def closed(schema: _Schema, coerces_one_of: bool = False) -> _Schema:
    """Return a schema whose objects allow no keys beside their `properties`, unless they mention other keys.

    Every value that obeys the result obeys `schema`. A malformed schema is returned unchanged, as is one in which
    closing an object could change the meaning of another part:

    - an `allOf` of several parts;
    - a constraint other than `type` beside `allOf`, `anyOf`, `oneOf` or `$ref`;
    - `not`, `if`, or a `$id` inside the schema;
    - a `oneOf`, unless `coerces_one_of`, whose objects are not told apart by the text of a required property."""
    try:
        return _Closing(schema, coerces_one_of).close(schema)
    except (_Open, RecursionError, TypeError, AttributeError, LookupError, ValueError):
        return schema  # `llguidance` reports the error, if there is one


class _Closing:
    def __init__(self, root: _Schema, coerces_one_of: bool) -> None:
        self._root, self._coerces_one_of = root, coerces_one_of

    def close(self, schema: Any) -> Any:
        # References stay valid, since no part moves.
        if not isinstance(schema, dict):
            return schema
        self._check(schema)
        made = dict(schema)
        for key, value in schema.items():
            if key in BY_NAME:
                made[key] = {name: self.close(sub) for name, sub in value.items()}
            elif key in _LISTS and isinstance(value, list):
                made[key] = [self.close(sub) for sub in value]
            elif key in _SINGLE:
                made[key] = self.close(value)
        if "properties" in schema and not schema.keys() & OF_OTHER_KEYS:
            names = dict.fromkeys([*schema["properties"], *schema.get("required", ())], True)
            if schema.get("minProperties", 0) <= len(names):
                made |= {"properties": names | made["properties"], "additionalProperties": False}
        return made

    def _check(self, schema: _Schema) -> None:
        said = {key for key in schema.keys() - _NOTES if not key.startswith("x-")}
        for key in said & {"allOf", "anyOf", "oneOf", "$ref"}:
            if said - {key, "type"} or (key == "allOf" and len(schema[key]) > 1):
                raise _Open
        if said & {"not", "if"} or ("$id" in schema and schema is not self._root):
            raise _Open
        if "oneOf" in said and not self._coerces_one_of:
            self._check_apart([self._target(option) for option in schema["oneOf"]])

    def _check_apart(self, options: list[_Schema]) -> None:
        # Else closing could hide that a value obeys two options.
        texts = [_required_texts(option) for option in options if not _is_scalar(option)]
        names = set.intersection(*map(set, texts)) if texts else set()
        taken = [[each[name] for each in texts] for name in names]
        if len(texts) > 1 and not any(sum(map(len, sets)) == len(set.union(*sets)) for sets in taken):
            raise _Open

    def _target(self, schema: Any) -> Any:
        if "$ref" not in schema:
            return schema
        return pointed_to(self._root, schema["$ref"])


def pointed_to(root: Any, pointer: str) -> Any:
    """Return the part that a `$ref` points to. Raises ValueError, LookupError or TypeError if there is none."""
    begin, *names = pointer.split("/")
    if begin != "#":
        raise ValueError(pointer)
    for name in names:
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        root = root[int(name)] if isinstance(root, list) else root[name]
    return root


def _required_texts(schema: _Schema) -> dict[str, set[str]]:
    found = {}
    for name in schema.get("properties", {}).keys() & set(schema.get("required", ())):
        sub = schema["properties"][name]
        values = sub.get("enum", [sub.get("const")]) if isinstance(sub, dict) else [None]
        if all(isinstance(value, str) for value in values):
            found[name] = set(values)
    return found


def _is_scalar(schema: _Schema) -> bool:
    types = schema.get("type", ["object"])
    values = schema.get("enum", [schema["const"]] if "const" in schema else [[]])
    return not {"object", "array"}.intersection([types] if isinstance(types, str) else types) or not any(
        isinstance(value, dict | list) for value in values
    )
