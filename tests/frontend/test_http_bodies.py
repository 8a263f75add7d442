"""The table "Bodies of other programs" in docs/serving.md, row by row, and whole bodies that editors and chat programs
send, by their public sources (programs.json)."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ssd.config.engine import ServerConfig
from ssd.config.params import Structured
from ssd.frontend.grammars import say_left_out
from tests.frontend.http_engine import HttpEngine, answering, http_engine
from tests.frontend.tool_model import CALL, TEMPLATE, WEATHER, Thinker, saying, thinking

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT: dict[str, Any] = {"prompt": "Why?", "seed": 1}
USER: dict[str, Any] = {"role": "user", "content": "Why?"}
CHAT: dict[str, Any] = {"messages": [USER], "seed": 1}
PROGRAMS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "programs.json").read_text())


def schema_of(schema: object, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}}


Fields = dict[str, Any]
OTHER_BODIES = json.loads((Path(__file__).parent / "other_bodies.json").read_text())
ROWS, CHAT_ROWS = OTHER_BODIES["of every door"], OTHER_BODIES["of chats"]


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Thinker]:
    """Its chat template shows calls and their ids."""
    server = ServerConfig(names=("scripted",), port=0, tool_call_parser="hermes")
    with thinking(tmp_path_factory.mktemp("bodies"), TEMPLATE, server=server) as thinker:
        yield thinker


@pytest.fixture(scope="module")
def scripted(caller: Thinker) -> HttpEngine:
    return caller.engine


@pytest.fixture(scope="module")
def roomy() -> Iterator[HttpEngine]:
    with http_engine(max_model_len=4096) as engine, answering(engine, [35, 28120]):
        yield engine


def submitted(scripted: HttpEngine, path: str, body: Fields) -> tuple[Any, ...]:
    """What reaches the target, without the number of the request."""
    submit = scripted.submitted(path, **body)
    return list(submit.token_ids), submit.params


def cases(rows: dict[str, list[tuple[Fields, Fields]]]) -> list[Any]:
    return [pytest.param(*pair, id=f"{row}-{index}") for row in rows for index, pair in enumerate(rows[row])]


@pytest.mark.parametrize(("other", "usual"), cases(ROWS))
def test_a_field_of_another_server_is_the_usual_one(scripted: HttpEngine, other: Fields, usual: Fields) -> None:
    for path, body in ((CHATS, CHAT), (COMPLETIONS, TEXT)):
        assert submitted(scripted, path, body | other) == submitted(scripted, path, body | usual)


@pytest.mark.parametrize(("other", "usual"), cases(CHAT_ROWS))
def test_a_chat_of_another_client_is_the_usual_one(scripted: HttpEngine, other: Fields, usual: Fields) -> None:
    assert submitted(scripted, CHATS, CHAT | other) == submitted(scripted, CHATS, CHAT | usual)


def test_of_64_stops_each_ends_the_text(scripted: HttpEngine) -> None:
    with answering(scripted, [35, 28120]):
        _, answer = scripted.post(COMPLETIONS, prompt="Why?", stop=[f"never {n}" for n in range(63)] + [" "])
        assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_body_of_a_program_is_answered(roomy: HttpEngine, program: str) -> None:
    sent = PROGRAMS[program]
    status, headers, content = roomy.ask("POST", sent["path"], sent["body"], sent.get("headers"))
    assert status == 200, content
    if sent["body"].get("stream"):
        assert headers["content-type"].startswith("text/event-stream")
        *events, end, rest = content.decode().split("\n\n")
        assert (end, rest) == ("data: [DONE]", "")
        choices = [choice for event in events for choice in json.loads(event.removeprefix("data: "))["choices"]]
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]
        said = "".join(choice.get("text") or choice.get("delta", {}).get("content", "") for choice in choices)
    else:
        (choice,) = json.loads(content)["choices"]
        said = choice["message"]["content"]
    assert said == "3hello"


def test_answers_to_functions_have_a_function_call(caller: Thinker) -> None:
    asked: Fields = {"messages": [USER], "functions": [WEATHER["function"]], "max_tokens": 100}
    with saying(caller, f"So.\n{CALL}\n{CALL}") as engine:
        (choice,) = engine.post(CHATS, **asked)[1]["choices"]
        made = choice["message"]["function_call"]
        assert (made["name"], json.loads(made["arguments"])) == ("get_weather", {"city": "São Paulo"})
        assert choice["finish_reason"] == "function_call" and "tool_calls" not in choice["message"]
        choices = [event["choices"][0] for event in engine.events(CHATS, **asked)]
        assert [c["delta"]["function_call"] for c in choices if "function_call" in c["delta"]] == [made]
        assert choices[-1]["finish_reason"] == "function_call"


# -- schemas ---------------------------------------------------------------------------------------------------------

LOOSE: Fields = {
    "type": "object",
    "properties": {
        "a": {"type": "array", "items": {"type": "string", "format": "wat"}, "uniqueItems": True, "contains": {}},
        "b": {"type": "string", "pattern": "^(?=.*x)[a-z]+$"},
        "not": {"type": "integer", "not": {"const": 3}},
        "c": {"$ref": "#/$defs/d"},
    },
    "required": ["a", "b", "not", "c"],
    "if": {"properties": {"a": {"const": []}}},
    "then": {"required": ["d"]},
    "propertyNames": {"pattern": "^a"},
    "$defs": {"d": {"type": "string", "pattern": "[(?=]\\\\b"}},
}
HELD: Fields = {
    "type": "object",
    "properties": {
        "a": {"type": "array", "items": {"type": "string"}},
        "b": {"type": "string"},
        "not": {"type": "integer"},
        "c": {"$ref": "#/$defs/d"},
    },
    "required": ["a", "b", "not", "c"],
    "additionalProperties": True,
    "$defs": {"d": {"type": "string", "pattern": "[(?=]\\\\b"}},
}
FORMATS = ["response_format", "json_object", "guided_json", "structured_outputs", "json_schema", "format"]


def by_field(name: str, schema: Fields) -> Fields:
    """A body that asks for a schema."""
    return {
        "response_format": schema_of(schema),
        "json_object": {"response_format": {"type": "json_object", "schema": schema}},
        "structured_outputs": {"structured_outputs": {"json": json.dumps(schema)}},
    }.get(name, {name: schema})


def compiled(params: Any) -> Fields:
    """The schema that a request's grammar obeys, without its options."""
    assert isinstance(params.structured, Structured) and params.structured.kind == "compiled"
    (grammar,) = json.loads(params.structured.source)["grammars"]
    schema: Fields = grammar["json_schema"]
    schema.pop("x-guidance", None)
    return schema


@pytest.mark.parametrize("field", FORMATS)
def test_keywords_that_no_grammar_holds_are_left_out_with_one_warning(
    scripted: HttpEngine, caplog: pytest.LogCaptureFixture, field: str
) -> None:
    say_left_out.cache_clear()
    asked = {**TEXT, **by_field(field, {**LOOSE, "title": field})}
    with caplog.at_level(logging.WARNING, "ssd.frontend"):
        for _ in range(2):
            _, params = submitted(scripted, COMPLETIONS, asked)
    (told,) = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    for word in ("uniqueItems", "contains", "not", "if", "then", "propertyNames", "pattern", "Unknown format: wat"):
        assert re.search(rf"\b{word}\b", told), word
    found = compiled(params)
    assert found.pop("title") == field
    found["properties"]["a"]["items"].pop("format")
    assert found == HELD


def test_tools_leave_the_same_keywords_out(scripted: HttpEngine) -> None:
    function = {"name": "f", "parameters": LOOSE}
    _, params = submitted(
        scripted, CHATS, {**CHAT, "tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    )
    assert not any(f'"{word}"' in params.structured.source for word in ("uniqueItems", "propertyNames", "then"))


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "string", "format": "wat"}, "wat"),
        ({"not": {"type": "string"}}, "not"),
    ],
)
def test_a_strict_schema_is_obeyed_or_refused(scripted: HttpEngine, schema: Fields, word: str) -> None:
    status, answer = scripted.post(CHATS, **CHAT, **schema_of(schema, strict=True))
    assert status == 400 and word in answer["error"]["message"]
    assert submitted(scripted, CHATS, {**CHAT, **schema_of(schema, strict=False)})


def test_unevaluated_properties_do_not_refuse_a_schema(scripted: HttpEngine) -> None:
    """The schema is compiled again though no keyword of it is left out."""
    schema = {"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}
    _, params = submitted(scripted, COMPLETIONS, {**TEXT, **schema_of(schema)})
    assert compiled(params) == {"type": "object", "properties": {"a": {}}, "additionalProperties": False}


# -- the documentation -----------------------------------------------------------------------------------------------

OTHERS = {
    "64 stop strings",
    "slashes at the end of a path",
    "a path without `/v1`, or a whole address as base URL",
    "`curl -d`, or no content type",
    "a byte order mark before the JSON",
    "`max_tokens` in a Lark lexeme, as guidance's `gen(max_tokens=...)` writes it",
}


def test_the_table_has_these_rows() -> None:
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    table = text.partition("### Bodies of other programs")[2].partition("\n## ")[0]
    rows = {line.split(" | ")[0].removeprefix("| ") for line in table.splitlines() if line.startswith("| ")}
    assert rows - {"sent"} == {*ROWS, *CHAT_ROWS, *OTHERS}
