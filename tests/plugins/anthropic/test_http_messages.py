"""`/v1/messages`: blocks in, blocks out, streamed or not, as Anthropic's SDKs and Claude Code ask."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ssd.config.engine import ServerConfig
from ssd.config.params import SamplingDefaults
from ssd.ipc.messages import Emission
from tests.frontend.http_engine import HttpEngine, answering, http_engine
from tests.frontend.tool_model import CALL, FUNCTION, QWEN, WEATHER, Thinker, saying, thinking

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
TOOL = {"name": "get_weather", "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}
USED = {"type": "tool_use", "id": "toolu_c1", "name": "get_weather"}
RESULT = {"type": "tool_result", "tool_use_id": "a"}
JSON = {"type": "json_object"}
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "Why?"}], "max_tokens": 300}
SHAPES = json.loads((Path(__file__).parent / "claude_code.json").read_text())


def said(*content: Any, role: str = "user") -> dict[str, Any]:
    """A conversation of one message, of these blocks."""
    return {"messages": [{"role": role, "content": list(content)}]}


def events(engine: HttpEngine, **body: Any) -> list[dict[str, Any]]:
    return engine.typed_events(PATH, **ASKED | body)


def built(streamed: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of events, which come in the order that SDKs want."""
    start, ping, *middle, delta, stop = streamed
    assert (start["type"], ping, delta["type"], stop) == (
        "message_start",
        {"type": "ping"},
        "message_delta",
        {"type": "message_stop"},
    )
    message: dict[str, Any] = start["message"]
    assert message["content"] == [] and message["stop_reason"] is None and message["usage"]["output_tokens"] == 0
    content: list[dict[str, Any]] = message["content"]
    is_open, calls = False, ""
    for event in middle:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(content)
            content.append(event["content_block"])
            is_open, calls = True, ""
        elif event["type"] == "content_block_delta":
            assert is_open and event["index"] == len(content) - 1
            kind, (name, value) = event["delta"].pop("type"), *event["delta"].items()
            assert kind == {"partial_json": "input_json_delta"}.get(name, f"{name}_delta")
            if name == "partial_json":
                calls += value
                content[-1]["input"] = json.loads(calls)
            else:
                content[-1][name] += value
        else:
            assert event == {"type": "content_block_stop", "index": len(content) - 1} and is_open
            is_open = False
    assert not is_open
    return {**message, **delta["delta"], "usage": {**message["usage"], **delta["usage"]}}


def nameless(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in block.items() if name != "id"} for block in content]


@pytest.mark.parametrize("each", [1, 2, 7])
def test_an_answer_has_thoughts_texts_and_calls_in_their_order(thinker: Thinker, each: int) -> None:
    with saying(thinker, f"<think>Hm.</think>\n\nSee:\n{CALL}\n{CALL}\nDone.", each) as engine:
        status, whole = engine.post(PATH, **ASKED, tools=[TOOL])
        assert status == 200, whole
        call = {"type": "tool_use", "name": "get_weather", "input": {"city": "São Paulo"}}
        assert nameless(whole["content"]) == [
            {"type": "thinking", "thinking": "Hm.", "signature": "unsigned"},
            {"type": "text", "text": "See:"},
            call,
            call,
            {"type": "text", "text": "\nDone."},
        ]
        assert all(block["id"].startswith("toolu_") for block in whole["content"][2:4])
        assert whole["content"][2]["id"] != whole["content"][3]["id"]
        assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", "scripted")
        assert (whole["stop_reason"], whole["stop_sequence"]) == ("tool_use", None)

        streamed = built(events(engine, tools=[TOOL]))
        assert nameless(streamed["content"]) == nameless(whole["content"])
        for name in ("stop_reason", "usage", "model", "role"):
            assert streamed[name] == whole[name]


def test_usage_counts_cached_tokens_apart(thinker: Thinker) -> None:
    with saying(thinker, "One two.") as engine:
        _, whole = engine.post(PATH, **ASKED)
        _, counted = engine.post(COUNT, **ASKED)
        prompt = len(thinker.tokenizer.encode("<user>Why?<assistant>"))
        assert counted == {"input_tokens": prompt}
        made = len(thinker.tokenizer.encode("One two."))
        assert whole["usage"] == {
            "input_tokens": prompt - 1,
            "output_tokens": made,
            "cache_read_input_tokens": 1,
            "cache_creation_input_tokens": 0,
        }
        start, *_, delta, _ = events(engine)
        assert start["message"]["usage"]["input_tokens"] == prompt
        assert delta["usage"] == whole["usage"]


@pytest.mark.parametrize(
    ("fields", "reason", "stop"),
    [
        ({}, "end_turn", None),
        ({"max_tokens": 2}, "max_tokens", None),
        ({"max_tokens": 32_000}, "end_turn", None),  # more than the context holds
        ({"stop_sequences": ["thr", " fo", "x"]}, "stop_sequence", "thr"),
        ({"stop_sequences": ["four"], "stop": "x"}, "stop_sequence", "four"),
        ({"stop_sequences": [], "stop": ["x", "two"]}, "stop_sequence", "two"),
        ({"stop_sequences": ["x"]}, "end_turn", None),
    ],
)
def test_the_reason_of_an_end(thinker: Thinker, fields: dict[str, Any], reason: str, stop: str | None) -> None:
    with saying(thinker, "One two three four.") as engine:
        _, whole = engine.post(PATH, **{**ASKED, **fields})
        assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, stop)
        text = "One two three four."
        told = text[: text.index(stop)] if stop else {"max_tokens": "One two"}.get(reason, text)
        assert whole["content"] == [{"type": "text", "text": told}]
        assert built(events(engine, **fields)) | {"id": ""} == whole | {"id": ""}


def test_an_answer_without_text_has_no_blocks(thinker: Thinker) -> None:
    with saying(thinker, "\n \n") as engine:
        assert engine.post(PATH, **ASKED)[1]["content"] == []
        assert built(events(engine))["content"] == []


def test_a_text_keeps_the_white_space_that_it_begins_with(thinker: Thinker) -> None:
    with saying(thinker, "\n \nDone.", 1) as engine:
        for message in (engine.post(PATH, **ASKED)[1], built(events(engine))):
            assert message["content"] == [{"type": "text", "text": "\n \nDone."}]


def test_an_error_in_the_middle_is_the_last_event(thinker: Thinker) -> None:
    connection = thinker.engine.begin(PATH, {"x-request-id": "mine"}, **ASKED, stream=True)
    target = thinker.engine.engine.target
    request = target.next_submit().request
    target.step(Emission(request, thinker.tokenizer.encode("One")))
    answer = connection.getresponse()
    assert answer.headers["request-id"] == "mine"
    while b"text_delta" not in answer.readline():
        pass
    target.step(Emission(request, [], finish_reason="error", error="it broke"))
    last = answer.read().decode().strip().split("\n\n")[-1]
    assert last.startswith("event: error\n")
    error = {"type": "api_error", "message": "it broke"}
    assert json.loads(last.split("data: ")[1]) == {"type": "error", "error": error, "request_id": "mine"}


# -- what is asked --------------------------------------------------------------------------------------------------


def prompt(thinker: Thinker, **body: Any) -> str:
    """What the model is told. `count_tokens` counts the same."""
    ids = thinker.engine.submitted(PATH, **ASKED | body).token_ids
    assert thinker.engine.post(COUNT, **{**ASKED, **body}) == (200, {"input_tokens": len(ids)})
    return thinker.tokenizer.decode(ids)


def test_the_system_prompt_and_tools_come_first(thinker: Thinker) -> None:
    assert prompt(thinker, system="Be brief.") == "<system>Be brief.<user>Why?<assistant>"
    blocks = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=0a1b2;"},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be kind."},
    ]
    assert prompt(thinker, system=blocks) == "<system>Be brief.\nBe kind.<user>Why?<assistant>"
    assert prompt(thinker, tools=[TOOL]) == f"[{json.dumps(WEATHER)}]<user>Why?<assistant>"
    assert prompt(thinker, tools=[TOOL], tool_choice={"type": "none"}) == "<user>Why?<assistant>"


def test_blocks_become_messages(thinker: Thinker) -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Why"}, {"type": "text", "text": "not?"}]},
        {"role": "user", "content": "Well?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "unsigned"},
                {"type": "redacted_thinking", "data": "xyz"},
                {"type": "text", "text": "See:", "citations": None},
                {"type": "tool_use", "id": "toolu_c1", "name": "get_weather", "input": {"city": "Rome"}},
                {"type": "tool_use", "id": "c2", "name": "get_weather", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Go on."},
                {"type": "tool_result", "tool_use_id": "toolu_c1", "content": "Sunny", "cache_control": None},
                {
                    "type": "tool_result",
                    "tool_use_id": "c2",
                    "is_error": True,
                    "content": [{"type": "text", "text": "No"}, {"type": "text", "text": "city"}],
                },
                {"type": "tool_result", "tool_use_id": "c2"},
            ],
        },
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "So."},
        {"role": "assistant", "content": [{"type": "text", "text": " It is."}]},
        {"role": "user", "content": [{"type": "text", "text": "Bye."}]},
    ]
    calls = "".join(f"<tool_call>{id} get_weather {city}</tool_call>" for id, city in (("c1", "Rome"), ("c2", "Oslo")))
    results = "<tool get_weather>Sunny<tool get_weather>Error: No\ncity<tool get_weather>"
    assert prompt(thinker, messages=turns) == (
        f"<user>Why\nnot?\nWell?<assistant><think>Hm.</think>See:{calls}{results}"
        "<user>Go on.\nBe brief.<assistant>So. It is.<user>Bye.<assistant>"
    )


def test_text_of_the_system_before_an_answer_joins_the_system_prompt(thinker: Thinker) -> None:
    turns = [*ASKED["messages"], {"role": "system", "content": [{"type": "text", "text": "Be kind."}]}]
    assert prompt(thinker, messages=turns) == "<system>Be kind.<user>Why?<assistant>"
    assert prompt(thinker, messages=turns, system="Be brief.") == "<system>Be brief.\nBe kind.<user>Why?<assistant>"


def test_a_call_without_input_has_no_arguments(thinker: Thinker) -> None:
    for given in ({}, {"input": None}, {"input": {}}):
        turns = [*ASKED["messages"], {"role": "assistant", "content": [USED | given]}, *ASKED["messages"]]
        assert prompt(thinker, messages=turns) == (
            "<user>Why?<assistant><tool_call>c1 get_weather </tool_call><user>Why?<assistant>"
        )


def test_the_answer_goes_on_with_the_assistants_last_message(thinker: Thinker) -> None:
    turns = [*ASKED["messages"], {"role": "assistant", "content": "Because"}]
    assert prompt(thinker, messages=turns) == "<user>Why?<assistant>Because"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Thinker]:
    """A model whose template has the variable `enable_thinking`."""
    with thinking(tmp_path_factory.mktemp("qwen"), QWEN, max_model_len=2048) as thinker:
        yield thinker


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, False),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, True),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, True),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
    ],
)
def test_a_model_thinks_if_it_is_asked_to(qwen: Thinker, fields: dict[str, Any], thinks: bool) -> None:
    assert prompt(qwen, **fields).endswith("<think>\n" if thinks else "</think>\n\n")


def test_a_format_and_a_choice_of_tools_reach_the_target_as_in_a_chat(thinker: Thinker) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    format = {"type": "json_schema", "schema": schema}
    in_chat = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    tools = {"tools": [WEATHER]}
    named = {"type": "function", "function": {"name": "get_weather"}}
    for fields, chat in (
        ({"output_config": {"format": format, "effort": "high"}}, in_chat),
        ({"output_format": format}, in_chat),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, {**tools, "tool_choice": "required"}),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "get_weather"}}, {**tools, "tool_choice": named}),
        (
            {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
            {**tools, "tool_choice": "required", "parallel_tool_calls": False},
        ),
        (
            {"tools": [{**TOOL, "strict": True}], "tool_choice": {"type": "auto"}},
            {"tools": [{"type": "function", "function": {**FUNCTION, "strict": True}}]},
        ),
    ):
        found = thinker.engine.submitted(PATH, **ASKED, **fields).params.structured
        assert found is not None
        assert found == thinker.engine.submitted("/v1/chat/completions", **ASKED, **chat).params.structured


def test_the_models_penalties_do_not_act_in_a_grammar() -> None:
    with http_engine(sampling=SamplingDefaults(repetition_penalty=1.1, frequency_penalty=0.5)) as engine:
        by_name = {"type": "tool", "name": "get_weather"}
        params = engine.submitted(PATH, **ASKED, tools=[TOOL], tool_choice=by_name).params
        assert (params.repetition_penalty, params.frequency_penalty) == (1.0, 0.0)


def test_a_forced_call_ends_with_tool_use_and_one_call_may_be_the_most(thinker: Thinker) -> None:
    with saying(thinker, f"{CALL}\n{CALL}") as engine:
        by_name = {"type": "tool", "name": "get_weather"}
        _, forced = engine.post(PATH, **ASKED, tools=[TOOL], tool_choice=by_name)
        assert forced["stop_reason"] == "tool_use"
        one = {"type": "auto", "disable_parallel_tool_use": True}
        _, single = engine.post(PATH, **ASKED, tools=[TOOL], tool_choice=one)
        assert [block["type"] for block in single["content"]] == ["tool_use"]


def test_tools_of_anthropics_servers_are_left_out(thinker: Thinker, caplog: pytest.LogCaptureFixture) -> None:
    search = {"type": "web_search_20990101", "name": "web_search", "max_uses": 5}
    with caplog.at_level(logging.WARNING, "ssd.http"):
        for _ in range(2):
            assert prompt(thinker, tools=[search, {**TOOL, "type": "custom"}]).count('"name"') == 1
    assert len([line for line in caplog.messages if "web_search_20990101" in line]) == 1


# -- names ----------------------------------------------------------------------------------------------------------


def test_a_name_of_claude_is_the_served_model(thinker: Thinker) -> None:
    with saying(thinker, "Hi.") as engine:
        assert engine.post(PATH, **ASKED, model="claude-opus-9-9")[1]["model"] == "scripted"
        assert engine.post(f"{COUNT}?beta=true", **ASKED, model="claude-haiku-9")[0] == 200
        status, error = engine.post(PATH, **ASKED, model="gpt-9")
        assert (status, error["error"]["type"]) == (404, "not_found_error")


def test_models_have_the_shape_that_a_client_asks_for(thinker: Thinker) -> None:
    asked = {"anthropic-version": "2023-06-01"}
    _, _, content = thinker.engine.ask("GET", "/v1/models?limit=10", headers=asked)
    found = json.loads(content)
    assert (found["has_more"], found["first_id"], found["last_id"]) == (False, "scripted", "scripted")
    _, _, one = thinker.engine.ask("GET", "/v1/models/scripted", headers=asked)
    assert found["data"] == [json.loads(one)]
    assert {name: found["data"][0][name] for name in ("type", "id", "display_name", "max_input_tokens")} == {
        "type": "model",
        "id": "scripted",
        "display_name": "scripted",
        "max_input_tokens": 2048,
    }
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", found["data"][0]["created_at"])
    assert json.loads(thinker.engine.ask("GET", "/v1/models")[2])["object"] == "list"

    assert thinker.engine.ask("GET", "/v1/models/claude-opus-9-9", headers=asked)[::2] == (200, one)
    assert thinker.engine.ask("GET", "/v1/models/claude-opus-9-9")[0] == 404
    status, headers, content = thinker.engine.ask("GET", "/v1/models/nope", headers=asked)
    error = json.loads(content)
    assert (status, error["type"], error["error"]["type"]) == (404, "error", "not_found_error")
    assert error["request_id"] == headers["request-id"]


# -- Claude Code ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_requests_of_claude_code_are_answered(thinker: Thinker, name: str) -> None:
    body = SHAPES[name]
    with saying(thinker, "Hello.") as engine:
        asked = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219", "x-api-key": "none"}
        status, _, content = engine.ask("POST", f"{PATH}?beta=true", body, asked)
        assert status == 200, content
        if body.get("stream"):
            assert b"event: message_stop" in content
        else:
            assert json.loads(content)["content"] == [{"type": "text", "text": "Hello"}]
        counted = {field: body[field] for field in ("model", "messages", "system", "tools") if field in body}
        assert engine.ask("POST", f"{COUNT}?beta=true", counted, asked)[0] == 200
    assert thinker.engine.ask("HEAD", "/")[0] == 200
    assert thinker.engine.ask("POST", "/api/event_logging/batch", {"events": []})[0] == 404


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"messages": []}, "messages"),
        (said({"type": "image", "source": {}}), "image is not supported"),
        (said({"type": "document"}), "messages[0].content[0].type: document"),
        (said(RESULT | {"content": [{"type": "image"}]}), "messages[0].content[0].content[0].type: image"),
        (said({"type": "text"}), "messages[0].content[0].text is required"),
        (said({"type": "tool_use", "name": "f"}, role="assistant"), "messages[0].content[0].id is required"),
        (said({"type": "tool_result"}), "messages[0].content[0].tool_use_id is required"),
        (said({"type": "thinking", "thinking": "a"}), "a message of the role user has no block thinking"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers is not supported"),
        ({"container": "c"}, "container is not supported"),
        ({"n": 2}, "n is not supported here"),
        ({"return_metrics": True}, "return_metrics is not supported here"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: any needs tools"),
        ({"tools": [{**TOOL, "name": ""}]}, "tools[0].name"),
        ({"stop": ["a"] * 64, "stop_sequences": ["b"] * 64}, "stop_sequences and stop have 128 texts"),
        (said(USED | {"input": "Rome"}, role="assistant"), "messages[0].content[0].input"),
        (said(USED | {"input": [1]}, role="assistant"), "messages[0].content[0].input"),
        (said(USED | {"input": 5}, role="assistant"), "messages[0].content[0].input"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name is required"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}}, "there is no 'f'"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema is required"),
        ({"output_format": {"type": "json_schema", "schema": {}}, "response_format": JSON}, "contradict"),
        ({"messages": [{"role": "user", "content": "a " * 10_000}]}, "context"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_cannot_be_answered_is_refused(thinker: Thinker, fields: dict[str, Any], said: str) -> None:
    for path in (PATH, COUNT)[: 1 if said == "context" else 2]:
        status, headers, content = thinker.engine.ask("POST", path, {**ASKED, **fields})
        answer = json.loads(content)
        assert (status, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error"), answer
        assert said in answer["error"]["message"]
        assert answer["request_id"] == headers["request-id"] == headers["x-request-id"]


def test_other_statuses_have_types_of_their_own() -> None:
    with http_engine(ServerConfig(names=("scripted",), port=0, api_keys=("key",))) as engine, answering(engine, [5]):
        for headers, body, status, kind in (
            ({}, ASKED, 401, "authentication_error"),
            ({"x-api-key": "key"}, b" " * 5 * 2**20, 413, "request_too_large"),
            ({"x-api-key": "key", "content-type": "text/plain"}, b"{}", 415, "invalid_request_error"),
        ):
            found, told, content = engine.ask("POST", PATH, body, headers)
            assert (found, json.loads(content)["error"]["type"]) == (status, kind)
            assert json.loads(content)["request_id"] == told["request-id"] == told["x-request-id"]
        found, told, content = engine.ask("GET", PATH, None, {"x-api-key": "key"})
        assert (found, json.loads(content)["request_id"]) == (405, told["request-id"])
        assert engine.ask("POST", PATH, ASKED, {"x-api-key": "key"})[0] == 200


def test_messages_that_say_nothing_are_refused(thinker: Thinker) -> None:
    for path in (PATH, f"{PATH}/count_tokens"):
        status, answer = thinker.engine.post(path, max_tokens=3, messages=[{"role": "system", "content": []}] * 2)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error"), answer


@pytest.mark.parametrize("path", ["/v1/v1/messages", "/messages"])
def test_a_wrong_base_url_gets_a_hint(scripted: HttpEngine, path: str) -> None:
    status, _, content = scripted.ask("GET", path)
    message = json.loads(content)["error"]["message"]
    hint = "; /v1/messages is there (Anthropic's clients take a base URL without /v1)"
    assert status == 404 and message.endswith(hint)
