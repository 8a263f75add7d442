"""Every field that a client may send: taken, refused as not supported, or unknown and without effect."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from ssd.config.params import SamplingDefaults
from ssd.frontend.http.bodies import ChatRequest, CompletionRequest
from ssd.frontend.http.endpoints import ROUTES
from ssd.ipc.messages import Emission
from tests.frontend.http_engine import HttpEngine, answering, http_engine
from tests.frontend.test_gateway import TOKENIZER
from tests.scripted_engine import MODEL

TEXT = "Blue light scatters."
IDS = TOKENIZER.encode(TEXT)
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Why?"}]}
RAW: dict[str, Any] = {"prompt": "Why?"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
STRICT = {**TOOL, "function": {**TOOL["function"], "strict": True}}
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


# -- what changes nothing -------------------------------------------------------------------------------------------

HARMLESS: list[dict[str, Any]] = [
    {"metadata": {"a": "b"}},
    {"service_tier": "auto"},
    {"prompt_cache_key": "k", "prompt_cache_retention": "24h"},
    {"safety_identifier": "s", "user": "u" * 1000},
    {"verbosity": "low", "reasoning_effort": "minimal"},
    {"modalities": ["text"]},
    {"parallel_tool_calls": False},
    {"tools": [], "tool_choice": "auto"},
    {"functions": [], "function_call": "none"},
    {"stream_options": {"include_usage": True, "include_obfuscation": False}},
    {"top_logprobs": 0},
    {"seed": -1},
    {"stop": ""},
    {"stop": []},
    {"model": None},
    {"priority": 3},
    {"prediction": {"type": "content", "content": "Blue"}},
    {"response_format": {"type": "text"}},
    {"structured_outputs": {}, "grammar": "", "guided_json": None},
    {"best_of": 1, "use_beam_search": False, "length_penalty": 1.0},
    {"max_tokens": 2**31 - 1},
    {"messages": [{"role": "user", "content": "Why?", "name": "Ann", "cache_control": {"type": "ephemeral"}}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Why?", "cache_control": None}]}]},
    {"messages": [*CHAT["messages"], {"role": "assistant", "content": "So.", "refusal": None, "tool_calls": []}]},
]


@pytest.mark.parametrize("fields", HARMLESS, ids=lambda fields: "-".join(fields))
def test_harmless_fields_change_no_answer(http: HttpEngine, fields: dict[str, Any]) -> None:
    status, answer = http.post(CHATS, **{"max_tokens": 100, **CHAT, **fields})
    assert status == 200, answer
    assert answer["choices"][0]["message"]["content"] == TEXT
    assert answer["model"] == "scripted"


def test_so_it_is_with_completions(http: HttpEngine) -> None:
    fields: dict[str, Any] = {"suffix": "", "best_of": 1, "add_special_tokens": True, "logprobs": None, "user": 5}
    assert http.post(COMPLETIONS, **RAW, **fields, max_tokens=100)[1]["choices"][0]["text"] == TEXT


def test_null_is_the_same_as_nothing_for_every_field_that_works_or_is_not_supported(http: HttpEngine) -> None:
    for path, kind, body in ((CHATS, ChatRequest, CHAT), (COMPLETIONS, CompletionRequest, RAW)):
        null = dict.fromkeys(set(kind.__struct_fields__) - {"messages", "prompt"})
        status, answer = http.post(path, **{**body, **null})
        assert status == 200, answer


def test_an_empty_seed_is_a_random_one_and_an_empty_stop_none(scripted: HttpEngine) -> None:
    seeds = set()
    for _ in range(2):
        params = scripted.submitted(COMPLETIONS, **RAW, seed=-1, stop="").params
        seeds.add(params.seed)
        assert params.stop == ()
    assert len(seeds) == 2


def test_sixteen_stop_strings(http: HttpEngine) -> None:
    stop = [f"never {n}" for n in range(15)] + [" light"]
    assert http.post(COMPLETIONS, **RAW, max_tokens=100, stop=stop)[1]["choices"][0]["text"] == "Blue"


def test_a_text_may_end_with_its_stop_string_and_show_special_tokens(scripted: HttpEngine) -> None:
    for fields, ids, text in (
        ({"stop": " light", "include_stop_str_in_output": True}, IDS, "Blue light"),
        ({"skip_special_tokens": False}, [*IDS, 1, 2], TEXT + "<|im_start|>"),
        ({}, [*IDS, 1, 2], TEXT),
    ):
        for path, body in ((COMPLETIONS, RAW), (CHATS, CHAT)):
            connection = scripted.begin(path, **body, **fields, max_tokens=100)
            request = scripted.engine.target.next_submit().request
            scripted.engine.target.step(Emission(request, ids, finish_reason="stop"))
            (choice,) = json.loads(connection.getresponse().read())["choices"]
            assert (choice["text"] if path == COMPLETIONS else choice["message"]["content"]) == text


# -- log-probabilities of the prompt --------------------------------------------------------------------------------


def test_a_prompt_is_scored_by_vllms_names(http: HttpEngine) -> None:
    vocabulary = TOKENIZER.vocabulary()
    prompt = TOKENIZER.encode("Why is it?")
    _, answer = http.post(COMPLETIONS, prompt=prompt, max_tokens=1, prompt_logprobs=1)
    (choice,) = answer["choices"]
    alternative = {"logprob": -1.5, "rank": 1, "decoded_token": vocabulary.piece(28120)}
    assert choice["prompt_logprobs"] == [None] + [
        {str(token): {"logprob": -0.5, "rank": None, "decoded_token": vocabulary.piece(token)}, "28120": alternative}
        for token in prompt[1:]
    ]
    assert choice["logprobs"] is None and choice["text"] == TOKENIZER.decode(IDS[:1])
    _, chat = http.post(CHATS, **CHAT, max_tokens=1, n=2, prompt_logprobs=0)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in http.post(CHATS, **CHAT, max_tokens=1)[1]
    _, both = http.post(COMPLETIONS, prompt=prompt, echo=True, prompt_logprobs=1)
    assert both["choices"][0]["prompt_logprobs"] == choice["prompt_logprobs"]


# -- prompts that are cut -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["one two three " * 400, list(range(300, 700))], ids=["text", "ids"])
def test_of_a_long_prompt_its_end_is_used(http: HttpEngine, prompt: Any) -> None:
    ids = TOKENIZER.encode(prompt) if isinstance(prompt, str) else prompt
    for asked, used in ((3, 3), (255, 255), (-1, 255)):
        fields = {"truncate_prompt_tokens": asked, "return_token_ids": True, "max_tokens": 1}
        status, answer = http.post(COMPLETIONS, prompt=prompt, **fields)
        assert status == 200 and answer["choices"][0]["prompt_token_ids"] == ids[-used:]
        assert answer["usage"]["prompt_tokens"] == used
    assert http.post(COMPLETIONS, **RAW, truncate_prompt_tokens=100)[0] == 200
    _, echoed = http.post(COMPLETIONS, prompt=prompt, truncate_prompt_tokens=3, echo=True, max_tokens=0)
    assert echoed["choices"][0]["text"] == TOKENIZER.decode(ids[-3:])


def test_of_a_long_chat_the_end_is_used(http: HttpEngine) -> None:
    said = [{"role": "user", "content": "a " * 100_000}]
    status, answer = http.post(CHATS, messages=said, truncate_prompt_tokens=9, return_token_ids=True, max_tokens=1)
    assert status == 200
    assert TOKENIZER.decode(answer["choices"][0]["prompt_token_ids"]).endswith("assistant\n")


# -- usage in a stream ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "body"), [(CHATS, CHAT), (COMPLETIONS, RAW)])
def test_the_usage_so_far_comes_with_every_event(http: HttpEngine, path: str, body: dict[str, Any]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, last = http.events(path, **body, max_tokens=100, stream_options=options)
    made = [event["usage"]["completion_tokens"] for event in events]
    assert made == sorted(made) and made[-1] == len(IDS)
    assert {event["usage"]["prompt_tokens"] for event in events} == {last["usage"]["prompt_tokens"]}
    assert all(
        event["usage"]["total_tokens"] == event["usage"]["prompt_tokens"] + n
        for event, n in zip(events, made, strict=True)
    )
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == len(IDS)


# -- what is unknown ------------------------------------------------------------------------------------------------


def test_unknown_fields_are_ignored_and_logged_once(http: HttpEngine, caplog: pytest.LogCaptureFixture) -> None:
    messages = [{"role": "user", "content": "Why?", "mood": "good"}]
    with caplog.at_level(logging.INFO, "ssd.http"):
        for _ in range(3):
            assert http.post(CHATS, messages=messages, max_tokens=100, one_day=1, another={})[0] == 200
    (line,) = [record for record in caplog.records if record.name == "ssd.http"]
    assert line.getMessage() == "unknown fields of ChatRequest ignored: 'another', 'one_day'"
    assert line.levelno == logging.INFO, "clients send some with every request"


def test_the_name_of_a_field_is_no_line_of_the_log(http: HttpEngine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ssd.http"):
        http.post(COMPLETIONS, **RAW, **{"a\nb": 1, "x" * 1000: 1})
        for start in range(0, 1000, 100):
            http.post(COMPLETIONS, **RAW, **{f"field{n}": 1 for n in range(start, start + 100)})
    lines = [record.getMessage() for record in caplog.records]
    assert "\n" not in "".join(lines) and "x" * 129 not in lines[0]
    assert sum(line.count("field") - 1 for line in lines) < 300, "the log of unknown names is bounded"


def test_unknown_fields_beside_a_wrong_value_do_not_hide_it(http: HttpEngine) -> None:
    status, answer = http.post(COMPLETIONS, unheard_of=1, **RAW, temperature="hot")
    assert (status, answer["error"]["param"]) == (400, "temperature")


def test_the_openapi_document_allows_other_fields_and_says_which_values_ask_for_nothing(http: HttpEngine) -> None:
    schema = json.loads(http.ask("GET", "/openapi.json")[2])["components"]["schemas"]["ChatRequest"]
    assert schema.get("additionalProperties", True) is True
    assert "metadata" not in schema["properties"]
    assert schema["properties"]["mirostat"]["enum"] == [None, 0]


# -- what the model recommends --------------------------------------------------------------------------------------


def test_what_a_request_does_not_say_the_model_does() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.1)
    with http_engine(sampling=defaults) as engine:
        assert json.loads(engine.ask("GET", "/server_info")[2])["sampling_defaults"] == defaults.given()
        for body, expected in (
            ({}, (0.6, 20, 0.95, 0.0, 1.1)),
            ({"temperature": None, "top_k": None}, (0.6, 20, 0.95, 0.0, 1.1)),
            ({"temperature": 0, "top_k": -1, "top_p": 1, "min_p": 0.1}, (0.0, 0, 1.0, 0.1, 1.1)),
        ):
            for path, asked in ((COMPLETIONS, RAW), (CHATS, CHAT)):
                params = engine.submitted(path, **asked, **body).params
                found = params.temperature, params.top_k, params.top_p, params.min_p, params.repetition_penalty
                assert found == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, (1.1, 0.5)),
        ({"tools": [TOOL]}, (1.1, 0.5)),
        ({"tools": [STRICT]}, (1.0, 0.5)),
        ({"tools": [STRICT], "frequency_penalty": 0.25, "repetition_penalty": 1.25}, (1.25, 0.25)),
        ({"tools": [TOOL], "tool_choice": "required"}, (1.0, 0.0)),
        ({"response_format": {"type": "json_object"}}, (1.0, 0.0)),
        ({"guided_json": {"type": "integer"}, "frequency_penalty": 0.25}, (1.0, 0.25)),
    ],
    ids=str,
)
def test_the_models_penalties_leave_what_a_grammar_holds(body: dict[str, Any], expected: tuple[float, float]) -> None:
    """In the free text beside strict tools those on the answer's own tokens stay."""
    with http_engine(sampling=SamplingDefaults(repetition_penalty=1.1, frequency_penalty=0.5)) as engine:
        params = engine.submitted(CHATS, **CHAT, **body).params
        assert (params.repetition_penalty, params.frequency_penalty) == expected


def test_where_the_model_recommends_nothing_the_temperature_is_openais(scripted: HttpEngine) -> None:
    for body, expected in (({}, 1.0), ({"temperature": 0.25}, 0.25)):
        assert scripted.submitted(COMPLETIONS, **RAW, **body).params.temperature == expected


# -- the chat template ----------------------------------------------------------------------------------------------


def test_a_prompt_may_end_with_the_final_message(scripted: HttpEngine) -> None:
    said = [*CHAT["messages"], {"role": "assistant", "content": "Because it"}]
    for fields, end in (
        ({"continue_final_message": True}, "assistant\nBecause it"),
        ({"add_generation_prompt": False}, "assistant\nBecause it\n"),
        ({}, "assistant\nBecause it\nassistant\n"),
    ):
        ids = scripted.submitted(CHATS, messages=said, **fields).token_ids
        assert TOKENIZER.decode(ids).endswith(end)
        assert scripted.post("/tokenize", messages=said, **fields)[1]["tokens"] == ids


def test_variables_reach_the_models_own_template(tmp_path: Path) -> None:
    shutil.copy(MODEL / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}{{ ' quick' if not enable_thinking }}")
    with http_engine(target=str(tmp_path)) as engine, answering(engine, IDS):
        for thinks, text in ((True, "Why?"), (False, "Why? quick")):
            found = engine.post("/tokenize", **CHAT, chat_template_kwargs={"enable_thinking": thinks})[1]
            assert TOKENIZER.decode(found["tokens"]) == text
            status, answer = engine.post(CHATS, **CHAT, chat_template_kwargs={"enable_thinking": thinks})
            assert (status, answer["usage"]["prompt_tokens"]) == (200, found["count"])


def test_every_operation_of_the_openapi_document_has_a_name_of_its_own(http: HttpEngine) -> None:
    paths = json.loads(http.ask("GET", "/openapi.json")[2])["paths"]
    names = [operation["operationId"] for path in paths.values() for operation in path.values()]
    assert len({*names}) == len(names) >= len(ROUTES)
