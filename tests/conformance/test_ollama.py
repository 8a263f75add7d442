"""Ollama's Python client. The tiny caller always says the same, the built-in pair obeys a schema."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

pytest.importorskip("ollama")
import ollama

WEATHER = [{"role": "user", "content": "How is the weather?"}]
ZERO = {"temperature": 0}


def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name

    Returns:
        str: how it is
    """
    return "Sunny"


def test_a_model_calls_tools_whole_and_streamed(caller: str) -> None:
    client = ollama.Client(caller)
    for stream in (False, True):
        messages: list[Any] = list(WEATHER)
        answer = client.chat("caller", messages, tools=[get_weather], think=True, stream=stream, options=ZERO)
        parts = [answer] if isinstance(answer, ollama.ChatResponse) else list(answer)
        assert "".join(part.message.thinking or "" for part in parts) == "The user wants weather."
        assert "".join(part.message.content or "" for part in parts).strip() == "Let me see."
        calls = [call for part in parts for call in part.message.tool_calls or ()]
        assert [(call.function.name, call.function.arguments["city"]) for call in calls] == [
            ("get_weather", "Rome"),
            ("get_weather", "Oslo"),
        ]
        messages.append({"role": "assistant", "content": "Let me see.", "tool_calls": calls})
        for call in calls:
            said = get_weather(**call.function.arguments)
            messages.append({"role": "tool", "tool_name": call.function.name, "content": said})
        last = client.chat("caller", messages, tools=[get_weather])
        assert last.message.content == "It is sunny." and last.done_reason == "stop"


def test_a_chat_is_what_other_doors_say(server: str) -> None:
    import openai

    client, options = ollama.Client(server), {**ZERO, "num_predict": 12}
    whole = client.chat("smollm2", WEATHER, options=options)
    parts = list(client.chat("smollm2:latest", WEATHER, options=options, stream=True))
    assert "".join(part["message"]["content"] for part in parts) == whole.message.content
    assert (whole.done_reason, whole.eval_count, parts[-1].eval_count) == ("length", 12, 12)
    assert whole.prompt_eval_count and whole.eval_duration and whole.total_duration
    other = openai.OpenAI(base_url=f"{server}/v1", api_key="none").chat.completions.create(
        model="smollm2:latest", messages=WEATHER, temperature=0, max_tokens=12
    )
    assert other.choices[0].message.content == whole.message.content

    async def ask() -> str:
        stream = await ollama.AsyncClient(server).chat("smollm2", WEATHER, options=options, stream=True)
        return "".join([part.message.content or "" async for part in stream])

    assert asyncio.run(ask()) == whole.message.content


def test_generate_answers_and_continues(server: str) -> None:
    client, options = ollama.Client(server), {**ZERO, "num_predict": 8}
    answer = client.generate("smollm2", WEATHER[0]["content"], options=options, logprobs=True, top_logprobs=2)
    assert answer.response == client.chat("smollm2", WEATHER, options=options).message.content
    assert answer.logprobs and len(answer.logprobs) == 8 and len(answer.logprobs[0].top_logprobs or ()) == 2
    raw = client.generate("smollm2", "The capital of France is", raw=True, options=options)
    parts = client.generate("smollm2", "The capital of France is", raw=True, options=options, stream=True)
    assert "".join(part.response or "" for part in parts) == raw.response and "Paris" in str(raw.response)
    assert client.generate("smollm2").done_reason == "load"


def test_a_format_is_obeyed(server: str) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["name", "age"],
    }
    asked = [{"role": "user", "content": "Bob is 7 years old. Answer in JSON."}]
    answer = ollama.Client(server).chat("smollm2", asked, format=schema, options=ZERO)
    found = json.loads(answer.message.content or "")
    assert found["name"] in ("Ann", "Bob") and 1 <= found["age"] <= 9


def test_lists_and_descriptions(server: str, caller: str) -> None:
    client = ollama.Client(server)
    (listed,) = client.list().models
    (loaded,) = client.ps().models
    assert listed.model == loaded.model == "smollm2:latest" and listed.details and listed.size
    assert (listed.details.family, listed.details.parameter_size) == ("llama", "134.5M")
    shown = client.show(str(listed.model))
    assert shown.capabilities == ["completion", "tools"] and shown.modelinfo
    assert shown.modelinfo["general.architecture"] == "llama" and shown.modelinfo["llama.context_length"] > 0
    assert ollama.Client(caller).show("caller").capabilities == ["completion", "tools", "thinking"]


def test_what_is_not_there_is_refused(server: str) -> None:
    client = ollama.Client(server)
    for ask, status, words in (
        (lambda: client.chat("nonesuch", WEATHER), 404, "nonesuch"),
        (lambda: list(client.chat("nonesuch", WEATHER, stream=True)), 404, "nonesuch"),
        (lambda: client.chat("smollm2", WEATHER, think=True), 400, "does not support thinking"),
        (lambda: client.chat("smollm2", [{**WEATHER[0], "images": ["aGk="]}]), 400, "images"),
        (lambda: client.pull("nonesuch"), 404, "/api/pull"),
        (lambda: client.delete("smollm2"), 404, "/api/delete"),
    ):
        with pytest.raises(ollama.ResponseError, match=words) as caught:
            ask()
        assert caught.value.status_code == status
