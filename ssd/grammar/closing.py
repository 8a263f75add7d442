"""JSON Schemas with closed objects: one that says nothing of other keys has none, so that an answer ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias
from urllib.parse import unquote

_Schema: TypeAlias = dict[str, Any]

_DEFINITIONS = {"$defs", "definitions"}
_NOTES = {
    *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "nullable"),
    *("$schema", "$id", "$comment", "$anchor", "discriminator", "x-guidance"),
}
_OF_OTHER_KEYS = {
    *("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"),
    *("if", "dependentSchemas", "dependentRequired", "dependencies"),
}
_MOST_STEPS = 20_000


class _Open(Exception):
    """The schema must stay as it is."""


def closed(schema: _Schema, coerces_one_of: bool = False) -> _Schema:
    """Return a schema in which an object with `properties` that says nothing of other keys has no others.

    Whatever obeys the result obeys `schema`. `allOf`, and what stands beside a `$ref` or alternatives, make one object,
    which is closed as a whole. The schema is returned as it is where that is not possible: if it is malformed, if a
    reference is no JSON pointer or has no end, and for a `oneOf` whose objects no required text tells apart. With
    `coerces_one_of` a `oneOf` is an `anyOf`."""
    closing = _Closing(schema, coerces_one_of)
    try:
        made = closing.close(schema)
    except (_Open, RecursionError, TypeError, AttributeError, LookupError, ValueError):
        return schema  # `llguidance` says what is wrong
    if closing.definitions:
        made["$defs"] = closing.definitions
    return made | {key: schema[key] for key in ("$schema", "x-guidance") if key in schema}


class _Closing:
    def __init__(self, root: _Schema, coerces_one_of: bool) -> None:
        self.definitions: dict[str, Any] = {}
        self._root, self._coerces_one_of = root, coerces_one_of
        self._names: dict[int, str] = {}  # of definitions, by the identity of what they close
        self._steps = 0

    def close(self, schema: Any) -> Any:
        """Return a closed schema of one value."""
        if not isinstance(schema, dict):
            return schema
        self._enter(schema)
        said = _said(schema)
        if said == {"$ref"}:
            return {"$ref": self._reference(self._target(schema["$ref"]))}
        if said == {"allOf"} and len(schema["allOf"]) == 1:
            return self.close(schema["allOf"][0])
        members = list(self._members(schema))
        for kind in ("anyOf", "oneOf"):
            for index, member in enumerate(members):
                if kind in member:
                    rest = [*members[:index], _without(member, {kind}), *members[index + 1 :]]
                    return self._alternatives(kind, member[kind], [each for each in rest if _said(each)])
        return self._object(members)

    def _members(self, *schemas: Any) -> Iterator[_Schema]:
        """Yield all that a value must obey, in the order of the properties. `allOf` and `$ref` are followed."""
        for schema in schemas:
            if schema is True:
                continue
            if schema is False:
                raise _Open
            self._enter(schema)
            own = _without(schema, {"allOf", "$ref", *_DEFINITIONS})
            for key in schema if "properties" in own or not _said(own) else [*schema, "properties"]:
                if key == "properties":
                    yield own
                elif key == "allOf":
                    yield from self._members(*schema["allOf"])
                elif key == "$ref":
                    yield from self._members(self._target(schema["$ref"]))

    def _alternatives(self, kind: str, options: Sequence[Any], rest: Sequence[_Schema]) -> _Schema:
        """Return closed alternatives. Each has what stands beside them, unless that is only a type."""
        if kind == "oneOf" and not self._coerces_one_of:
            self._check_apart([[*rest, *self._members(option)] for option in options])
        if not rest or (len(rest) == 1 and _said(rest[0]) == {"type"}):
            return {**(rest[0] if rest else {}), kind: [self.close(option) for option in options]}
        return {kind: [self.close({"allOf": [*rest, option]}) for option in options]}

    def _check_apart(self, options: Sequence[Sequence[_Schema]]) -> None:
        """Raise _Open where closing could hide that a value obeys two options of a `oneOf`."""
        texts = [self._texts(members) for members in options if not any(map(_is_scalar, members))]
        names = set.intersection(*map(set, texts)) if texts else set()
        taken = [[each[name] for each in texts] for name in names]
        if len(texts) > 1 and not any(sum(map(len, sets)) == len(set.union(*sets)) for sets in taken):
            raise _Open

    def _texts(self, members: Sequence[_Schema]) -> dict[str, set[str]]:
        """Return the texts that required properties are limited to."""
        required = {name for member in members for name in member.get("required", ())}
        found = {}
        for member in members:
            for name in required & member.get("properties", {}).keys():
                for sub in self._members(member["properties"][name]):
                    values = sub.get("enum", [sub.get("const")])
                    if all(isinstance(value, str) for value in values):
                        found[name] = set(values)
        return found

    def _object(self, members: Sequence[_Schema]) -> _Schema:
        """Return all members as one schema, without other keys if none of them says anything of those."""
        subs: dict[str, list[Any]] = {}
        for member in members:
            for name, sub in member.get("properties", {}).items():
                subs.setdefault(name, []).append(sub)
        properties = {name: self.close(all[0] if len(all) == 1 else {"allOf": all}) for name, all in subs.items()}
        parts = [self._part(member, properties, len(members) == 1) for member in members]
        names = dict.fromkeys([*subs, *(name for member in members for name in member.get("required", ()))])
        self._spend(len(names))
        least = max((member.get("minProperties", 0) for member in members), default=0)
        if (
            any("properties" in member for member in members)
            and least <= len(names)
            and not any(_OF_OTHER_KEYS & member.keys() for member in members)
        ):
            parts[0]["properties"] = dict.fromkeys(names, True) | parts[0].get("properties", {})
            parts[0]["additionalProperties"] = False
        return parts[0] if len(parts) == 1 else {"allOf": parts} if parts else {}

    def _part(self, member: _Schema, properties: _Schema, alone: bool) -> _Schema:
        """Return one member with closed schemas in it. Takes its `properties`, each for the first that names it."""
        part = dict(member)
        for key, value in member.items():
            if key == "properties":
                part[key] = {name: properties.pop(name, True) for name in value}
            elif key in ("items", "prefixItems", "additionalItems", "additionalProperties", "patternProperties"):
                if not alone and not isinstance(value, bool):  # another member may be about the same values
                    raise _Open
                if key == "patternProperties":
                    part[key] = {pattern: self.close(sub) for pattern, sub in value.items()}
                else:
                    part[key] = [self.close(sub) for sub in value] if isinstance(value, list) else self.close(value)
        return part

    def _reference(self, target: Any) -> str:
        """Return the reference to a closed definition."""
        if id(target) not in self._names:
            name = self._names[id(target)] = str(len(self._names))
            self.definitions[name] = self.close(target)
        return f"#/$defs/{self._names[id(target)]}"

    def _enter(self, schema: _Schema) -> None:
        """Raise _Open where references have another base than the root, and after too many steps."""
        if "$id" in schema and schema is not self._root:
            raise _Open
        self._spend(1)

    def _spend(self, steps: int) -> None:
        """Raise _Open after too many steps: references may make a small schema large."""
        self._steps += steps
        if self._steps > _MOST_STEPS:
            raise _Open

    def _target(self, reference: str) -> Any:
        """Return what a JSON pointer refers to. Raises _Open for another reference, LookupError where nothing is."""
        begin, *names = reference.split("/")
        if begin != "#":
            raise _Open
        found: Any = self._root
        for name in names:
            name = unquote(name).replace("~1", "/").replace("~0", "~")
            found = found[int(name)] if isinstance(found, list) else found[name]
        return found


def _said(schema: _Schema) -> set[str]:
    """Return the keys of a schema that limit its values."""
    return {key for key in schema.keys() - _NOTES - _DEFINITIONS if not key.startswith("x-")}


def _without(schema: _Schema, keys: set[str]) -> _Schema:
    return {key: value for key, value in schema.items() if key not in keys}


def _is_scalar(schema: _Schema) -> bool:
    """Return True if no object and no list obeys a schema, by its type or its values."""
    types = schema.get("type", ["object"])
    values = schema.get("enum", [schema["const"]] if "const" in schema else [[]])
    return not {"object", "array"}.intersection([types] if isinstance(types, str) else types) or not any(
        isinstance(value, dict | list) for value in values
    )
