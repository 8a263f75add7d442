"""Bodies as editors and chat programs send them, by their public sources: each is answered, streamed where it asks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from tests.frontend.http_engine import HttpEngine, answering, http_engine

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Sent(NamedTuple):
    """A request of a program: the path, its body, and the headers that it adds."""

    path: str
    body: dict[str, Any]
    headers: Mapping[str, str] = MappingProxyType({})


def function(name: str, properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*properties][:1], **more}
    return {"name": name, "description": f"The tool {name}.", "parameters": parameters}


def tool(name: str, properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": function(name, properties, **more)}


TEXT = {"type": "string"}
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
USER = {"role": "user", "content": "Why is the sky blue?"}
READ = tool("read_file", {"path": TEXT}, additionalProperties=False)
SCHEMA_URI = {"$schema": "http://json-schema.org/draft-07/schema#"}

SENT: dict[str, Sent] = {
    # An editor's chat: content as parts, tools, the limit by its older name.
    "Continue": Sent(
        CHATS,
        {
            "model": "scripted",
            "messages": [SYSTEM, {"role": "user", "content": [{"type": "text", "text": "Explain this."}]}],
            "max_tokens": 4096,
            "temperature": 0.5,
            "stream": True,
            "tools": [tool("builtin_read_file", {"filepath": TEXT})],
            "parallel_tool_calls": False,
        },
    ),
    # An editor's completion of a line as a raw prompt, with many stops.
    "Continue, autocomplete": Sent(
        COMPLETIONS,
        {
            "model": "scripted",
            "prompt": "<|fim_prefix|>def f(x):\n    <|fim_suffix|>\n<|fim_middle|>",
            "max_tokens": 256,
            "temperature": 0.01,
            "stream": True,
            "stop": [f"<|mark_{n}|>" for n in range(16)] + ["/src/", "#- coding: utf-8", "```", "\n\n"],
        },
    ),
    "Cline": Sent(
        CHATS,
        {
            "model": "scripted",
            "messages": [
                {"role": "system", "content": "You are Cline, a skilled software engineer."},
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "<task>Fix it</task>"}, {"type": "text", "text": "env"}],
                },
                {
                    "role": "assistant",
                    "content": [{"type": "text", "text": "<read_file><path>a.py</path></read_file>"}],
                },
                {"role": "user", "content": [{"type": "text", "text": "[read_file] Result:"}]},
            ],
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    # Native tools; a history whose assistant says nothing beside its calls.
    "Roo Code": Sent(
        CHATS,
        {
            "model": "scripted",
            "messages": [
                SYSTEM,
                USER,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "call_1",
                            "type": "function",
                            "function": {"name": "read_file", "arguments": '{"path":"a"}'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "print()"}]},
            ],
            "temperature": 0.6,
            "stream": True,
            "stream_options": {"include_usage": True},
            "tools": [{**READ, "function": {**READ["function"], "strict": True}}],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "max_completion_tokens": 8192,
        },
    ),
    "Zed": Sent(
        CHATS,
        {
            "model": "scripted",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Refactor"}]}],
            "stream": True,
            "max_completion_tokens": 2048,
            "stop": [],
            "temperature": 1.0,
            "tools": [
                tool(
                    "grep", {"regex": TEXT, "page": {"type": "integer", "format": "uint32", "minimum": 0}}, **SCHEMA_URI
                )
            ],
            "prompt_cache_key": "thread-1",
            "reasoning_effort": "medium",
        },
    ),
    # A tool without `type` of its choice in a flat form, as the Responses API has it.
    "Cursor": Sent(
        CHATS,
        {
            "model": "scripted",
            "messages": [SYSTEM, {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "user": "google-oauth2|1",
            "metadata": {"cursorConversationId": "1"},
            "tools": [READ],
            "tool_choice": "auto",
            "temperature": 1,
        },
    ),
    "JetBrains AI Assistant": Sent(
        CHATS,
        {
            "model": "scripted",
            "messages": [SYSTEM, USER],
            "stream": True,
            "temperature": 0.0,
            "top_p": 1.0,
            "n": 1,
            "max_tokens": 2048,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "response_format": {"type": "text"},
            "logit_bias": {},
        },
    ),
    "Copilot, own model": Sent(
        CHATS,
        {
            "model": "scripted",
            "messages": [SYSTEM, {**USER, "name": "user"}],
            "stream": True,
            "temperature": 0.1,
            "top_p": 1,
            "n": 1,
            "max_tokens": 4096,
            "tools": [tool("run_in_terminal", {"command": TEXT, "isBackground": {"type": "boolean"}})],
            "tool_choice": {"type": "function", "function": {"name": "run_in_terminal"}},
            "stream_options": {"include_usage": True},
            "thinking_budget": 1024,
        },
    ),
    "Open WebUI": Sent(
        CHATS,
        {
            "model": "scripted",
            "messages": [USER],
            "stream": True,
            "stream_options": {"include_usage": True},
            "session_id": "s",
            "chat_id": "c",
            "id": "m",
            "background_tasks": {"title_generation": True, "tags_generation": True},
            "features": {"image_generation": False, "web_search": False},
            "variables": {"{{USER_NAME}}": "Ann"},
            "params": {},
            "tool_servers": [],
        },
    ),
    "LibreChat": Sent(
        CHATS,
        {
            "model": "scripted",
            "user": "65f",
            "stream": True,
            "temperature": 1,
            "top_p": 1,
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "stop": ["||>", "\nUser:", "<|diff_marker|>"],
            "messages": [{"role": "user", "content": "Hi", "_getType": "human"}],
            "max_tokens": None,
        },
    ),
    # llama.cpp's names, the values that mean nothing among them.
    "Jan": Sent(
        CHATS,
        {
            "model": "scripted",
            "messages": [SYSTEM, USER],
            "stream": True,
            "temperature": 0.7,
            "top_k": 20,
            "top_p": 0.8,
            "repeat_penalty": 1.12,
            "repeat_last_n": 64,
            "cache_prompt": True,
            "timings_per_token": True,
            "max_tokens": -1,
            "stop": [],
        },
    ),
    # A client of LM Studio: no limit as -1, a schema without a word on other keys.
    "LM Studio's clients": Sent(
        CHATS,
        {
            "model": "scripted",
            "messages": [USER],
            "temperature": 0.7,
            "max_tokens": -1,
            "stream": False,
            "ttl": 300,
            "draft_model": "draft",
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "jokes",
                    "strict": "true",
                    "schema": {"type": "object", "properties": {"joke": TEXT}, "required": ["joke"]},
                },
            },
        },
    ),
    # A program that repairs its own history: objects as arguments, calls without a type, texts as parts.
    "AnythingLLM": Sent(
        CHATS,
        {
            "model": "scripted",
            "temperature": "0.7",
            "max_tokens": "1024",
            "messages": [
                SYSTEM,
                {"role": "user", "content": ["Look it up."]},
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "rag-memory", "arguments": {"action": "search"}}}],
                },
                {"role": "function", "name": "rag-memory", "content": "Nothing."},
            ],
            "functions": [function("rag-memory", {"action": {"type": "string", "enum": ["search", "store"]}})],
        },
    ),
    "SillyTavern": Sent(
        COMPLETIONS,
        {
            "model": "scripted",
            "prompt": "### Instruction:\nWrite.\n### Response:",
            "max_new_tokens": 200,
            "max_tokens": 200,
            "n_predict": 200,
            "temperature": 2.5,
            "temperature_last": True,
            "top_p": 1,
            "typical_p": 1,
            "typical": 1,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "repeat_penalty": 1.1,
            "rep_pen": 1.1,
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "top_k": 0,
            "min_tokens": 0,
            "add_bos_token": True,
            "truncation_length": 8192,
            "ban_eos_token": False,
            "skip_special_tokens": True,
            "mirostat_tau": 5,
            "mirostat_eta": 0.1,
            "mirostat": 0,
            "tfs_z": 1,
            "dry_multiplier": 0,
            "dry_base": 1.75,
            "dry_allowed_length": 2,
            "dry_sequence_breakers": ["\n", ":"],
            "xtc_probability": 0,
            "xtc_threshold": 0.1,
            "dynatemp_range": 0,
            "dynatemp_exponent": 1,
            "samplers": ["top_k", "top_p", "min_p", "temperature"],
            "grammar": "",
            "json_schema": None,
            "ignore_eos": False,
            "seed": -1,
            "stop": [f"\n{name}:" for name in "abcdefghijklmnopqrstuvw"],
            "stream": True,
            "cache_prompt": True,
            "speculative_ngram": True,
        },
    ),
    "big-AGI": Sent(
        CHATS,
        {
            "model": "scripted",
            "messages": [{"role": "developer", "content": "Be short."}, USER],
            "temperature": 0.5,
            "max_completion_tokens": 4096,
            "n": 1,
            "stream": True,
            "stream_options": {"include_usage": True},
            "tools": [tool("f", {"a": {"type": "array", "items": TEXT, "uniqueItems": True}})],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"name": "f"}]}},
        },
        {"origin": "http://localhost:3000"},
    ),
    "Aider": Sent(
        CHATS,
        {
            "model": "scripted",
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}]},
                {**USER, "cache_control": {"type": "ephemeral"}},
            ],
            "stream": True,
            "temperature": 0,
            "extra_headers": {"a": "b"},
        },
    ),
    # Whole numbers with a fraction, as JSON of other languages has them, and a tool whose schema forbids by `not`.
    "Home Assistant": Sent(
        CHATS,
        {
            "model": "scripted",
            "messages": [SYSTEM, USER],
            "max_tokens": 150.0,
            "top_p": 1.0,
            "temperature": 1.0,
            "top_k": 40.0,
            "user": "01J",
            "tools": [
                tool(
                    "HassTurnOn",
                    {"area": TEXT, "domain": {"type": "array", "items": TEXT}},
                    **{"not": {"required": ["x"]}},
                )
            ],
            "tool_choice": "any",
        },
    ),
    "n8n, LangChain": Sent(
        CHATS + "/",
        {
            "model": "scripted",
            "messages": [SYSTEM, USER],
            "temperature": 0.7,
            "top_p": 1,
            "frequency_penalty": 0,
            "presence_penalty": 0,
            "n": 1,
            "stream": False,
            "tools": [tool("search", {"input": TEXT}, additionalProperties=False, **SCHEMA_URI)],
            "parallel_tool_calls": False,
            "response_format": {"type": "text"},
            "stream_options": None,
        },
    ),
}


@pytest.fixture(scope="module")
def http() -> Iterator[HttpEngine]:
    with http_engine(max_model_len=4096) as engine, answering(engine, [35, 28120]):
        yield engine


def test_they_are_eighteen() -> None:
    assert len(SENT) == 18
    assert len({frozenset(sent.body) for sent in SENT.values()}) == 18


@pytest.mark.parametrize("program", SENT)
def test_a_body_is_answered(http: HttpEngine, program: str) -> None:
    sent = SENT[program]
    status, headers, content = http.ask("POST", sent.path, sent.body, dict(sent.headers))
    assert status == 200, content
    if sent.body.get("stream"):
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
