"""Makes JSON Schemas, and says whether a text obeys one.

Most allow only short texts. All have no blanks between the parts of their JSON (`x-guidance`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any, TypeAlias

import jsonschema

Schema: TypeAlias = dict[str, Any]

_KEYS = ("name", "id", "", " ", "a b", "é", "日本", "😀", '"', "\\", "a/b~c", "line\nbreak", "$ref", "type", "0", "x.y")
_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -7,
    0.5,
    1e3,
    "",
    "yes",
    "naïve ☕",
    'say "no"',
    "tab\t",
    [],
    {},
    [1, [None]],
    {"é": ""},
)
_PATTERNS = ("^[a-c]{1,4}$", "^(cat|dog|[0-9]{2})$", "^[A-Z][a-z]{0,5}$", "^\\d{2}-\\d{3}$", "^é+.{0,2}$", "^$")
_FORMATS = ("date", "uuid", "ipv4", "ipv6", "email")
_DEEPEST = 2


def schemas(count: int, seed: int = 0, silent: bool = False) -> list[Schema]:
    """Return `count` schemas. The kinds at their roots take turns. If `silent`, closed objects do not say so."""
    dice = Random(seed)
    kinds = [_object, _array, _string, _integer, _number, _fixed, _union, _object, _shared, _recursive, _bare]
    made = [{**kinds[index % len(kinds)](dice, 0), "x-guidance": {"whitespace_pattern": ""}} for index in range(count)]
    return [_silent(schema) for schema in made] if silent else made


def fault(schema: Schema, text: str) -> str:
    """Return why the text is not JSON that obeys the schema; empty if it is."""
    try:
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).partition("\n")[0]
    return ""


def _silent(part: Any) -> Any:
    """Return a part of a schema without `additionalProperties: false`."""
    if isinstance(part, list):
        return [_silent(each) for each in part]
    if not isinstance(part, dict):
        return part
    return {key: _silent(sub) for key, sub in part.items() if key != "additionalProperties" or sub is not False}


def _any(dice: Random, depth: int) -> Schema:
    kinds: list[Callable[[Random, int], Schema]] = [_string, _integer, _number, _fixed]
    if depth < _DEEPEST:
        kinds += [_object, _array, _union]
    return dice.choice(kinds)(dice, depth)


def _string(dice: Random, _: int) -> Schema:
    least = dice.randrange(4)
    lengths = {"minLength": least, "maxLength": least + dice.randrange(6)}
    others = [{"pattern": dice.choice(_PATTERNS)}, {"format": dice.choice(_FORMATS)}]
    return {"type": "string", **dice.choice([lengths, lengths, *others])}


def _integer(dice: Random, _: int) -> Schema:
    least = dice.randint(-1000, 1000)
    most = least + dice.choice([5, 50, 10_000])
    low, high = dice.choice(["minimum", "exclusiveMinimum"]), dice.choice(["maximum", "exclusiveMaximum"])
    return {"type": "integer", low: least, high: most, **dice.choice([{}, {}, {"multipleOf": 3}])}


def _number(dice: Random, _: int) -> Schema:
    least = dice.randint(-40, 40) / 4
    bounds = {"minimum": least, "exclusiveMaximum": least + dice.choice([1, 2.5, 100])}
    return {"type": "number", **bounds, **dice.choice([{}, {"multipleOf": 0.25}, {"multipleOf": 0.5}])}


def _fixed(dice: Random, _: int) -> Schema:
    if dice.random() < 0.3:
        return {"const": dice.choice(_VALUES)}
    return {"enum": dice.sample(_VALUES, dice.randint(1, 6))}


def _object(dice: Random, depth: int) -> Schema:
    keys = dice.sample(_KEYS, dice.randint(1, 4 - depth))
    required = [key for key in keys if dice.random() < 0.6]
    schema: Schema = {"type": "object", "properties": {key: _any(dice, depth + 1) for key in keys}}
    if required or dice.random() < 0.5:
        schema["required"] = required
    match dice.randrange(8):  # llguidance counts properties only where all that are named are required
        case 0:
            count = {"required": keys, "maxProperties": len(keys) + 1}
            return {**schema, "additionalProperties": {"type": "boolean"}, **count}
        case 1:
            count = {"required": keys, "minProperties": len(keys) + 1, "maxProperties": len(keys) + 2}
            patterns = {"^k[0-9]$": _any(dice, _DEEPEST)}
            return {**schema, "patternProperties": patterns, "additionalProperties": False, **count}
    return {**schema, "additionalProperties": False}


def _array(dice: Random, depth: int) -> Schema:
    if dice.random() < 0.25:
        first = [_any(dice, depth + 1) for _ in range(dice.randint(1, 3))]
        return {"type": "array", "prefixItems": first, "items": False, "minItems": dice.randint(0, len(first))}
    least = dice.randrange(3)
    sizes = {"minItems": least, "maxItems": least + dice.randrange(3)}
    return {"type": "array", "items": _any(dice, depth + 1), **sizes}


def _union(dice: Random, depth: int) -> Schema:
    """`oneOf` only of different types: llguidance refuses what may overlap."""
    options = [{"type": "null"}, {"type": "boolean"}, _string(dice, depth), _integer(dice, depth)]
    match dice.randrange(3):
        case 0:
            return {"type": dice.sample(["null", "boolean", "integer"], 2), "minimum": 0, "maximum": 99}
        case 1:
            return {"oneOf": dice.sample(options, dice.randint(2, 4))}
    return {"anyOf": [_any(dice, depth + 1) for _ in range(dice.randint(1, 3))]}


def _shared(dice: Random, _: int) -> Schema:
    """A definition with an odd name, referred to more than once."""
    reference = {"$ref": "#/$defs/a~1b%20~0"}
    properties = {"one": reference, "more": {"type": "array", "items": reference, "maxItems": 2}}
    return {
        "$defs": {"a/b ~": _any(dice, _DEEPEST)},
        "type": "object",
        "properties": properties,
        "required": ["one"],
        "additionalProperties": False,
    }


def _recursive(dice: Random, _: int) -> Schema:
    """A list or a tree of nodes, which may be of any depth."""
    here = dice.choice(["#", "#/$defs/node"])
    ends = {"anyOf": [{"type": "null"}, {"$ref": here}]}
    below = dice.choice([ends, {"type": "array", "items": {"$ref": here}, "maxItems": 1}])
    node = {
        "type": "object",
        "properties": {"value": _fixed(dice, _DEEPEST), "below": below},
        "required": ["value", "below"] if dice.random() < 0.5 else ["value"],
        "additionalProperties": False,
    }
    return node if here == "#" else {"$defs": {"node": node}, "$ref": here}


def _bare(dice: Random, _: int) -> Schema:
    """Says little or nothing; what it allows may have no bound."""
    nothing: list[Schema] = [
        {},
        {"type": "object"},
        {"type": "array", "maxItems": 0},
        {"type": "string", "maxLength": 0},
    ]
    closed: Schema = {"type": "object", "additionalProperties": False}
    return dice.choice([*nothing, closed, {**closed, "properties": {}}, {"type": "null"}, {"enum": [""]}])
