"""Calls of tools as XML. Values are text or JSON, by the types in the tool's schema."""

from __future__ import annotations

import json
import re
from functools import reduce
from operator import getitem
from typing import Any

import msgspec

from ssd.frontend.parsers.rules import SUBSCHEMAS, Function, Rules, argument_schemas, decoded, unfit
from ssd.frontend.parsers.source import SPACE, Malformed, Reading
from ssd.frontend.parsers.tools import ToolParser

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_TAG_END, _END = ">\n", f"\n{_PARAMETER_END}\n"  # as the templates write them
_VALUE_ENDS = (_PARAMETER_END, _PARAMETER, _FUNCTION_END)
_BETWEEN_ENDS = (_PARAMETER, _FUNCTION_END, _CALL_END)
_NAME = re.compile(r"[^<>\n]*")
_NUMBER = {"integer", "number"}
_TYPES: dict[type, set[str]] = {
    **{str: {"string"}, bool: {"boolean"}, int: _NUMBER, float: _NUMBER},
    **{dict: {"object"}, list: {"array"}, type(None): {"null"}},
}
_WORDS = {"True": "true", "False": "false", "None": "null"}
_STRING = {"string"}
_MOST_SCHEMAS = 64  # looked at for the types of one value
# Keywords of a string's schema that its grammar obeys or may leave out.
_OF_TEXT = {"type", "enum", "const", "minLength", "maxLength", "title", "description", "default", *SUBSCHEMAS}


class Qwen3Coder(ToolParser):
    """`<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`: Qwen 3 Coder and Qwen 3.5.

    A value ends at the first `</parameter>`, even if that was meant as a part of it; text from there to the next
    parameter is left out. vLLM reads it so too. Without `<tool_call>`, only calls of the request's tools are calls."""

    special = frozenset({_CALL, _CALL_END})

    @classmethod
    def fits(cls, template: str) -> bool:
        return _CALL in template and _FUNCTION in template

    @classmethod
    def forced(cls, rules: Rules) -> str:
        return rules.repeated(f"{rules.marker(_CALL)} {cls._marked(rules)}", rules.text("\n"))

    @classmethod
    def allowed(cls, rules: Rules) -> str:
        return rules.calls_in_text(_CALL, cls._marked(rules), rules.plain([_CALL, _FUNCTION]))

    @classmethod
    def _marked(cls, rules: Rules) -> str:
        """Return the expression of the text after the mark of a call."""
        before, end = f"\n{_FUNCTION}", rules.text(f"{_FUNCTION_END}\n")
        calls = [f"{rules.name(each, before, _TAG_END)} {_arguments(rules, each)}" for each in rules.functions]
        return f"{rules.any_of(calls)} {end} {rules.marker(_CALL_END)}"

    def parse(self) -> Reading[None]:
        while marker := (yield from self._content(_CALL, _FUNCTION)):
            try:
                if marker == _CALL:
                    yield from self._text.skip_space()
                    yield from self._text.expect(_FUNCTION)
                ended = yield from self._function(known=marker == _FUNCTION)
            except Malformed:
                self._give_back()
            else:
                if ended == _FUNCTION_END:
                    yield from self._drop(_CALL_END)

    def _function(self, known: bool) -> Reading[str]:
        """Read a call after `<function=`, report it and return the mark at its end. Raises Malformed."""
        name = yield from self._tag()
        if known and name not in self._offered:
            raise Malformed
        schemas, arguments = argument_schemas(self._offered.get(name) or {}), {}
        between, marker = yield from self._text.up_to(*_BETWEEN_ENDS)
        if between.strip(SPACE):
            raise Malformed
        while marker == _PARAMETER:
            key = yield from self._tag()
            value, marker = yield from self._text.up_to(*_VALUE_ENDS)
            value = value.removeprefix("\n").removesuffix("\n")
            arguments[key] = _as_json(value, _types(schemas.get(key)))
            if marker == _PARAMETER_END:
                _, marker = yield from self._text.up_to(*_BETWEEN_ENDS)
        members = [f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in arguments.items()]
        self._call(name, f"{{{', '.join(members)}}}")
        return marker

    def _tag(self) -> Reading[str]:
        """Read the name in a tag, and the end of the tag. Raises Malformed."""
        name = yield from self._text.take(_NAME)
        yield from self._text.expect(">")
        if not name:
            raise Malformed
        return name


# -- values ---------------------------------------------------------------------------------------------------------


def _types(schema: Any) -> set[str]:
    """Return the names of the types that a value of this schema may have; that of text if the schema names none."""
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
    """Return the types that a schema names itself, and add the schemas to `waiting` that it leaves them to."""
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


def _arguments(rules: Rules, function: Function) -> str:
    """Return the expression of a tool's arguments in the order of its schema. Raises Unfit."""
    properties, required = rules.properties(function)
    parts = []
    for name, schema in properties.items():
        if not name or not _NAME.fullmatch(name):
            raise unfit(function, f"{name!r} is no name that this model's format of calls has for an argument")
        tag = rules.text(f"{_PARAMETER}{name}{_TAG_END}")
        argument = rules.any_of([f"{tag} {_value(rules, function, name, schema)}"])
        parts.append(argument if name in required else f"({argument})?")
    if not properties and decoded((function.parameters or {}).get("additionalProperties")) is True:
        anything = rules.up_to(_END, rules.plain(_VALUE_ENDS))
        parts.append(f"({rules.text(_PARAMETER)} /[^<>\\n]+/ {rules.text(_TAG_END)} {anything})*")
    return " ".join(parts)


def _value(rules: Rules, function: Function, name: str, schema: Any) -> str:
    """Return the expression of an argument's value, and of the end of the argument. Raises Unfit."""
    if _types(schema) != _STRING:
        return f"{rules.json(schema, function)} {rules.text(_END)}"
    schema = schema if isinstance(schema, dict) else {}
    if function.strict and (unknown := sorted(schema.keys() - _OF_TEXT)):
        raise unfit(function, f"{unknown[0]} of {name!r} has no form in this model's format of calls")
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        texts = [value for value in values if isinstance(value, str) and not any(end in value for end in _VALUE_ENDS)]
        if len(texts) < len(values):
            raise unfit(function, f"a value of {name!r} has no form in this model's format of calls")
        return rules.any_of([rules.text(text + _END) for text in texts])
    least, most = (schema.get(key) for key in ("minLength", "maxLength"))
    lengths = f"{{{least if isinstance(least, int) else 0},{most if isinstance(most, int) else ''}}}"
    return rules.up_to(_END, rules.plain(_VALUE_ENDS, lengths=lengths))
