"""The table "Bodies of other programs" in docs/serving.md: each row is asked over HTTP, as it says there."""

from __future__ import annotations

import json
import logging
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ssd.config.engine import ServerConfig
from ssd.config.params import SamplingDefaults, Structured
from ssd.frontend.grammars import say_left_out
from ssd.ipc.messages import Emission, Submit
from ssd.ipc.public import TokenLogprob
from tests.frontend.http_engine import HttpEngine, answering, http_engine
from tests.frontend.tool_model import CALL, TEMPLATE, WEATHER, Thinker, model, saying

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT: dict[str, Any] = {"prompt": "Why?", "seed": 1}
USER: dict[str, Any] = {"role": "user", "content": "Why?"}
CHAT: dict[str, Any] = {"messages": [USER], "seed": 1}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
LARK, GBNF = 'start: a\na: "x"', 'root ::= "x" | "y"'
OTHER_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
TOOLS: dict[str, Any] = {"tools": [WEATHER, OTHER_TOOL]}
LISTED = {"type": "function", "function": {"name": "get_weather"}}


def called(**call: Any) -> list[dict[str, Any]]:
    """A conversation with one call and its result."""
    function = {"name": "get_weather", "arguments": '{"city":"Rome"}'}
    made = {"id": "call00000", "type": "function", "function": function}
    returned = {"role": "tool", "tool_call_id": "call00000", "content": "Sunny"}
    return [USER, {"role": "assistant", "content": "", "tool_calls": [made | call]}, returned]


def messages(*said: dict[str, Any]) -> dict[str, Any]:
    return {"messages": list(said)}


def parts(*content: Any) -> dict[str, Any]:
    return messages({"role": "user", "content": list(content)})


def schema_of(schema: object, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}}


Fields = dict[str, Any]
ROWS: dict[str, list[tuple[Fields, Fields]]] = {
    "the same format twice": [
        ({"guided_grammar": LARK, "structured_outputs": {"grammar": LARK}}, {"guided_grammar": LARK}),
        ({"guided_json": json.dumps(SCHEMA, indent=2), **schema_of(SCHEMA, strict=True)}, {"guided_json": SCHEMA}),
        ({"guided_choice": ["a", "b"], "structured_outputs": {"choice": ["a", "b"]}}, {"guided_choice": ["a", "b"]}),
    ],
    "Lark's `?rule`, `!rule`, `rule.2`": [
        (
            {"guided_grammar": '?start: a // a.1: b\n!a.2: "?b: c" | /d.3:/\n'},
            {"guided_grammar": 'start: a // a.1: b\na: "?b: c" | /d.3:/\n'},
        )
    ],
    "SGLang's `regex`, `ebnf`": [
        ({"regex": "[a-z]+"}, {"guided_regex": "[a-z]+"}),
        ({"ebnf": GBNF}, {"guided_grammar": GBNF}),
        ({"json_schema": json.dumps(SCHEMA)}, {"guided_json": SCHEMA}),
    ],
    "Ollama's `format`": [
        ({"format": "json"}, {"response_format": {"type": "json_object"}}),
        ({"format": SCHEMA}, {"guided_json": SCHEMA}),
        ({"format": ""}, {}),
    ],
    "`response_format` of the types `grammar`, `regex`": [
        ({"response_format": {"type": "grammar", "grammar": GBNF}}, {"guided_grammar": GBNF}),
        ({"response_format": {"type": "regex", "pattern": "[a-z]+"}}, {"guided_regex": "[a-z]+"}),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, {"guided_json": SCHEMA}),
    ],
    "`max_tokens: -1`": [({"max_tokens": -1}, {"max_tokens": 256}), ({"n_predict": -2}, {"max_tokens": 256})],
    '`16.0`, `"16"`, `"0.7"`, `"false"`': [
        ({"max_tokens": 16.0}, {"max_tokens": 16}),
        ({"max_tokens": "16", "temperature": "0.7", "unknown": 1}, {"max_tokens": 16, "temperature": 0.7}),
        ({"ignore_eos": "true", "top_k": "40"}, {"ignore_eos": True, "top_k": 40}),
        ({"stop": ["null", "16"], "ignore_eos": "False"}, {"stop": ["null", "16"]}),
    ],
    "`repeat_penalty`, `n_predict`": [
        ({"repeat_penalty": 1.3, "n_predict": 5}, {"repetition_penalty": 1.3, "max_tokens": 5}),
        ({"repeat_penalty": 1.3, "repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
    ],
    "a `temperature` up to 5": [({"temperature": 5}, {"temperature": 5.0})],
    "llama.cpp's `cache_prompt`, `samplers`, ...": [
        (
            {"cache_prompt": True, "id_slot": -1, "samplers": ["top_k"], "timings_per_token": True, "xtc_threshold": 1},
            {},
        )
    ],
}
CHAT_ROWS: dict[str, list[tuple[Fields, Fields]]] = {
    "parts of a message as texts, `input_text`, `output_text`": [
        (parts("Wh", {"type": "input_text", "text": "y"}, {"type": "output_text", "text": "?"}), messages(USER))
    ],
    "`arguments` as an object": [
        (
            messages(*called(function={"name": "get_weather", "arguments": {"city": "Rome"}})) | TOOLS,
            messages(*called()) | TOOLS,
        ),
        (
            messages(*called(function={"name": "f"})) | TOOLS,
            messages(*called(function={"name": "f", "arguments": "{}"})) | TOOLS,
        ),
    ],
    "calls without `id` or `type`, results without `tool_call_id`": [
        (
            messages(
                USER,
                {"role": "assistant", "tool_calls": [{"function": called()[1]["tool_calls"][0]["function"]}]},
                {"role": "tool", "content": "Sunny"},
            ),
            messages(*called()),
        ),
        (messages(*called(id=None, type=None)), messages(*called())),
    ],
    "the role `function`, `function_call` of a message": [
        (
            messages(
                USER,
                {"role": "assistant", "content": None, "function_call": called()[1]["tool_calls"][0]["function"]},
                {"role": "function", "name": "get_weather", "content": "Sunny"},
            ),
            messages(*called()),
        )
    ],
    "`functions`, `function_call`": [
        (
            {"functions": [WEATHER["function"]], "function_call": {"name": "get_weather"}},
            {"tools": [WEATHER], "tool_choice": LISTED},
        ),
        ({"functions": [WEATHER["function"]], "function_call": "none"}, {}),
        ({"functions": [WEATHER["function"]]}, {"tools": [WEATHER]}),
    ],
    '`tool_choice: "any"`': [({**TOOLS, "tool_choice": "any"}, {**TOOLS, "tool_choice": "required"})],
    "`tool_choice` of the type `allowed_tools`": [
        (
            {
                **TOOLS,
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named]}},
            },
            {"tools": [WEATHER], "tool_choice": mode},
        )
        for mode in ("auto", "required")
        for named in (LISTED, {"type": "function", "name": "get_weather"})
    ],
    '`tool_choice: {"type": "function", "name": ...}`': [
        (
            {**TOOLS, "tool_choice": {"type": "function", "name": "get_weather"}},
            {**TOOLS, "tool_choice": LISTED},
        )
    ],
}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpEngine]:
    """Its chat template shows calls and their ids."""
    directory = tmp_path_factory.mktemp("bodies")
    model(directory, TEMPLATE)
    with http_engine(
        ServerConfig(names=("scripted",), port=0, tool_call_parser="hermes"), target=str(directory)
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Thinker]:
    directory = tmp_path_factory.mktemp("calling")
    tokenizer = model(directory, TEMPLATE)
    with http_engine(
        ServerConfig(names=("scripted",), port=0, tool_call_parser="hermes"), target=str(directory)
    ) as engine:
        yield Thinker(engine, tokenizer)


def submitted(scripted: HttpEngine, path: str, body: Fields) -> tuple[Any, ...]:
    """What reaches the target, without the number of the request."""
    connection = scripted.connection()
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    submit: Submit = scripted.engine.target.next_submit()
    scripted.engine.target.step(Emission(submit.request, [35], finish_reason="stop"))
    assert connection.getresponse().status == 200
    connection.close()
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


REFUSED: list[tuple[Fields, str]] = [
    ({"guided_grammar": LARK, "structured_outputs": {"grammar": 'start: "y"'}}, "guided_grammar"),
    ({"format": "json", "guided_json": SCHEMA}, "format"),
    ({"regex": "a", "ebnf": GBNF}, "ebnf"),
    ({"format": "yaml"}, "format"),
    ({"response_format": {"type": "grammar"}}, "response_format.grammar"),
    ({"repeat_penalty": 1.3, "repetition_penalty": 1.2}, "repeat_penalty"),
    ({"max_tokens": 5, "n_predict": 6}, "n_predict"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 16.5}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"temperature": 5.1}, "temperature"),
    ({"temperature": "inf"}, "temperature"),
    ({"stop": ["x"] * 65}, "stop"),
    ({"samplers": [], "dynatemp_range": 0.5}, "dynatemp_range"),
    (parts({"type": "image_url", "image_url": {"url": "data:"}}), "messages[0].content[0].type"),
    (messages({"role": "assistant", "tool_calls": [{"id": "x"}]}), "messages[0].tool_calls[0].function"),
    (messages({"role": "function", "name": "f"}), "messages[0].content"),
    ({**TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    ({**TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({**TOOLS, "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
    ({"functions": [WEATHER["function"]], "function_call": {"name": "g"}}, "function_call"),
    ({"function_call": {"name": "g"}}, "function_call"),
    ({"functions": [WEATHER["function"]], "tool_choice": "auto"}, "tool_choice"),
    ({"guided_json": {"const": True}, "json_schema": {"const": 1}}, "json_schema"),
    ({"best_of": "1"}, "best_of"),
    ({"functions": [WEATHER["function"]], **TOOLS}, "functions"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_is_wrong_or_contradicts_itself_is_still_refused(scripted: HttpEngine, fields: Fields, param: str) -> None:
    status, answer = scripted.post(CHATS, **CHAT | fields)
    assert (status, answer["error"]["param"]) == (400, param), answer


def test_of_64_stops_each_ends_the_text(scripted: HttpEngine) -> None:
    with answering(scripted, [35, 28120]):
        _, answer = scripted.post(COMPLETIONS, prompt="Why?", stop=[f"never {n}" for n in range(63)] + [" "])
        assert answer["choices"][0]["finish_reason"] == "stop"


def test_answers_to_functions_have_a_function_call(thinker: Thinker) -> None:
    asked: Fields = {"messages": [USER], "functions": [WEATHER["function"]], "max_tokens": 100}
    with saying(thinker, f"So.\n{CALL}\n{CALL}") as engine:
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


@pytest.mark.parametrize("strict", [True, False])
def test_what_asks_for_nothing_is_not_refused(scripted: HttpEngine, strict: bool) -> None:
    _, params = submitted(
        scripted, COMPLETIONS, {**TEXT, **schema_of({"type": "array", "uniqueItems": False}, strict=strict)}
    )
    assert compiled(params) == {"type": "array"}


def test_unevaluated_properties_do_not_refuse_a_schema(scripted: HttpEngine) -> None:
    """The schema is compiled again though no keyword of it is left out."""
    schema = {"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}
    _, params = submitted(scripted, COMPLETIONS, {**TEXT, **schema_of(schema)})
    assert compiled(params) == {"type": "object", "properties": {"a": {}}, "additionalProperties": False}


# -- paths and heads -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def http() -> Iterator[HttpEngine]:
    with http_engine() as engine, answering(engine, [35, 28120]):
        yield engine


@pytest.mark.parametrize("path", ["/v1/models/", "/v1/models//", "/v1/models/alias/"])
def test_slashes_at_the_end_change_no_path(http: HttpEngine, path: str) -> None:
    assert http.ask("GET", path)[0] == 200


@pytest.mark.parametrize(
    ("path", "known"),
    [
        ("/models", "/v1/models"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/models", "/v1/models"),
        ("/v1/chat/completions/models", "/v1/models"),
    ],
)
def test_a_wrong_base_url_gets_a_hint(http: HttpEngine, path: str, known: str) -> None:
    status, _, content = http.ask("GET", path)
    message = json.loads(content)["error"]["message"]
    assert status == 404 and f"; {known} is there" in message and "base URL that ends in /v1" in message
    assert "is there" not in json.loads(http.ask("GET", "/nothing")[2])["error"]["message"]


RAW = json.dumps(TEXT).encode()
FORM = {"content-type": "application/x-www-form-urlencoded"}


def ask_raw(http: HttpEngine, headers: dict[str, str], body: bytes = RAW) -> int:
    connection = http.connection()
    connection.request("POST", COMPLETIONS, body, headers)
    return connection.getresponse().status


def test_a_program_on_this_machine_needs_no_content_type(http: HttpEngine) -> None:
    assert ask_raw(http, FORM) == ask_raw(http, {}) == 200
    assert ask_raw(http, FORM, b"prompt=Why") == 400


def test_so_does_one_at_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with http_engine(ServerConfig(names=("scripted",), uds=path)) as engine, answering(engine, [35, 28120]):
        for origin, status in ((b"", 200), (b"origin: http://127.0.0.1\r\n", 415)):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(path)
                head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n" % len(RAW)
                client.sendall(head + origin + b"\r\n" + RAW)
                assert client.recv(100).startswith(b"HTTP/1.1 %d" % status)


@pytest.mark.parametrize(
    "header", [{"origin": "null"}, {"origin": "http://127.0.0.1:8000"}, {"sec-fetch-site": "none"}]
)
def test_a_browser_does(http: HttpEngine, header: dict[str, str]) -> None:
    """A page may send forms, and bodies without a type, to any server."""
    assert ask_raw(http, FORM | header) == ask_raw(http, header) == 415


@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data"])
def test_so_do_other_types(http: HttpEngine, kind: str) -> None:
    assert ask_raw(http, {"content-type": kind}) == 415


def test_a_byte_order_mark_is_no_part_of_the_json(http: HttpEngine) -> None:
    assert http.ask("POST", COMPLETIONS, b"\xef\xbb\xbf" + RAW)[0] == 200


# -- answers ---------------------------------------------------------------------------------------------------------


def test_the_end_token_has_no_log_probability_in_a_chat(scripted: HttpEngine) -> None:
    """Usage and ids count it as before, and completions show it."""
    for stream in (False, True):
        for path, body, count in ((CHATS, {**CHAT, "logprobs": True}, 2), (COMPLETIONS, {**TEXT, "logprobs": 0}, 3)):
            connection = scripted.connection()
            asked = {**body, "stream": stream, "return_token_ids": True, "max_tokens": 9}
            connection.request("POST", path, json.dumps(asked), {"content-type": "application/json"})
            request = scripted.engine.target.next_submit().request
            for ids, reason in (([35], None), ([28120, 2], "stop")):
                entries = [TokenLogprob(token, -0.5, []) for token in ids]
                scripted.engine.target.step(Emission(request, ids, entries, reason))  # type: ignore[arg-type]
            content = connection.getresponse().read().decode()
            events = [json.loads(event) for event in re.findall(r"^(?:data: )?({.*})$", content, re.MULTILINE)]
            shown = [event["choices"][0].get("logprobs") or {} for event in events]
            assert sum(len(each.get("content", each.get("tokens", ()))) for each in shown) == count
            assert [i for event in events for i in event["choices"][0].get("token_ids", ())] == [35, 28120, 2]


def test_every_door_samples_as_the_model_says() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_k=20)
    doors: list[tuple[str, Fields]] = [
        (CHATS, {"messages": [USER]}),
        (COMPLETIONS, {"prompt": "Why?"}),
    ]
    with http_engine(sampling=defaults) as engine:
        for path, body in doors:
            params = submitted(engine, path, body)[1]
            assert (params.temperature, params.top_k) == (0.6, 20)


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
