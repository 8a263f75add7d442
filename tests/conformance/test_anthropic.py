"""The `anthropic` client: messages whole and streamed, tools, thoughts, counts, models, errors."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest

from tests.conformance.conftest import launched

TOOL: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather in a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
QUESTION: dict[str, Any] = {"role": "user", "content": "How is the weather?"}


def client(url: str, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)


def test_a_message_is_the_same_streamed_or_not(server: str) -> None:
    given: dict[str, Any] = {
        "model": "smollm2",
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": "Name three colours."}],
        "max_tokens": 24,
    }
    whole = client(server).messages.create(**given)
    (block,) = whole.content
    assert block.type == "text" and whole.stop_reason in ("max_tokens", "end_turn")
    with client(server).messages.stream(**given) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == block.text and final.content[0].text == text  # type: ignore[union-attr]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    counted = client(server).messages.count_tokens(model="smollm2", system=given["system"], messages=given["messages"])
    for usage in (whole.usage, final.usage):
        assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_tools_and_thoughts_go_round(caller: str) -> None:
    given: dict[str, Any] = {"model": "claude-opus-4-8", "max_tokens": 300, "tools": [TOOL]}
    asked = client(caller)
    first = asked.messages.create(messages=[QUESTION], **given)
    assert first.stop_reason == "tool_use" and first.model == "caller"
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
    calls = [block for block in first.content if block.type == "tool_use"]
    assert [call.input for call in calls] == [{"city": "Rome"}, {"city": "Oslo"}]
    with asked.messages.stream(messages=[QUESTION], **given) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    assert {"thinking", "signature", "text", "input_json", "content_block_stop", "message_stop"} <= kinds
    nameless = [[block.model_dump(exclude={"id"}) for block in message.content] for message in (first, final)]
    assert nameless[0] == nameless[1]
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "Sunny"} for call in calls]
    history: list[Any] = [
        QUESTION,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": results},
    ]
    last = asked.messages.create(messages=history, **given)
    assert (last.content[-1].text, last.stop_reason) == ("It is sunny.", "end_turn")  # type: ignore[union-attr]


def test_a_schema_is_obeyed(server: str) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    answer = client(server).messages.create(
        model="smollm2",
        max_tokens=100,
        messages=[{"role": "user", "content": "Bob is 7 years old. Answer in JSON."}],
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    found = json.loads(answer.content[0].text)  # type: ignore[union-attr]
    assert found["name"] in ("Ann", "Bob") and 1 <= found["age"] <= 9


def test_models(server: str) -> None:
    (model,) = client(server).models.list()
    assert (model.id, model.type) == ("smollm2", "model") and model.created_at.year > 2000
    assert client(server).models.retrieve("smollm2").display_name == "smollm2"


@pytest.mark.mock
def test_errors_are_the_clients_own(server: str) -> None:
    given: dict[str, Any] = {"model": "smollm2", "max_tokens": 8, "messages": [QUESTION]}
    with pytest.raises(anthropic.NotFoundError, match="not served here"):
        client(server).messages.create(**{**given, "model": "gpt-9"})
    image = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    with pytest.raises(anthropic.BadRequestError, match="image is not supported") as caught:
        client(server).messages.create(**{**given, "messages": [{"role": "user", "content": [image]}]})
    assert caught.value.request_id and caught.value.body["error"]["type"] == "invalid_request_error"  # type: ignore
    options = ("--load-format", "mock", "--max-open-requests", "1")
    with launched(*options, SSD_MOCK_ROUND_MS="20", SSD_API_KEY="sesame") as url:
        with pytest.raises(anthropic.AuthenticationError):
            client(url, "wrong").messages.create(**given)
        asked = client(url, "sesame")
        given["model"] = next(iter(asked.models.list())).id
        with asked.messages.create(**{**given, "max_tokens": 2000}, stream=True) as held:
            next(iter(held))
            with pytest.raises(anthropic.RateLimitError):
                asked.messages.create(**given)
