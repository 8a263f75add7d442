"""`/v1/responses`: items in, items out, streamed or not, and nothing stored."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from ssd.ipc.messages import Emission
from tests.frontend.http_engine import HttpEngine
from tests.frontend.tool_model import CALL, WEATHER, Thinker, saying

PATH = "/v1/responses"
STRICT_NOT = {"type": "json_schema", "schema": {"not": {}}, "strict": True}
FLAT = {"type": "function", **WEATHER["function"]}  # type: ignore[dict-item]
ASKED: dict[str, Any] = {"input": "Why?", "max_output_tokens": 300}


def events(engine: HttpEngine, **body: Any) -> list[dict[str, Any]]:
    """Every event of a stream. Each has its type twice and the next number."""
    status, headers, content = engine.ask("POST", PATH, {**ASKED, **body, "stream": True})
    assert status == 200 and headers["content-type"].startswith("text/event-stream"), content
    *parts, rest = content.decode().split("\n\n")
    assert rest == ""
    found = []
    for number, part in enumerate(parts):
        kind, data = re.fullmatch("event: (.*)\ndata: (.*)", part).groups()  # type: ignore[union-attr]
        found.append(json.loads(data))
        assert (found[-1]["type"], found[-1]["sequence_number"]) == (kind, number)
    return found


def nameless(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items without what is new in every answer."""
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in output]


def text(item: dict[str, Any]) -> str:
    (part,) = item["content"]
    return str(part["text"])


def test_an_answer_has_thoughts_texts_and_calls_in_their_order(thinker: Thinker) -> None:
    with saying(thinker, f"<think>Hm.</think>See:\n{CALL}\n{CALL}\nDone.") as engine:
        status, whole = engine.post(PATH, **ASKED, tools=[FLAT], metadata={"a": "b"}, text={"verbosity": "low"})
        assert status == 200, whole
        assert [item["type"] for item in whole["output"]] == ["reasoning", "message", *["function_call"] * 2, "message"]
        assert [text(whole["output"][at]) for at in (0, 1, 4)] == ["Hm.", "See:", "\nDone."]
        assert all(json.loads(call["arguments"]) == {"city": "São Paulo"} for call in whole["output"][2:4])
        assert len({call["call_id"] for call in whole["output"][2:4]}) == 2
        assert (whole["object"], whole["status"], whole["metadata"]) == ("response", "completed", {"a": "b"})
        assert whole["usage"]["total_tokens"] == whole["usage"]["input_tokens"] + whole["usage"]["output_tokens"]
        assert whole["tools"] == [FLAT]

        streamed = events(engine, tools=[FLAT])
        assert nameless(streamed[-1]["response"]["output"]) == nameless(whole["output"])
        assert streamed[-1]["type"] == "response.completed"


def test_a_stream_builds_each_item_up(thinker: Thinker) -> None:
    with saying(thinker, f"<think>Hm.\n\nSo.</think>See:\n{CALL}") as engine:
        streamed = events(engine, tools=[FLAT])
    assert [event["type"] for event in streamed[:2]] == ["response.created", "response.in_progress"]
    assert all(event["response"]["status"] == "in_progress" for event in streamed[:2])
    for index, item in enumerate(streamed[-1]["response"]["output"]):
        about = [event for event in streamed if event.get("output_index") == index]
        assert (
            about[0]["item"] | {"status": item["status"]} | {k: item[k] for k in ("content", "arguments") if k in item}
            == item
        )
        assert about[-1]["item"] == item
        told = "".join(event["delta"] for event in about if event["type"].endswith(".delta"))
        assert told == (item["arguments"] if item["type"] == "function_call" else text(item))
        assert {event["item_id"] for event in about[1:-1]} == {item["id"]}


def test_a_cut_answer_is_incomplete(thinker: Thinker) -> None:
    with saying(thinker, "One two three four.") as engine:
        _, whole = engine.post(PATH, input="Why?", max_output_tokens=2)
        assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert whole["output"][0]["status"] == "incomplete" and text(whole["output"][0]) == "One two"
        first, *_, last = events(engine, max_output_tokens=2)
        assert (first["response"]["status"], last["type"]) == ("in_progress", "response.incomplete")


def test_an_error_in_the_middle_is_the_last_event(thinker: Thinker) -> None:
    connection = thinker.engine.connection()
    body = json.dumps({**ASKED, "stream": True})
    connection.request("POST", PATH, body, {"content-type": "application/json"})
    target = thinker.engine.engine.target
    request = target.next_submit().request
    target.step(Emission(request, thinker.tokenizer.encode("One")))
    answer = connection.getresponse()
    while b"delta" not in answer.readline():
        pass
    target.step(Emission(request, [], finish_reason="error", error="it broke"))
    last = answer.read().decode().strip().split("\n\n")[-1]
    assert last.startswith("event: error\n") and json.loads(last.split("data: ")[1])["message"] == "it broke"


# -- what is asked --------------------------------------------------------------------------------------------------


def prompt(thinker: Thinker, **body: Any) -> str:
    """What the model is told."""
    connection = thinker.engine.connection()
    connection.request("POST", PATH, json.dumps({**ASKED, **body}), {"content-type": "application/json"})
    submit = thinker.engine.engine.target.next_submit()
    thinker.engine.engine.target.step(Emission(submit.request, [], finish_reason="stop"))
    assert connection.getresponse().status == 200
    return thinker.tokenizer.decode(submit.token_ids)


def test_instructions_come_first(thinker: Thinker) -> None:
    assert prompt(thinker, instructions="Be brief.") == "<system>Be brief.<user>Why?<assistant>"
    assert prompt(thinker, tools=[FLAT]) == f"[{json.dumps(WEATHER)}]<user>Why?<assistant>"


def test_items_become_messages(thinker: Thinker) -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "Why"}, {"type": "input_text", "text": "?"}],
        },
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {
            "role": "assistant",
            "content": [{"type": "output_text", "text": "See:", "annotations": []}],
            "status": "completed",
        },
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call", "call_id": "c2", "name": "get_weather", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "Sunny"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "Rain"}]},
        {"type": "message", "role": "assistant", "content": "So."},
    ]
    calls = "".join(f"<tool_call>{id} get_weather {city}</tool_call>" for id, city in (("c1", "Rome"), ("c2", "Oslo")))
    expected = f"<system>Be brief.<user>Why?<assistant><think>Hm.</think>See:{calls}"
    results = "<tool get_weather>Sunny<tool get_weather>Rain"
    assert prompt(thinker, input=items) == f"{expected}{results}<assistant>So.<assistant>"


def test_a_format_and_a_choice_of_tools_reach_the_target_as_in_a_chat(thinker: Thinker) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    format = {"type": "json_schema", "name": "x", "strict": True, "schema": schema}
    in_chat = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    by_name = {"type": "function", "name": "get_weather"}
    for fields, chat in (
        ({"text": {"format": format}}, in_chat),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        ({"tools": [FLAT], "tool_choice": "required"}, {"tools": [WEATHER], "tool_choice": "required"}),
        (
            {"tools": [FLAT], "tool_choice": by_name},
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
        ),
    ):
        found = []
        for path, body in (
            (PATH, {**ASKED, **fields}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Why?"}], **chat}),
        ):
            connection = thinker.engine.connection()
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            found.append(thinker.engine.engine.target.next_submit().params.structured)
            connection.close()
        assert found[0] is not None and found[0] == found[1]
    with saying(thinker, '{"a": 1}') as engine:
        status, answer = engine.post(PATH, **ASKED, text={"format": format})
        assert (status, answer["text"], text(answer["output"][0])) == (200, {"format": format}, '{"a": 1}')


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
        ({"background": True}, "background", "unsupported_parameter"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type", "invalid_value"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "missing_parameter"),
        ({"text": {"format": STRICT_NOT}}, "text.format", "invalid_request"),
        (
            {"text": {"format": {"type": "json_object"}}, "tools": [FLAT], "response_format": {"type": "json_object"}},
            "text.format",
            "invalid_value",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_parameter"),
        ({"tools": [FLAT], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "invalid_value"),
        ({"n": 2}, "n", "unsupported_parameter"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "unsupported_parameter"),
        ({"input": [{"role": "user"}]}, "input[0].content", "missing_parameter"),
        ({"input": [{"content": "x"}]}, "input[0].role", "missing_parameter"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].arguments", "missing_parameter"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output", "missing_parameter"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": "a " * 10_000}, "input", "context_length_exceeded"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_cannot_be_answered_is_refused(thinker: Thinker, fields: dict[str, Any], param: str, code: str) -> None:
    status, answer = thinker.engine.post(PATH, **{**ASKED, **fields})
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, code), answer
