"""Turns a client's request for structured output into the one text that `llguidance` compiles."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ssd.config.params import MAX_COMPILED, MAX_GRAMMAR, GrammarKind, Structured
from ssd.errors import RequestError, refused_grammar
from ssd.grammar import lark
from ssd.grammar.closing import closed
from ssd.grammar.keywords import LENIENT, OPTIONS, KeywordFilter, take_strict

WHITESPACE = r"[ \n\r\t]{1,40}"
"""White space between the parts of JSON, limited because a weak model would write nothing else."""


def serialized(asked: Structured, free: str = "") -> str:
    """Return the grammar of `asked` as text for `llguidance`.

    `free`: Lark rules for the text before the answer, among them one named `free`, or "". Raises RequestError for a
    source that is too long or malformed."""
    if asked.kind == "compiled":
        return _after(free, asked.source)
    if len(asked.source) > MAX_GRAMMAR:
        raise refused_grammar(f"it has {len(asked.source)} characters; at most {MAX_GRAMMAR} are read")
    try:
        text = _after(free, _converted(asked.kind, asked.source))
    except RequestError:
        raise
    except Exception as error:  # the parser of GBNF raises several kinds
        raise refused_grammar(str(error)) from None
    if len(text) > MAX_COMPILED:
        raise refused_grammar(f"it takes {len(text)} characters without abbreviations; at most {MAX_COMPILED} are read")
    return text


def _converted(kind: GrammarKind, source: str) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if kind in ("json", "json_object"):
        return str(LLMatcher.grammar_from_json_schema(_schema_of(kind, source)))
    if kind == "regex":
        return str(LLMatcher.grammar_from_regex(source))
    if kind == "structural_tag":
        return str(LLMatcher.grammar_from_lark(structural_tags(source)))
    lark_text = _choice(source) if kind == "choice" else any_to_lark(lark.without_hints(source))
    return str(LLMatcher.grammar_from_lark(lark_text))


def loosened(asked: Structured) -> tuple[Structured, set[str]]:
    """Return a format without the keywords that no grammar holds, and their names; a strict schema as it is.

    Raises RequestError for a malformed one."""
    left_out: set[str] = set()
    if asked.kind == "json":
        return Structured("json", json.dumps(_loose(_object(asked.source), left_out))), left_out
    if asked.kind == "structural_tag":
        tags = _tags(asked.source)
        for structure in tags.structures:
            if isinstance(structure.schema, dict):
                structure.schema = _loose(structure.schema, left_out)
        return Structured("structural_tag", msgspec.json.encode(tags).decode()), left_out
    return asked, left_out


def _loose(schema: dict[str, Any], left_out: set[str]) -> dict[str, Any]:
    if take_strict({**schema}):
        return schema
    keywords = KeywordFilter()
    loose = keywords.applied(schema)
    left_out |= keywords.left_out
    options = loose.get(OPTIONS)
    loose[OPTIONS] = {**(options if isinstance(options, dict) else {}), **LENIENT}
    return closed(loose, coerces_one_of=True)


def _after(free: str, grammar: str) -> str:
    if not free:
        return grammar
    is_lark = not grammar.lstrip().startswith("{")
    first, *others = [{"lark_grammar": grammar}] if is_lark else json.loads(grammar)["grammars"]
    start = {"lark_grammar": f"start: free @answer\n{free}"}
    return json.dumps({"grammars": [start, {**first, "name": "answer"}, *others]})


def _object(source: str) -> dict[str, Any]:
    """Return a JSON Schema as an object. Raises RequestError."""
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise refused_grammar(f"the schema is not JSON: {error}") from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise refused_grammar("a JSON schema is an object" if schema is not False else "nothing obeys the schema false")
    return dict(KeywordFilter(strict=True).applied(schema))


def json_rule(asked: Structured) -> str:
    """Return the expression of a JSON answer in Lark. Raises RequestError."""
    return f"%json {_schema_of(asked.kind, asked.source)}"


def _schema_of(kind: GrammarKind, source: str) -> str:
    return _held(_object(source) if kind == "json" else {"type": "object"})


def _held(schema: dict[str, Any]) -> str:
    take_strict(schema)
    options = schema.get(OPTIONS)
    given = options if isinstance(options, dict) else {}
    return json.dumps({**closed(schema), OPTIONS: {"whitespace_pattern": WHITESPACE, **given}})


def _choice(source: str) -> str:
    options = json.loads(source)
    if not isinstance(options, list) or not options or not all(isinstance(option, str) for option in options):
        raise refused_grammar("choice takes a list of at least one string")
    return "start: " + " | ".join(map(quoted, options))


# -- structural tags: free text in which each mark begins a part that must obey a schema -----------------------------

_Mark = Annotated[str, Meta(min_length=1, max_length=256)]


class _Structure(msgspec.Struct, forbid_unknown_fields=True):
    begin: _Mark
    end: Annotated[str, Meta(max_length=256)]
    schema: dict[str, Any] | bool = True


class _Tags(msgspec.Struct, forbid_unknown_fields=True):
    structures: Annotated[list[_Structure], Meta(min_length=1, max_length=256)]
    triggers: Annotated[list[_Mark], Meta(min_length=1, max_length=256)]
    type: Literal["structural_tag"] = "structural_tag"


_DECODER = msgspec.json.Decoder(_Tags)


def _tags(source: str) -> _Tags:
    try:
        return _DECODER.decode(source)
    except (msgspec.DecodeError, RecursionError) as error:
        raise refused_grammar(f"structural_tag: {error}") from None


def structural_tags(source: str) -> str:
    """Return the grammar, in Lark's notation, of vLLM's `structures` and `triggers`. Raises RequestError."""
    tags = _tags(source)
    triggers = list(dict.fromkeys(tags.triggers))
    for one in triggers:
        if any(one in other for other in triggers if other != one):
            raise refused_grammar(f"structural_tag: the trigger {one[:64]!r} lies in another one")
    begun: dict[str, list[str]] = {trigger: [] for trigger in triggers}
    lines = []
    for number, structure in enumerate(tags.structures):
        trigger = next(filter(structure.begin.startswith, triggers), None)
        if trigger is None:
            raise refused_grammar(f"structural_tag: no trigger begins {structure.begin[:64]!r}")
        if structure.schema is False:
            raise refused_grammar("structural_tag: nothing obeys the schema false")
        schema = structure.schema if isinstance(structure.schema, dict) else {}
        lines.append(f"schema_{number}: %json {_held(schema)}")
        parts = [_text(structure.begin.removeprefix(trigger)), f"schema_{number}", _text(structure.end)]
        begun[trigger].append(" ".join(filter(None, parts)))
    for number, (trigger, bodies) in enumerate(begun.items()):
        if not bodies:
            raise refused_grammar(f"structural_tag: the trigger {trigger[:64]!r} begins none of the structures")
        lines.append(f"trigger_{number}[lazy]: PLAIN {_text(trigger)}")
        lines.append(f"tag_{number}: trigger_{number} ({' | '.join(bodies)})")
    barred = "|".join(re.escape(trigger).replace("/", r"\/") for trigger in triggers)
    any_tag = " | ".join(f"tag_{number}" for number in range(len(triggers)))
    start = [f"start: ({any_tag})* PLAIN", f"PLAIN: /(?s:.*)/ & ~/(?s:.*)({barred})(?s:.*)/"]
    return "\n".join(start + lines)


def _text(text: str) -> str:
    return quoted(text) if text else ""


def quoted(text: str) -> str:
    # JSON, with DEL escaped too.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
