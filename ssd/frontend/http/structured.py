"""The format that a body asks of its answer, in the words of OpenAI, vLLM, llama.cpp, SGLang and Ollama."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET

from ssd.config.params import MAX_COMPILED, GrammarKind, Structured
from ssd.frontend.http.bodies import Anything, ResponseFormat, Sampling
from ssd.frontend.http.errors import invalid, missing
from ssd.grammar.keywords import as_strict, take_strict

_OF_VLLM: tuple[GrammarKind, ...] = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_FIELDS: dict[str, GrammarKind] = {
    **{"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"},
    **{"json_schema": "json", "grammar": "grammar", "regex": "regex", "ebnf": "grammar"},
}


class AnswerForm(NamedTuple):
    """The format that a body asks of its answer, and the name of the field that asks; None for any text."""

    field: str | None = None
    structured: Structured | None = None


def form_of(body: Sampling) -> AnswerForm:
    """Return the form of the answer. Raises HttpError if fields contradict each other."""
    found = list(_asked(body))
    if not found:
        return AnswerForm()
    field, structured = found[0]
    if others := [name for name, asked in found[1:] if not _same(asked, structured)]:
        raise invalid(others[0], f"{field} and {others[0]} both say what the answer must be; give one")
    if len(structured.source) > MAX_COMPILED:
        raise invalid(field, f"{field} has {len(structured.source)} characters, which is too long")
    return AnswerForm(field, structured)


def _asked(body: Sampling) -> Iterator[tuple[str, Structured]]:
    if body.response_format is not None and (asked := _format(body.response_format)) is not None:
        yield "response_format", asked
    given: list[tuple[str, GrammarKind, Any]] = []
    if (vllm := body.structured_outputs) is not None:
        given += [(f"structured_outputs.{kind}", kind, getattr(vllm, kind)) for kind in _OF_VLLM]
    given += [(name, kind, getattr(body, name)) for name, kind in _FIELDS.items()]
    for field, kind, value in given:
        if value is True:  # of `json_object`
            yield field, Structured(kind)
        elif source := _source(value):
            yield field, Structured(kind, source)
    if source := _source(body.format):
        yield "format", Structured("json_object") if source == "json" else Structured("json", source)


def _same(one: Structured, other: Structured) -> bool:
    if one.kind != other.kind or one.kind not in ("json", "choice"):
        return one == other
    try:
        values = [msgspec.json.decode(each.source) for each in (one, other)]
    except (msgspec.DecodeError, RecursionError):
        return False
    for value in values:
        if isinstance(value, dict):
            take_strict(value)
    one_text, other_text = (msgspec.json.encode(value, order="sorted") for value in values)  # where 1 is not true
    return one_text == other_text


def _format(asked: ResponseFormat) -> Structured | None:
    if asked.type == "text":
        return None
    if asked.type == "json_object":
        return Structured("json", _schema(asked.schema)) if _given(asked.schema) else Structured("json_object")
    if asked.type == "structural_tag":
        parts = {"structures": asked.structures, "triggers": asked.triggers}
        given = {name: part for name, part in parts.items() if part is not UNSET}
        return Structured("structural_tag", msgspec.json.encode(given).decode())
    if asked.type == "regex" or asked.type == "grammar":
        text = asked.pattern if asked.type == "regex" else asked.grammar
        if not text:
            raise missing(f"response_format.{'pattern' if asked.type == 'regex' else 'grammar'}")
        return Structured(asked.type, text)
    wrapped = asked.json_schema
    if wrapped is None and not _given(asked.schema):
        raise missing("response_format.json_schema")
    if wrapped is not None and not _given(wrapped.schema):
        raise missing("response_format.json_schema.schema")
    schema = _schema(asked.schema if wrapped is None else wrapped.schema)
    return Structured("json", as_strict(schema) if wrapped is not None and wrapped.strict else schema)


def _given(raw: Anything) -> bool:
    return raw is not UNSET and bytes(raw) not in (b"null", b'""')


def _source(value: Any) -> str:
    if isinstance(value, msgspec.Raw):
        return _schema(value) if _given(value) else ""
    if isinstance(value, list):
        return msgspec.json.encode(value).decode()
    return value if isinstance(value, str) else ""


def _schema(raw: Anything) -> str:
    assert isinstance(raw, msgspec.Raw)
    text = bytes(raw).decode()
    return str(msgspec.json.decode(text)) if text.startswith('"') else text
