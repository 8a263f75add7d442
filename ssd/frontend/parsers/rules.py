"""Makes grammars of answers in the tool parsers' formats, in Lark's notation as `llguidance` reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ssd.config.params import Structured
from ssd.grammar.closing import closed
from ssd.grammar.keywords import LENIENT, OPTIONS, KeywordFilter
from ssd.grammar.matcher import text_matcher
from ssd.grammar.source import WHITESPACE, json_rule, loosened, quoted

if TYPE_CHECKING:
    from llguidance import LLMatcher

SUBSCHEMAS = {"$defs", "definitions"}
_MAX_CHECKED = 4096  # characters of arguments that are checked in a frontend's loop
_NO_ARGUMENTS = {"type", "title", "description", "$schema", *SUBSCHEMAS}
_NOTES = {"additionalProperties", "properties", "required", *_NO_ARGUMENTS}
_PLAIN_NAME = re.compile(r"[\w.-]+")
_ANYTHING = "(?s:.*)"


class Unfit(ValueError):
    """Raised for a tool that a format cannot call, or not by grammar. The text says which and why."""


class CallableFunction(NamedTuple):
    """A tool that an answer may call; `parameters` is a JSON schema, or None for no arguments.

    A `strict` schema is obeyed or refused. In others, keywords that `llguidance` does not know are ignored."""

    name: str
    parameters: Mapping[str, Any] | None
    strict: bool


class Rules:
    """Owns the rules of one grammar: a method that returns an expression adds the rules that it needs.

    `ids` returns the tokens written like a marker; no text matches special ones. `several`: an answer may make many
    calls."""

    def __init__(
        self, functions: Sequence[CallableFunction], ids: Callable[[str], Sequence[int]], several: bool
    ) -> None:
        self.functions = functions
        self._ids, self._several = ids, several
        self._lines: list[str] = []
        self._keywords = KeywordFilter()
        self.left_out = self._keywords.left_out
        """Keywords of schemas that the grammar does not hold."""

    def grammar(self, expression: str, name: str = "start") -> str:
        return "\n".join([f"{name}: {expression}", *self._lines])

    def knows(self, marker: str) -> bool:
        return bool(self._ids(marker))

    def text(self, text: str) -> str:
        return quoted(text)

    def marker(self, marker: str) -> str:
        """Return the expression of a marker, as a token of its own or letter by letter."""
        return f"({' | '.join([self.text(marker), *self._tokens(marker)])})"

    def repeated(self, item: str, between: str) -> str:
        """Return the expression of one or more items with `between` among them; of one if only one is allowed."""
        return f"{item} {self.at_will(f'{between} {item}')}"

    def at_will(self, more: str) -> str:
        """Return the expression of any number of further calls; "" if only one call is allowed."""
        return f"({more})*" if self._several else ""

    def any_of(self, items: Sequence[str]) -> str:
        """Add a rule for any one of these expressions and return its name."""
        return self._rule(" | ".join(items))

    def calls_in_text(self, opening: str, call: str, plain: str) -> str:
        """Return the expression of `plain` text with calls in it, each after the mark `opening`."""
        return f"({self.up_to(opening, plain)} {call}){'*' if self._several else '?'} {plain}"

    def up_to(self, marker: str, plain: str) -> str:
        """Return the expression of `plain` text and the first marker after it."""
        lazy = self._name()
        self._lines.append(f"{lazy}[lazy]: {plain} {self.text(marker)}")
        return self.any_of([lazy, *(f"{plain} {token}" for token in self._tokens(marker))])

    def plain(self, markers: Sequence[str], beginning: str = "", lengths: str = "*") -> str:
        """Return the expression of any text without these markers that does not begin with `beginning`.

        `beginning`: a regular expression, or "". `lengths`: a quantifier, as `{1,9}`."""
        any_marker = "|".join(re.escape(marker).replace("/", r"\/") for marker in markers)
        barred = [f"{_ANYTHING}({any_marker}){_ANYTHING}"]
        barred += [f"{beginning}{_ANYTHING}"] if beginning else []
        name = self._name().upper()
        self._lines.append(f"{name}: /(?s:.{lengths})/ {' '.join(f'& ~/{pattern}/' for pattern in barred)}")
        return name

    # -- calls ------------------------------------------------------------------------------------------------------

    def json_calls(self, key: str) -> str:
        """Return the expression of an object with a tool's name and, under `key`, its arguments."""
        return self.any_of(
            [
                f"{self.text(call_prefix(function.name, key))} {self.arguments(function)} {self.text('}')}"
                for function in self.functions
            ]
        )

    def json_calls_as_values(self, key: str) -> str:
        """Return the expression of `json_calls` in tokens of any JSON, beside which other values may be."""
        calls = []
        for function in self.functions:
            schema = _schema(function)
            no_arguments = {"type": "object", "properties": {}, "additionalProperties": False}
            given = {name: part for name, part in schema.items() if name not in SUBSCHEMAS}
            arguments = {**given, "type": "object"} if schema.keys() - _NO_ARGUMENTS else no_arguments
            call = {"type": "object", "properties": {"name": {"const": function.name}, key: arguments}}
            shared = {name: schema[name] for name in SUBSCHEMAS & schema.keys()}
            calls.append(self.json({**call, "required": ["name", key], **shared}, function))
        return self.any_of(calls)

    def value(self, asked: Structured) -> str:
        """Return the expression of an answer in JSON. Raises RequestError."""
        loose, left_out = loosened(asked)
        self.left_out |= left_out
        return self._rule(json_rule(loose))

    def name(self, function: CallableFunction, before: str = "", after: str = "") -> str:
        """Return the expression of a tool's name, not quoted, between two texts. Raises Unfit."""
        if not _PLAIN_NAME.fullmatch(function.name):
            raise unfit(function, "its name has characters that this model's format of calls has no place for")
        return self.text(before + function.name + after)

    def arguments(self, function: CallableFunction) -> str:
        """Return the expression of a tool's arguments as an object. Raises Unfit."""
        schema = _schema(function)
        if not schema.keys() - _NO_ARGUMENTS:
            return self.text("{}")
        return self.json({**schema, "type": "object"}, function)

    def keywords(self, function: CallableFunction) -> str:
        """Return the expression of a tool's arguments as `a=1, b=2`, in the schema's order. Raises Unfit."""
        properties, required = self.properties(function)
        rest, first = '""', '""'  # expressions of the arguments from here on: after another one, and as the first ones
        for name, schema in reversed(properties.items()):
            if not name.isidentifier():
                raise unfit(function, f"{name!r} is no name that this model's format of calls has for an argument")
            argument = self._rule(f"{self.text(name + '=')} {self.json(schema, function)}")
            others = ([rest], [first]) if name not in required else ([], [])
            rest, first = (
                self.any_of([f'", " {argument} {rest}', *others[0]]),
                self.any_of([f"{argument} {rest}", *others[1]]),
            )
        return first

    def properties(self, function: CallableFunction) -> tuple[dict[str, Any], list[str]]:
        """Return the schemas of a tool's arguments by name, and the required names. Raises Unfit."""
        schema = {key: decoded(value) for key, value in _schema(function).items()}
        if unknown := sorted(schema.keys() - _NOTES):
            raise unfit(function, f"{unknown[0]} beside properties has no form in this model's format of calls")
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise unfit(function, "its parameters are no JSON schema")
        if missing := [name for name in required if name not in properties]:
            raise unfit(function, f"the required {missing[0]!r} is not among properties")
        return argument_schemas(schema), required

    def json(self, schema: Any, function: CallableFunction) -> str:
        if isinstance(schema, dict):
            schema = json.loads(msgspec.json.encode(schema))
            schema = (KeywordFilter(strict=True) if function.strict else self._keywords).applied(schema)
            schema = closed(schema, coerces_one_of=not function.strict)
            schema[OPTIONS] = {"whitespace_pattern": WHITESPACE, **({} if function.strict else LENIENT)}
        return self._rule(f"%json {json.dumps(schema)}")

    # -- rules ------------------------------------------------------------------------------------------------------

    def _tokens(self, marker: str) -> list[str]:
        return [f"<[{token}]>" for token in self._ids(marker)]

    def _rule(self, expression: str) -> str:
        name = self._name()
        self._lines.append(f"{name}: {expression}")
        return name

    def _name(self) -> str:
        return f"r{len(self._lines)}"


def argument_check(functions: Sequence[CallableFunction]) -> Callable[[str, str], bool]:
    """Return a function that tells if arguments, a JSON object as text, obey the schema of a tool by name.

    Arguments may come in any order, keys of objects in them in the schema's. Long arguments, and those of a tool with a
    long grammar, count as not obeying."""
    named = {function.name: function for function in functions}

    @cache
    def matcher_of(name: str) -> LLMatcher | None:
        rules = Rules((), lambda marker: (), several=False)
        return text_matcher(rules.grammar(rules.arguments(named[name])))

    def obey(name: str, arguments: str) -> bool:
        try:
            given = msgspec.json.decode(arguments, type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError, UnicodeError):
            return False
        if len(arguments) > _MAX_CHECKED or (matcher := matcher_of(name)) is None:
            return False
        ordered = {key: given[key] for key in argument_schemas(named[name].parameters or {}) if key in given} | given
        reading = matcher.deep_copy()
        return reading.consume_tokens(list(msgspec.json.encode(ordered))) and reading.is_accepting()

    return obey


def call_prefix(name: str, key: str) -> str:
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": '


def argument_schemas(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool's schemas of arguments, with the definitions that they may refer to."""
    properties = decoded(parameters.get("properties"))
    shared = {key: decoded(parameters[key]) for key in SUBSCHEMAS & parameters.keys()}
    given = properties.items() if isinstance(properties, dict) else ()
    return {name: {**shared, **schema} if isinstance(schema, dict) else schema for name, schema in given}


def _schema(function: CallableFunction) -> dict[str, Any]:
    """Return the schema of a tool's arguments. Raises Unfit if it does not allow an object."""
    schema = dict(function.parameters or {})
    type = decoded(schema.get("type", "object"))
    if type != "object" and (not isinstance(type, list) or "object" not in type):
        raise unfit(function, "arguments are an object, and its parameters have another type")
    return schema


def decoded(value: Any) -> Any:
    return msgspec.json.decode(value) if isinstance(value, msgspec.Raw) else value


def unfit(function: CallableFunction, cause: str) -> Unfit:
    return Unfit(f"the tool {function.name[:64]!r} cannot be enforced: {cause}")
