"""Tools with the `openai` client, against a model that calls them: speculation commits several tokens at once."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest

from tests.conformance.repeating import ANSWERS
from tests.first_messages import CREWAI, OPEN_WEBUI

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
ASKED: dict[str, Any] = {"model": "caller", "temperature": 0, "tools": TOOLS, "max_tokens": 100}
MESSAGES: list[Any] = [{"role": "user", "content": "How is the weather in Rome and Oslo?"}]


@pytest.fixture
def client(caller: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{caller}/v1", api_key="none", max_retries=0)


def weather(call: Any) -> str:
    assert call.type == "function" and call.function.name == "get_weather"
    return f"Sunny in {json.loads(call.function.arguments)['city']}"


def test_an_agent_asks_its_tools_and_answers(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(messages=MESSAGES, **ASKED)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    assert choice.message.reasoning_content == "The user wants weather."  # type: ignore[attr-defined]
    calls = choice.message.tool_calls or []
    assert [weather(call) for call in calls] == ["Sunny in Rome", "Sunny in Oslo"]
    results = [{"role": "tool", "tool_call_id": call.id, "content": weather(call)} for call in calls]
    last = client.chat.completions.create(messages=[*MESSAGES, choice.message, *results], **ASKED)
    assert last.choices[0].message.content == "It is sunny." and last.choices[0].finish_reason == "stop"


def test_a_stream_has_the_same_calls(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(messages=MESSAGES, stream=True, **ASKED))
    assert len(chunks) < sum(map(len, ANSWERS.values())) / 2, "no chunk has several tokens"
    deltas = [chunk.choices[0].delta for chunk in chunks]
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [weather(call) for call in calls] == ["Sunny in Rome", "Sunny in Oslo"]
    assert [call.index for call in calls] == [0, 1]
    assert "".join(delta.content or "" for delta in deltas) == "Let me see."
    assert "".join(getattr(delta, "reasoning_content", "") or "" for delta in deltas) == "The user wants weather."
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_the_clients_own_stream_helper_puts_calls_together(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(messages=MESSAGES, **ASKED) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.done" in kinds
    assert [weather(call) for call in message.tool_calls or []] == ["Sunny in Rome", "Sunny in Oslo"]


def test_one_call_at_a_time(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(messages=MESSAGES, parallel_tool_calls=False, **ASKED)
    assert len(answer.choices[0].message.tool_calls or []) == 1


BY_NAME: dict[str, Any] = {"type": "function", "function": {"name": "get_weather"}}
CITIES = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (BY_NAME, "stop")])
def test_a_model_that_knows_no_tools_is_made_to_call_one(server: str, choice: Any, reason: str) -> None:
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)
    tool = {**TOOLS[0]["function"], "parameters": CITIES}
    asked = {**ASKED, "model": "smollm2", "tools": [{"type": "function", "function": tool}], "temperature": 1}
    for seed in range(3):
        answer = client.chat.completions.create(
            messages=MESSAGES, tool_choice=choice, parallel_tool_calls=False, seed=seed, **asked
        )
        (one,) = answer.choices
        (call,) = one.message.tool_calls or ()
        assert weather(call) in ("Sunny in Rome", "Sunny in Oslo")
        assert one.message.content is None and one.finish_reason == reason


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("body", [OPEN_WEBUI, CREWAI], ids=["Open WebUI", "CrewAI"])
def test_the_first_message_of_a_program_with_tools_is_answered(
    server: str, body: dict[str, Any], streams: bool
) -> None:
    """By the built-in model, whose chat template has no place for tools: in words, or by calls that fit."""
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)
    asked = {"max_tokens": 100, **{key: value for key, value in body.items() if not key.startswith("stream")}}
    answer = client.chat.completions.create(model="smollm2", stream=streams, **asked)
    parts = [chunk.choices[0].delta for chunk in answer] if streams else [answer.choices[0].message]
    calls = [call for part in parts for call in part.tool_calls or ()]
    assert "".join(part.content or "" for part in parts) or calls
    parameters = {tool["function"]["name"]: tool["function"]["parameters"] for tool in body["tools"]}
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), parameters[call.function.name])
