"""The format that a body asks of its answer, in the words of OpenAI, vLLM and llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import UNSET

from ssd.config.params import MAX_COMPILED, GrammarKind, Structured
from ssd.frontend.http.bodies import Anything, ResponseFormat, Sampling
from ssd.frontend.http.errors import invalid, missing

_KINDS: tuple[GrammarKind, ...] = ("json", "regex", "choice", "grammar")


def structured(body: Sampling) -> Structured | None:
    """Return the format that the answer must have, or None for any text.

    Raises HttpError if fields contradict each other."""
    found = list(_asked(body))
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise invalid(found[1][0], f"{names} both say what the answer must be; give one")
    for name, asked in found:
        if len(asked.source) > MAX_COMPILED:
            raise invalid(name, f"{name} has {len(asked.source)} characters, which is too long")
        return asked
    return None


def field_of(body: Sampling) -> str | None:
    """Return the name of the field that asks for a format, or None if none does."""
    return next((name for name, _ in _asked(body)), None)


def _asked(body: Sampling) -> Iterator[tuple[str, Structured]]:
    """Yield each field that asks for a format, and the format."""
    if body.response_format is not None and (asked := _format(body.response_format)) is not None:
        yield "response_format", asked
    if (vllm := body.structured_outputs) is not None:
        yield from _each("structured_outputs.", _KINDS, (vllm.json, vllm.regex, vllm.choice, vllm.grammar))
        if vllm.json_object:
            yield "structured_outputs.json_object", Structured("json_object")
        if _given(vllm.structural_tag):
            yield "structured_outputs.structural_tag", Structured("structural_tag", _schema(vllm.structural_tag))
    older = (body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)
    yield from _each("guided_", _KINDS, older)
    if _given(body.json_schema):
        yield "json_schema", Structured("json", _schema(body.json_schema))
    if body.grammar:
        yield "grammar", Structured("grammar", body.grammar)


def _each(prefix: str, kinds: tuple[GrammarKind, ...], values: tuple[Any, ...]) -> Iterator[tuple[str, Structured]]:
    for kind, value in zip(kinds, values, strict=True):
        if not value or (not isinstance(value, list | str) and not _given(value)):
            continue
        if isinstance(value, list):
            value = msgspec.json.encode(value).decode()
        yield prefix + kind, Structured(kind, value if isinstance(value, str) else _schema(value))


def _format(asked: ResponseFormat) -> Structured | None:
    if asked.type == "text":
        return None
    if asked.type == "json_object":
        return Structured("json", _schema(asked.schema)) if _given(asked.schema) else Structured("json_object")
    if asked.type == "structural_tag":
        parts = {"structures": asked.structures, "triggers": asked.triggers}
        given = {name: part for name, part in parts.items() if part is not UNSET}
        return Structured("structural_tag", msgspec.json.encode(given).decode())
    if asked.json_schema is None:
        raise missing("response_format.json_schema")
    if not _given(asked.json_schema.schema):
        raise missing("response_format.json_schema.schema")
    return Structured("json", _schema(asked.json_schema.schema))


def _given(raw: Anything) -> bool:
    return raw is not UNSET and bytes(raw) not in (b"null", b'""')


def _schema(raw: Anything) -> str:
    """Return the JSON of a schema, which may also come as a text."""
    assert isinstance(raw, msgspec.Raw)
    text = bytes(raw).decode()
    return str(msgspec.json.decode(text)) if text.startswith('"') else text
