"""Bodies that the core's doors refuse: each with the parameter that is wrong, and why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from ssd.config.engine import ServerConfig
from tests.frontend.http_engine import HttpEngine
from tests.frontend.tool_model import TEMPLATE, WEATHER, thinking

CHATS, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
Fields = dict[str, Any]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
LARK, GBNF = 'start: a\na: "x"', 'root ::= "x" | "y"'
OTHER = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
TOOLS: Fields = {"tools": [WEATHER, OTHER]}
OLD: Fields = {"functions": [WEATHER["function"]]}
JSON = {"type": "json_object"}


def said(content: object = "a", **message: Any) -> Fields:
    return {"messages": [{"role": "user", "content": content, **message}]}


def only(**message: Any) -> Fields:
    return {"messages": [message]}


def choosing(choice: object, **more: Any) -> Fields:
    return {**TOOLS, "tool_choice": choice, **more}


def wanting(parameters: Any, **more: Any) -> Fields:
    return {"tools": [{"type": "function", "function": {"name": "get_weather", "parameters": parameters, **more}}]}


def formatted(**format: Any) -> Fields:
    return {"response_format": format}


REFUSED: dict[str, list[tuple[str, Fields, str, str]]] = {
    "invalid_value": [
        (COMPLETIONS, {"temperature": "hot"}, "temperature", "temperature: Expected `float"),
        (COMPLETIONS, {"temperature": -1}, "temperature", ">= 0"),
        (CHATS, {"temperature": 5.1}, "temperature", ""),
        (CHATS, {"temperature": "inf"}, "temperature", ""),
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens", "at least 1"),
        (CHATS, {"max_tokens": 0}, "max_tokens", ""),
        (CHATS, {"max_tokens": 16.5}, "max_tokens", ""),
        (CHATS, {"max_tokens": "many"}, "max_tokens", ""),
        (COMPLETIONS, {"logit_bias": {"x": 1}}, "logit_bias", "no token id"),
        (CHATS, {"top_logprobs": 3}, "top_logprobs", ""),
        (CHATS, {"stop": ["x"] * 65}, "stop", ""),
        (COMPLETIONS, {"prompt": ["a", 1]}, "prompt", "a list of texts"),
        (COMPLETIONS, {"prompt": [0] * 1_048_577}, "prompt", "length <= 1048576"),
        (COMPLETIONS, {"prompt": list(range(400)), "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", ""),
        (CHATS, {"messages": []}, "messages", ""),
        (CHATS, only(role="x" * 3000, content="a"), "messages[0].role", "x" * 128),
        (COMPLETIONS, {"echo": True, "stream": True}, "echo", "cannot be streamed"),
        (COMPLETIONS, {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", ""),
        (COMPLETIONS, {"echo": True, "logprobs": 2, "prompt_logprobs": 1}, "prompt_logprobs", ""),
        (CHATS, {"return_origins": True}, "return_origins", ""),
        (COMPLETIONS, {"speculative": {"num_speculative_tokens": 2}}, "speculative", "mode ar"),
        (COMPLETIONS, {"speculative": {"enabled": True}}, "speculative", ""),
        (CHATS, {"guided_grammar": LARK, "structured_outputs": {"grammar": 'start: "y"'}}, "guided_grammar", ""),
        (CHATS, {"format": "json", "guided_json": SCHEMA}, "format", ""),
        (CHATS, {"regex": "a", "ebnf": GBNF}, "ebnf", ""),
        (CHATS, {"guided_json": {"const": True}, "json_schema": {"const": 1}}, "json_schema", ""),
        (CHATS, {"guided_regex": "a", "guided_json": {}}, "guided_regex", ""),
        (CHATS, {**formatted(**JSON), "grammar": "x"}, "grammar", ""),
        (CHATS, {"repeat_penalty": 1.3, "repetition_penalty": 1.2}, "repeat_penalty", ""),
        (CHATS, {"max_tokens": 5, "n_predict": 6}, "n_predict", ""),
        (CHATS, {**OLD, "tool_choice": "auto"}, "tool_choice", ""),
        (CHATS, {**OLD, **TOOLS}, "functions", ""),
        (CHATS, formatted(type="yaml"), "response_format.type", ""),
        (CHATS, {"guided_choice": []}, "guided_choice", ""),
        (CHATS, {"tool_choice": "required"}, "tool_choice", ""),
        (CHATS, {"tools": [OTHER], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", ""),
        (CHATS, choosing("required", guided_regex="a"), "tool_choice", ""),
        (CHATS, choosing("maybe"), "tool_choice", ""),
        (CHATS, choosing({"type": "function", "name": "g"}), "tool_choice", ""),
        (CHATS, {**OLD, "function_call": {"name": "g"}}, "function_call", ""),
        (CHATS, {"function_call": {"name": "g"}}, "function_call", ""),
        (CHATS, {**wanting({"type": "array"}), "tool_choice": "required"}, "tools", ""),
        (CHATS, {"tools": [{**WEATHER, "function": {"name": "f", "description": "x" * 2**20}}]}, "tools", ""),
        (CHATS, {"chat_template_kwargs": {"a": "x" * 70_000}}, "chat_template_kwargs", ""),
        (CHATS, {"chat_template_kwargs": []}, "chat_template_kwargs", ""),
        (TOKENIZE, {"chat_template_kwargs": {"a": "x" * 70_000}}, "chat_template_kwargs", ""),
        (TOKENIZE, {"chat_template_kwargs": []}, "chat_template_kwargs", ""),
    ],
    "invalid_request": [
        (COMPLETIONS, {"min_tokens": 17}, "min_tokens", "min_tokens 17 is more than max_tokens 16"),
        (COMPLETIONS, {"logit_bias": {"49152": 1}}, "logit_bias", "outside of the vocabulary"),
        (COMPLETIONS, {"stop_token_ids": [49152]}, "stop_token_ids", "outside of the vocabulary"),
        (COMPLETIONS, {"prompt": ""}, "prompt", "the prompt is empty"),
        (COMPLETIONS, {"prompt": [49152]}, "prompt", "token id 49152 is outside"),
        (CHATS, {"format": "yaml"}, "format", ""),
        (CHATS, {"guided_regex": "a" * 70_000}, "guided_regex", ""),
        (CHATS, {"guided_json": {"description": "a" * 300_000}}, "guided_json", ""),
        (CHATS, {"guided_json": {"description": "a" * 70_000}}, "guided_json", ""),
        (
            CHATS,
            {**TOOLS, **formatted(type="json_schema", json_schema={"name": "n", "schema": [1]})},
            "response_format",
            "",
        ),
        (CHATS, wanting({"not": {}}, strict=True), "tools", ""),
        (CHATS, {**wanting({"not": {}}, strict=True), "tool_choice": "required"}, "tools", ""),
        (CHATS, {"continue_final_message": True, "add_generation_prompt": True}, "messages", ""),
        (CHATS, {"chat_template_kwargs": {"messages": []}}, "messages", ""),
        (TOKENIZE, {"continue_final_message": True, "add_generation_prompt": True}, "messages", ""),
        (TOKENIZE, {"chat_template_kwargs": {"messages": []}}, "messages", ""),
    ],
    "missing_parameter": [
        (CHATS, said(None), "messages[0].content", ""),
        (CHATS, only(role="tool", tool_call_id="c1"), "messages[0].content", ""),
        (CHATS, only(role="function", name="f"), "messages[0].content", ""),
        (CHATS, only(role="assistant", tool_calls=[{"id": "x"}]), "messages[0].tool_calls[0].function", ""),
        (CHATS, formatted(type="grammar"), "response_format.grammar", ""),
        (CHATS, formatted(type="json_schema"), "response_format.json_schema", ""),
        (CHATS, formatted(type="json_schema", json_schema={}), "response_format.json_schema.schema", ""),
        (CHATS, choosing({"type": "allowed_tools"}), "tool_choice.allowed_tools", ""),
        (CHATS, choosing({"type": "function"}), "tool_choice.function", ""),
        (CHATS, {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", ""),
    ],
    "context_length_exceeded": [
        (COMPLETIONS, {"prompt": [1] * 256}, "prompt", "256 tokens; the context of 256"),
        (COMPLETIONS, {"prompt": "a " * 20000}, "prompt", "the context of 256 tokens cannot hold it"),
        (COMPLETIONS, {"prompt": "a " * 1000}, "prompt", "1001 tokens; the context of 256"),
        (COMPLETIONS, {"prompt": "one " * 400, "truncate_prompt_tokens": 256}, "prompt", ""),
        (CHATS, said("a " * 1000), "messages", ""),
        (CHATS, said("a " * 400), "messages", ""),
    ],
    "unsupported_parameter": [
        (CHATS, said([{"type": "image_url", "image_url": {"url": "data:"}}]), "messages[0].content[0].type", ""),
        (CHATS, {"mirostat": 2}, "mirostat", ""),
        (CHATS, {"use_beam_search": 2}, "use_beam_search", ""),
        (CHATS, {"best_of": 2}, "best_of", ""),
        (CHATS, {"best_of": "1"}, "best_of", ""),
        (CHATS, formatted(type="structural_tag", format={}), "response_format.format", ""),
        (CHATS, {"modalities": ["text", "audio"]}, "modalities", ""),
        (CHATS, {"web_search_options": {}}, "web_search_options", ""),
        (CHATS, {"chat_template": "{{ messages }}"}, "chat_template", ""),
        (CHATS, {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type", ""),
        (COMPLETIONS, {"suffix": "x"}, "suffix", ""),
        (COMPLETIONS, {"best_of": 2}, "best_of", ""),
        (COMPLETIONS, {"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", ""),
        (COMPLETIONS, {"dynatemp_range": 1.1}, "dynatemp_range", ""),
        (COMPLETIONS, {"use_beam_search": True}, "use_beam_search", ""),
        (CHATS, {"samplers": [], "dynatemp_range": 0.5}, "dynatemp_range", ""),
    ],
}


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpEngine]:
    server = ServerConfig(names=("scripted", "alias"), port=0)
    with thinking(tmp_path_factory.mktemp("refusing"), TEMPLATE, server=server) as thinker:
        yield thinker.engine


CASES = [pytest.param(code, *row, id=f"{row[2]}-{str(row[1])[:50]}") for code in REFUSED for row in REFUSED[code]]


@pytest.mark.parametrize(("code", "path", "fields", "param", "words"), CASES)
def test_what_is_wrong_is_refused_and_named(
    refusing: HttpEngine, code: str, path: str, fields: Fields, param: str, words: str
) -> None:
    body = {"prompt": "a"} if path == COMPLETIONS else said()
    status, answer = refusing.post(path, **{"model": "scripted", **body, **fields})
    assert status == 400 and set(answer["error"]) == {"message", "type", "param", "code"}, answer
    assert (answer["error"]["param"], answer["error"]["code"]) == (param, code), answer
    assert words in answer["error"]["message"]
    assert code != "unsupported_parameter" or "not supported" in answer["error"]["message"]


@pytest.mark.parametrize(("field", "neutral"), [("mirostat", "0"), ("use_beam_search", "false"), ("best_of", "1")])
def test_a_refusal_says_which_value_asks_for_nothing(refusing: HttpEngine, field: str, neutral: str) -> None:
    status, answer = refusing.post(CHATS, **said(), **{field: 2})
    assert status == 400 and answer["error"]["message"] == f"{field} is not supported, but for {neutral}"


def test_a_model_that_is_not_served_is_not_found(refusing: HttpEngine) -> None:
    status, answer = refusing.post(COMPLETIONS, model="other", prompt="a")
    assert (status, answer["error"]["param"]) == (404, "model")
    assert "'other' is not served here; scripted, alias is" in answer["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"\xff", b'{"model": "\xff"}', b"[" * 100_000, b"null", b'{"model": NaN}'],
    ids=lambda body: str(body[:20]),
)
def test_a_body_that_is_no_json_is_refused(refusing: HttpEngine, body: bytes) -> None:
    status, _, content = refusing.ask("POST", COMPLETIONS, body)
    assert status == 400 and "error" in json.loads(content)


@pytest.mark.parametrize("field", ['"tools": "%s"', '"tools": ["%s"]', '"chat_template_kwargs": {"a": "%s"}'])
def test_bytes_that_are_no_text_are_refused_in_any_field(refusing: HttpEngine, field: str) -> None:
    body = json.dumps(said())[:-1].encode() + b", " + field.encode() % b"\xff" + b"}"
    status, _, content = refusing.ask("POST", CHATS, body)
    assert (status, json.loads(content)["error"]["code"]) == (400, "invalid_json")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"x" * 3000: 1}}),
        (COMPLETIONS, {"prompt": "a", "model": "x" * 250}),
        (CHATS, only(role="x" * 3000, content="a")),
    ],
    ids=["token", "model", "role"],
)
def test_an_error_repeats_128_characters_of_a_name(refusing: HttpEngine, path: str, body: Fields) -> None:
    status, _, content = refusing.ask("POST", path, body)
    assert status in (400, 404) and b"x" * 128 in content and b"x" * 129 not in content
