"""Turns a client's request for structured output into the one text that `llguidance` compiles."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ssd.config.params import MAX_COMPILED, MAX_GRAMMAR, GrammarKind, Structured
from ssd.errors import RequestError, refused_grammar
from ssd.grammar.closing import closed
from ssd.grammar.tags import WHITESPACE, quoted, structural_tags

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_ANY_OBJECT = '{"type":"object"}'
_DEFAULTS: JsonCompileOptions = {"whitespace_pattern": WHITESPACE}


def serialized(asked: Structured, free: str = "") -> str:
    """Return the grammar of `asked` as text for `llguidance`; `GrammarCompiler.compile` checks it.

    `free` is Lark rules for the text before the answer, among them one named `free`; "" for none. Time and memory grow
    with the source. Raises RequestError for a source that is too long or malformed."""
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

    if kind == "json":
        return str(LLMatcher.grammar_from_json_schema(json.dumps(closed(_object(source))), defaults=_DEFAULTS))
    if kind == "json_object":
        return str(LLMatcher.grammar_from_json_schema(_ANY_OBJECT, defaults=_DEFAULTS))
    if kind == "regex":
        return str(LLMatcher.grammar_from_regex(source))
    if kind == "structural_tag":
        return str(LLMatcher.grammar_from_lark(structural_tags(source)))
    lark = _choice(source) if kind == "choice" else any_to_lark(source)
    return str(LLMatcher.grammar_from_lark(lark))


def _after(free: str, grammar: str) -> str:
    """Return the text of a grammar in which `grammar` follows the rules `free`."""
    if not free:
        return grammar
    lark = not grammar.lstrip().startswith("{")
    first, *others = [{"lark_grammar": grammar}] if lark else json.loads(grammar)["grammars"]
    start = {"lark_grammar": f"start: free @answer\n{free}"}
    return json.dumps({"grammars": [start, {**first, "name": "answer"}, *others]})


def _object(source: str) -> dict[str, Any]:
    """Return a JSON Schema as an object, an empty one for `true`. Raises RequestError for anything else."""
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise refused_grammar(f"the schema is not JSON: {error}") from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise refused_grammar("a JSON schema is an object" if schema is not False else "nothing obeys the schema false")
    return schema


def _choice(source: str) -> str:
    """Return a grammar of the strings in a JSON array."""
    options = json.loads(source)
    if not isinstance(options, list) or not options or not all(isinstance(option, str) for option in options):
        raise refused_grammar("choice takes a list of at least one string")
    return "start: " + " | ".join(map(quoted, options))
