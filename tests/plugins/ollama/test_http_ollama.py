"""Ollama's interface: `/api/chat`, `/api/generate` and what clients ask beside them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from ssd.config.engine import ServerConfig
from ssd.config.params import SamplingDefaults
from ssd.ipc.listening import listen
from ssd.ipc.messages import Emission
from ssd.models.checkpoint import inspect
from ssd.plugins.ollama.ollama import described
from tests.frontend.http_engine import HttpEngine, http_engine
from tests.frontend.test_http_tools import PLACE, ROLES
from tests.frontend.tool_model import CALL, WEATHER, Thinker, model, saying, thinking
from tests.scripted_engine import MODEL, engine_config, gateway_thread, scripted_engine

CHAT, GENERATE = "/api/chat", "/api/generate"
USER = {"role": "user", "content": "Why?"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ASKED: dict[str, Any] = {"model": "scripted", "messages": [USER]}


def lines(engine: HttpEngine, path: str, **body: Any) -> list[dict[str, Any]]:
    """Every line of a stream, the default. Only the last one is done."""
    status, headers, content = engine.ask("POST", path, body)
    assert status == 200 and headers["content-type"] == "application/x-ndjson", content
    *parts, rest = content.decode().split("\n")
    found = [json.loads(part) for part in parts]
    assert rest == "" and [one["done"] for one in found] == [False] * (len(found) - 1) + [True]
    assert all(datetime.fromisoformat(one["created_at"]).tzinfo for one in found)
    return found


# -- answers --------------------------------------------------------------------------------------------------------


def test_a_chat_has_thoughts_text_and_calls_with_objects_as_arguments(thinker: Thinker) -> None:
    spread = CALL.replace("{", "{\n").replace("city", "ci\\u0074y")
    with saying(thinker, f"<think>Hm.\n\nSo.</think>See:\n{spread}\n{CALL}") as engine:
        status, whole = engine.post(CHAT, **ASKED, tools=[WEATHER], stream=False)
        assert status == 200, whole
        streamed = lines(engine, CHAT, **ASKED, tools=[WEATHER])
    message = whole["message"]
    assert (message["role"], message["thinking"], message["content"]) == ("assistant", "Hm.\n\nSo.", "See:")
    called = {"name": "get_weather", "arguments": {"city": "São Paulo"}}
    assert [call["function"] for call in message["tool_calls"]] == [called, called]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert (whole["model"], whole["done"], whole["done_reason"]) == ("scripted", True, "stop")

    parts = [one["message"] for one in streamed]
    assert "".join(part.get("thinking", "") for part in parts) == message["thinking"]
    assert "".join(part["content"] for part in parts) == message["content"]
    calls = [call["function"] for part in parts for call in part.get("tool_calls", ())]
    assert calls == [called, called] and parts[-1] == {"role": "assistant", "content": ""}
    assert {name for name in streamed[-1] if name != "message"} == {name for name in whole if name != "message"}


def test_the_last_line_has_counts_and_times_above_0(thinker: Thinker) -> None:
    with saying(thinker, "One two three four.") as engine:
        *_, last = lines(engine, CHAT, **ASKED, options={"num_predict": 2})
        _, whole = engine.post(CHAT, **ASKED, options={"num_predict": -1}, stream=False)
    assert (last["done_reason"], last["eval_count"]) == ("length", 2)
    assert (whole["done_reason"], whole["message"]["content"]) == ("stop", "One two three four.")
    assert whole["prompt_eval_count"] == len(thinker.tokenizer.encode("<user>Why?<assistant>"))
    for one in (last, whole):
        assert all(one[f"{name}_duration"] >= 1 for name in ("total", "prompt_eval", "eval"))


def test_generate_answers_a_text_as_a_chat_or_continues_it_raw(thinker: Thinker) -> None:
    with saying(thinker, "<think>Hm.</think>Blue.") as engine:
        _, whole = engine.post(GENERATE, prompt="Why?", stream=False)
        parts = lines(engine, GENERATE, prompt="Why?")
        _, raw = engine.post(GENERATE, prompt="Why?", raw=True, stream=False)
        assert "".join(one["response"] for one in lines(engine, GENERATE, prompt="Why?", raw=True)) == raw["response"]
    assert (whole["thinking"], whole["response"], whole["model"]) == ("Hm.", "Blue.", "scripted")
    assert "".join(one.get("thinking", "") for one in parts) == "Hm." and "message" not in whole
    assert "".join(one["response"] for one in parts) == "Blue."
    assert raw["response"] == "<think>Hm.</think>Blue." and "thinking" not in raw
    assert thinker.prompt(GENERATE, prompt="Why?", system="Be brief.") == "<system>Be brief.<user>Why?<assistant>"
    assert thinker.prompt(GENERATE, prompt="Why?", system="Be brief.", raw=True) == "Why?"


def test_log_probabilities_are_those_of_a_chat(thinker: Thinker) -> None:
    asked = {"logprobs": True, "top_logprobs": 1}
    with saying(thinker, "One two.") as engine:
        _, chat = engine.post("/v1/chat/completions", messages=[USER], **asked)
        expected = chat["choices"][0]["logprobs"]["content"]
        _, whole = engine.post(CHAT, **ASKED, **asked, stream=False)
        _, raw = engine.post(GENERATE, prompt="x", raw=True, stream=False, **asked)
        held = {"options": {"stop": ["One two.!"]}}  # no text comes before the end
        for more in ({}, held):
            told = [entry for one in lines(engine, CHAT, **ASKED, **asked, **more) for entry in one.get("logprobs", ())]
            assert told == expected
        assert not any("logprobs" in one for one in lines(engine, CHAT, **ASKED))
    assert expected and whole["logprobs"] == raw["logprobs"] == expected


@pytest.mark.parametrize(("path", "body"), [(CHAT, {}), (CHAT, {"messages": []}), (GENERATE, {"prompt": ""})])
def test_without_a_prompt_the_model_is_only_loaded(thinker: Thinker, path: str, body: dict[str, Any]) -> None:
    status, answer = thinker.engine.post(path, model="scripted", keep_alive="5m", **body)
    assert (status, answer["done"], answer["done_reason"]) == (200, True, "load")
    assert answer["message" if path == CHAT else "response"] in ("", {"role": "assistant", "content": ""})


def test_an_error_in_the_middle_is_a_line(thinker: Thinker) -> None:
    connection = thinker.engine.begin(CHAT, **ASKED)
    target = thinker.engine.engine.target
    request = target.next_submit().request
    target.step(Emission(request, thinker.tokenizer.encode("One")))
    answer = connection.getresponse()
    assert json.loads(answer.readline())["message"]["content"] == "One"
    target.step(Emission(request, [], finish_reason="error", error="it broke"))
    assert json.loads(answer.read()) == {"error": "it broke"}


def test_a_model_without_chat_continues_texts(tmp_path: Path) -> None:
    tokenizer = model(tmp_path, "")
    (tmp_path / "chat_template.jinja").unlink()
    with http_engine(target=str(tmp_path)) as engine:
        thinker = Thinker(engine, tokenizer)
        assert thinker.prompt(GENERATE, prompt="Once") == "Once"
        status, answer = engine.post(CHAT, messages=[USER])
        assert status == 400 and "chat template" in answer["error"]
        assert engine.post("/api/show")[1]["capabilities"] == ["completion"]


# -- requests -------------------------------------------------------------------------------------------------------


def test_options_are_sampling_parameters(thinker: Thinker) -> None:
    options = {"temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 7, "num_predict": 5, "stop": ["a"]}
    options |= {"repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25, "num_ctx": 4096, "odd": 1}
    for path, body in ((CHAT, ASKED), (GENERATE, {"prompt": "x"}), (GENERATE, {"prompt": "x", "raw": True})):
        params = thinker.engine.submitted(path, **body, options=options).params
        assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 3, 0.5, 0.1)
        assert (params.seed, params.max_tokens, params.repetition_penalty) == (7, 5, 1.5)
        assert (params.presence_penalty, params.frequency_penalty) == (0.5, 0.25)
        assert thinker.engine.submitted(path, **body, options={"n_predict": 5}).params.max_tokens == 5
        default = thinker.engine.submitted(path, **body).params
        assert (default.temperature, default.repetition_penalty) == (1.0, 1.0) and default.max_tokens > 1000


def test_a_format_is_a_constraint(thinker: Thinker) -> None:
    def structured(path: str, **body: Any) -> Any:
        return thinker.engine.submitted(path, **body).params.structured

    for format, other in (
        (SCHEMA, {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}),
        ("json", {"type": "json_object"}),
    ):
        for beside in ({}, {"tools": [WEATHER]}):
            expected = structured("/v1/chat/completions", messages=[USER], response_format=other, **beside)
            assert expected is not None and structured(CHAT, **ASKED, format=format, **beside) == expected
            assert beside or structured(GENERATE, prompt="x", format=format) == expected
    assert structured(CHAT, **ASKED, format="") is None


def test_the_models_penalties_do_not_act_in_a_grammar() -> None:
    with http_engine(sampling=SamplingDefaults(repetition_penalty=1.1, frequency_penalty=0.5)) as engine:
        params = engine.submitted(CHAT, **ASKED, format=SCHEMA).params
        assert (params.repetition_penalty, params.frequency_penalty) == (1.0, 0.0)


def test_a_history_with_calls_is_that_of_a_chat(thinker: Thinker) -> None:
    """Results without ids belong to calls by the name of their tool, else by order."""
    calls = [{"function": {"name": "get_weather", "arguments": {"city": city}}} for city in ("Rome", "Oslo")]
    messages = [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [*calls, {"function": {"name": "now"}}]},
        {"role": "tool", "content": "12:00", "tool_name": "now"},
        {"role": "tool", "content": "Sunny"},
        {"role": "tool", "content": "Rain"},
    ]
    found = thinker.prompt(CHAT, model="scripted", messages=messages)
    ids = re.findall(r"<tool_call>(\w{9}) ", found)
    assert len(set(ids)) == 3
    assert found.endswith("<tool now>12:00<tool get_weather>Sunny<tool get_weather>Rain<assistant>")
    assert "<assistant><think>Hm.</think><tool_call>" in found and f"{ids[1]} get_weather Oslo</tool_call>" in found
    assert thinker.prompt(CHAT, model="scripted", messages=messages) == found, "ids that change miss the prefix cache"


def test_thinking_is_a_variable_of_the_template(tmp_path: Path) -> None:
    template = "{{ enable_thinking if enable_thinking is defined else '-' }} {{ reasoning_effort }}<assistant>"
    with thinking(tmp_path, template) as thinker:
        for think, told in ((True, "True "), (False, "False "), ("low", "True low"), (None, "- ")):
            assert thinker.prompt(CHAT, messages=[USER], think=think) == f"{told}<assistant>"
            assert thinker.prompt(GENERATE, prompt="x", think=think) == f"{told}<assistant>"


@pytest.fixture(scope="module")
def plain() -> Iterator[HttpEngine]:
    """One whose template knows no thoughts, with keys."""
    with http_engine(ServerConfig(names=("base", "x:7b"), port=0, api_keys=("k",))) as engine:
        yield engine


KEY = {"authorization": "Bearer k"}


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        (CHAT, {"model": "nonesuch"}, 404, "nonesuch"),
        (CHAT, {"model": "nonesuch:latest"}, 404, "nonesuch"),
        (CHAT, {"think": True}, 400, "does not support thinking"),
        (CHAT, {"format": "xml"}, 400, "format"),
        (CHAT, {"options": {"temperature": "hot"}}, 400, "options.temperature"),
        (CHAT, {"options": {"mirostat": 2}}, 400, "options.mirostat is not supported"),
        (CHAT, {"options": {"n": 3}}, 400, "n is not supported here"),
        (CHAT, {"options": {"prompt_logprobs": 1}}, 400, "prompt_logprobs is not supported here"),
        (GENERATE, {"prompt": "x", "raw": True, "options": {"return_metrics": True}}, 400, "return_metrics is not"),
        (CHAT, {"options": {"num_predict": 5, "n_predict": 6}}, 400, "num_predict and n_predict differ"),
        (CHAT, {"format": "json", "options": {"json_schema": {}}}, 400, "format and options.json_schema both"),
        (CHAT, {"messages": [{**USER, "images": ["aGk="]}]}, 400, "images is not supported"),
        (CHAT, {"messages": [{"role": "king"}]}, 400, "king"),
        (CHAT, {"messages": [{**USER, "content": "a " * 10_000}]}, 400, "context"),
        (GENERATE, {"prompt": "x", "images": ["aGk="]}, 400, "images is not supported"),
        (GENERATE, {"prompt": "x", "suffix": "y"}, 400, "suffix"),
        (GENERATE, {"prompt": "x", "template": "{{ .Prompt }}"}, 400, "template is not supported"),
        (GENERATE, {"prompt": "x", "context": [1, 2]}, 400, "context is not supported"),
        (GENERATE, {"prompt": "x", "raw": True, "options": {"top_p": 2}}, 400, "top_p"),
        ("/api/show", {"model": "nonesuch"}, 404, "nonesuch"),
        ("/api/show", {"name": "nonesuch"}, 404, "nonesuch"),
        ("/api/pull", {"model": "base"}, 404, "/api/pull"),
        ("/api/blobs/sha256:0", {}, 404, "/api/blobs/sha256:0"),
        ("/api/tags", {}, 405, "GET"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_errors_are_one_text(plain: HttpEngine, path: str, body: dict[str, Any], status: int, words: str) -> None:
    given = {"messages": [USER], **body} if path == CHAT else body
    code, answer = plain.post(path, headers=KEY, **given)
    assert (code, [*answer]) == (status, ["error"]) and words in answer["error"], answer


def test_errors_about_the_request_have_the_same_shape(plain: HttpEngine) -> None:
    status, _, content = plain.ask("POST", CHAT, {"messages": [USER]})
    assert (status, [*json.loads(content)]) == (401, ["error"]) and isinstance(json.loads(content)["error"], str)
    status, _, content = plain.ask("DELETE", "/api/delete", {"model": "base"}, KEY)
    assert status == 404 and "/api/delete" in json.loads(content)["error"]
    assert isinstance(json.loads(plain.ask("POST", "/api/W%0Ax", {}, KEY)[2])["error"], str)


# -- what is there --------------------------------------------------------------------------------------------------


def test_lists_have_names_with_tags_that_every_door_takes(plain: HttpEngine) -> None:
    for path in ("/api/tags", "/api/ps"):
        listed = json.loads(plain.ask("GET", path, headers=KEY)[2])["models"]
        assert [one["name"] for one in listed] == [one["model"] for one in listed] == ["base:latest", "x:7b"]
    found = inspect(MODEL)
    assert (listed[0]["size"], listed[0]["digest"]) == (found.nbytes, "d1")
    assert listed[0]["details"] == {
        "format": "safetensors",
        "family": "llama",
        "families": ["llama"],
        "parameter_size": f"{sum(math.prod(tensor.shape) for tensor in found.tensors.values()) / 1e6:.1f}M",
        "quantization_level": "I32",
    }
    assert datetime.fromisoformat(listed[0]["modified_at"]) < datetime.fromisoformat(listed[0]["expires_at"])
    for name in ("base", "base:latest", "base:1b", "x:7b"):
        assert plain.post(CHAT, headers=KEY, model=name)[1]["model"] == name
        assert plain.ask("GET", f"/v1/models/{name}", headers=KEY)[0] == 200
    for name in ("x", "x:8b", "base:", "latest"):
        assert plain.post(CHAT, headers=KEY, model=name)[0] == (200 if name == "base:" else 404)


def test_show_says_what_the_model_can(plain: HttpEngine, thinker: Thinker) -> None:
    _, shown = plain.post("/api/show", headers=KEY, model="base", verbose=True)
    assert shown["capabilities"] == ["completion", "tools"] and shown["details"]["family"] == "llama"
    assert shown["model_info"]["general.architecture"] == "llama" and shown["model_info"]["llama.context_length"] == 256
    assert thinker.engine.post("/api/show", name="scripted")[1]["capabilities"] == ["completion", "tools", "thinking"]


def test_a_model_is_shown_once_it_is_loaded() -> None:
    server = ServerConfig(names=("base",), port=0)
    listening = listen(server)
    port = listening.getsockname()[1]
    with (
        scripted_engine() as engine,
        gateway_thread(engine, engine_config(server=server), listening.detach()) as frontend,
    ):
        http = HttpEngine(port, engine)
        for state, status in (("loading", 503), ("ready", 200)):
            frontend.manager.state = state  # type: ignore[assignment]
            for method, path in (("POST", "/api/show"), ("GET", "/api/tags")):
                found, _, content = http.ask(method, path, {"model": "base"} if method == "POST" else None)
                assert found == status
                assert status == 200 or json.loads(content) == {"error": "the model is still loading"}


def test_a_checkpoint_that_cannot_be_read_is_described_as_empty(tmp_path: Path) -> None:
    details, size = described(str(tmp_path))
    assert (details["format"], details["family"], details["quantization_level"], size) == ("", "", "", 0)


def test_a_client_finds_an_ollama(plain: HttpEngine) -> None:
    version = json.loads(plain.ask("GET", "/api/version", headers=KEY)[2])["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4), "Visual Studio Code wants that"
    assert plain.ask("HEAD", "/")[0] == plain.ask("GET", "/")[0] == 200
    with http_engine(ServerConfig(names=("base",), port=0, ui=False)) as engine:
        assert engine.ask("GET", "/")[2] == b"Ollama is running" and engine.ask("HEAD", "/")[0] == 200


@pytest.mark.parametrize(("template", "can"), [(ROLES, False), (f"{PLACE}<tool_call>", True)])
def test_show_says_whether_the_model_is_told_of_tools(tmp_path: Path, template: str, can: bool) -> None:
    with thinking(tmp_path, template, server=ServerConfig(names=("scripted",), port=0, tools="refuse")) as one:
        assert one.engine.post("/tokenize", prompt="a")[0] == 200, "once it has loaded"
        assert ("tools" in one.engine.post("/api/show")[1]["capabilities"]) == can
