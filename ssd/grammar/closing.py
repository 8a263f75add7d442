"""JSON Schemas with closed objects: one that says nothing of other keys has none, so that an answer ends."""

from __future__ import annotations

from typing import Any, TypeAlias
from urllib.parse import unquote

_Schema: TypeAlias = dict[str, Any]

_NOTES = {
    *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "nullable"),
    *("$schema", "$id", "$comment", "$anchor", "$defs", "definitions", "discriminator", "x-guidance"),
}
_OF_OTHER_KEYS = {
    *("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"),
    *("dependentSchemas", "dependentRequired", "dependencies"),
}
_BY_NAME = {"properties", "patternProperties", "$defs", "definitions"}
_SINGLE = {"items", "additionalItems", "additionalProperties"}
_LISTS = {"anyOf", "oneOf", "allOf", "prefixItems", "items"}


class _Open(Exception):
    """The schema must stay as it is."""


def closed(schema: _Schema, coerces_one_of: bool = False) -> _Schema:
    """Return a schema in which an object with `properties` that says nothing of other keys has no others.

    Whatever obeys the result obeys `schema`, which is returned as it is if closing one object could change what
    another one means: with an `allOf` of several, with anything beside `allOf`, `$ref` or alternatives but a type, with
    `not` or `if`, with a `oneOf` whose objects no required text tells apart, and if it is malformed. With
    `coerces_one_of` a `oneOf` is an `anyOf`."""
    try:
        return _Closing(schema, coerces_one_of).close(schema)
    except (_Open, RecursionError, TypeError, AttributeError, LookupError, ValueError):
        return schema  # `llguidance` says what is wrong


class _Closing:
    def __init__(self, root: _Schema, coerces_one_of: bool) -> None:
        self._root, self._coerces_one_of = root, coerces_one_of

    def close(self, schema: Any) -> Any:
        """Return a closed copy of a schema. Its references stay right: what they name stays at its place."""
        if not isinstance(schema, dict):
            return schema
        self._check(schema)
        made = dict(schema)
        for key, value in schema.items():
            if key in _BY_NAME:
                made[key] = {name: self.close(sub) for name, sub in value.items()}
            elif key in _LISTS and isinstance(value, list):
                made[key] = [self.close(sub) for sub in value]
            elif key in _SINGLE:
                made[key] = self.close(value)
        if "properties" in schema and not schema.keys() & _OF_OTHER_KEYS:
            names = dict.fromkeys([*schema["properties"], *schema.get("required", ())], True)
            if schema.get("minProperties", 0) <= len(names):
                made |= {"properties": names | made["properties"], "additionalProperties": False}
        return made

    def _check(self, schema: _Schema) -> None:
        """Raise _Open for a schema whose parts are about the same value, or which turns the meaning of a part round."""
        said = {key for key in schema.keys() - _NOTES if not key.startswith("x-")}
        for key in said & {"allOf", "anyOf", "oneOf", "$ref"}:
            if said - {key, "type"} or (key == "allOf" and len(schema[key]) > 1):
                raise _Open
        if said & {"not", "if"} or ("$id" in schema and schema is not self._root):
            raise _Open
        if "oneOf" in said and not self._coerces_one_of:
            self._check_apart([self._target(option) for option in schema["oneOf"]])

    def _check_apart(self, options: list[_Schema]) -> None:
        """Raise _Open where closing could hide that a value obeys two options of a `oneOf`."""
        texts = [_required_texts(option) for option in options if not _is_scalar(option)]
        names = set.intersection(*map(set, texts)) if texts else set()
        taken = [[each[name] for each in texts] for name in names]
        if len(texts) > 1 and not any(sum(map(len, sets)) == len(set.union(*sets)) for sets in taken):
            raise _Open

    def _target(self, schema: Any) -> Any:
        """Return what a schema that is a JSON pointer refers to, or the schema. Raises _Open for other references."""
        if "$ref" not in schema:
            return schema
        begin, *names = schema["$ref"].split("/")
        if begin != "#":
            raise _Open
        found: Any = self._root
        for name in names:
            name = unquote(name).replace("~1", "/").replace("~0", "~")
            found = found[int(name)] if isinstance(found, list) else found[name]
        return found


def _required_texts(schema: _Schema) -> dict[str, set[str]]:
    """Return the texts that required properties are limited to."""
    found = {}
    for name in schema.get("properties", {}).keys() & set(schema.get("required", ())):
        sub = schema["properties"][name]
        values = sub.get("enum", [sub.get("const")]) if isinstance(sub, dict) else [None]
        if all(isinstance(value, str) for value in values):
            found[name] = set(values)
    return found


def _is_scalar(schema: _Schema) -> bool:
    """Return True if no object and no list obeys a schema, by its type or its values."""
    types = schema.get("type", ["object"])
    values = schema.get("enum", [schema["const"]] if "const" in schema else [[]])
    return not {"object", "array"}.intersection([types] if isinstance(types, str) else types) or not any(
        isinstance(value, dict | list) for value in values
    )
