"""Arguments whose values are text without quotes: strings or JSON, by the tool's schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import reduce
from operator import getitem
from typing import Any, NamedTuple

import msgspec

from ssd.frontend.parsers.rules import SUBSCHEMAS, CallableFunction, Rules, argument_schemas, decoded, unfit
from ssd.frontend.parsers.source import SPACE

_ARGUMENT = re.compile(r"[^<>\n]+")
_NUMBER = {"integer", "number"}
_TYPES: dict[type, set[str]] = {
    **{str: {"string"}, bool: {"boolean"}, int: _NUMBER, float: _NUMBER},
    **{dict: {"object"}, list: {"array"}, type(None): {"null"}},
}
_WORDS = {"True": "true", "False": "false", "None": "null"}
_STRING = {"string"}
_ANY = set().union(*_TYPES.values())
_MOST_SCHEMAS = 64  # looked at for the types of one value
# Keywords of a string's schema that its grammar obeys or may leave out.
_OF_TEXT = {"type", "enum", "const", "minLength", "maxLength", "title", "description", "default", *SUBSCHEMAS}


class Arguments:
    def __init__(self, parameters: Mapping[str, Any] | None) -> None:
        self._schemas = argument_schemas(parameters or {})
        self._found: dict[str, str] = {}

    def add(self, name: str, value: str, is_string: bool | None = None) -> None:
        """Add an argument; a later one of the same name wins.

        `is_string`: its value is a string, or JSON; None: the tool's schema decides."""
        types = _types(self._schemas.get(name)) if is_string is None else _STRING if is_string else _ANY
        self._found[name] = _as_json(value, types)

    def as_json(self) -> str:
        return f"{{{', '.join(f'{json.dumps(key, ensure_ascii=False)}: {text}' for key, text in self._found.items())}}}"


class ValueShape(NamedTuple):
    """The texts before and after an argument's name, and after its value, which has no `barred` text."""

    before: str
    after: str
    end: str
    barred: tuple[str, ...]


def _types(schema: Any) -> set[str]:
    """Return the names of the types that a value of this schema may have; by default that of text."""
    found: set[str] = set()
    waiting = [schema]
    try:
        for _ in range(_MOST_SCHEMAS):
            if not waiting:
                return found
            found |= _own_types(waiting.pop(), schema, waiting)
    except (TypeError, KeyError, AttributeError):  # it is no JSON schema
        pass
    return _STRING


def _own_types(schema: Any, root: Any, waiting: list[Any]) -> set[str]:
    """Return the types that a schema names itself; add the schemas that it refers to to `waiting`."""
    if not isinstance(schema, dict):
        return _STRING
    if given := schema.get("type"):
        return set(given) if isinstance(given, list) else {given}
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return set().union(*(_TYPES[type(value)] for value in values))
    if reference := schema.get("$ref"):
        waiting.append(reduce(getitem, reference.split("/")[1:], root))
        return set()
    parts = [part for key in ("anyOf", "oneOf", "allOf") for part in schema.get(key, ())]
    waiting += parts
    return set() if parts else _STRING


def _as_json(value: str, types: set[str]) -> str:
    """Return a value as JSON: as it is if it has one of these types, else as a string."""
    text = value.strip(SPACE)
    text = _WORDS.get(text, text)
    if types != _STRING:
        try:
            kinds = _TYPES[type(msgspec.json.decode(text))]
        except (msgspec.MsgspecError, RecursionError, UnicodeError):
            kinds = set()
        if kinds & types or (kinds and "string" not in types):
            return text
    return json.dumps(value, ensure_ascii=False)


# -- grammars -------------------------------------------------------------------------------------------------------


def expression(rules: Rules, function: CallableFunction, shape: ValueShape) -> str:
    """Return the expression of a tool's arguments in the order of its schema. Raises Unfit."""
    properties, required = rules.properties(function)
    parts = []
    for name, schema in properties.items():
        if not name or not _ARGUMENT.fullmatch(name):
            raise unfit(function, f"{name!r} is no name that this model's format of calls has for an argument")
        tag = rules.text(f"{shape.before}{name}{shape.after}")
        argument = rules.any_of([f"{tag} {_value(rules, function, name, schema, shape)}"])
        parts.append(argument if name in required else f"({argument})?")
    if not properties and decoded((function.parameters or {}).get("additionalProperties")) is True:
        anything = rules.up_to(shape.end, rules.plain(shape.barred))
        parts.append(f"({rules.text(shape.before)} /[^<>\\n]+/ {rules.text(shape.after)} {anything})*")
    return " ".join(parts)


def _value(rules: Rules, function: CallableFunction, name: str, schema: Any, shape: ValueShape) -> str:
    """Return the expression of an argument's value and end. Raises Unfit."""
    if _types(schema) != _STRING:
        return f"{rules.json(schema, function)} {rules.text(shape.end)}"
    schema = schema if isinstance(schema, dict) else {}
    if function.strict and (unknown := sorted(schema.keys() - _OF_TEXT)):
        raise unfit(function, f"{unknown[0]} of {name!r} has no form in this model's format of calls")
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        texts = [value for value in values if isinstance(value, str) and not any(end in value for end in shape.barred)]
        if len(texts) < len(values):
            raise unfit(function, f"a value of {name!r} has no form in this model's format of calls")
        return rules.any_of([rules.text(text + shape.end) for text in texts])
    least, most = (schema.get(key) for key in ("minLength", "maxLength"))
    lengths = f"{{{least if isinstance(least, int) else 0},{most if isinstance(most, int) else ''}}}"
    return rules.up_to(shape.end, rules.plain(shape.barred, lengths=lengths))
