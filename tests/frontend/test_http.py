"""The HTTP interface as a client sees it: the real frontend over real sockets, with a scripted target behind it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ssd.config.engine import ServerConfig
from ssd.config.params import Speculation, derived_seed
from ssd.ipc.messages import Emission
from tests.frontend.http_engine import HttpEngine, http_engine
from tests.frontend.test_gateway import TOKENIZER

TEXT = "Blue light scatters. Naïve — 日本語."
IDS = TOKENIZER.encode(TEXT)
VOCABULARY = TOKENIZER.vocabulary()
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CHAT = [{"role": "user", "content": "Why is the sky blue?"}]


# -- answers --------------------------------------------------------------------------------------------------------


def test_a_completion(http: HttpEngine) -> None:
    status, answer = http.post(COMPLETIONS, model="scripted", prompt="Why?", max_tokens=100)
    assert status == 200
    assert answer["object"] == "text_completion" and answer["model"] == "scripted"
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"] == [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop"}]
    prompt = len(TOKENIZER.encode("Why?"))
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": len(IDS),
        "total_tokens": prompt + len(IDS),
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 2},
    }


def test_sixteen_tokens_are_the_default_of_completions_and_the_context_that_of_chats(scripted: HttpEngine) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHATS, {"messages": CHAT})):
        connection = scripted.begin(path, model="alias", **body)
        submit = scripted.engine.target.next_submit()
        assert submit.params.max_tokens == (16 if "prompt" in body else 256)
        assert submit.params.temperature == 1.0
        connection.close()
        scripted.engine.target.wait_abort(submit.request)


def test_a_chat(http: HttpEngine) -> None:
    status, answer = http.post(CHATS, model="alias", messages=CHAT, max_completion_tokens=3)
    assert status == 200
    assert answer["object"] == "chat.completion" and answer["model"] == "alias"
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": TOKENIZER.decode(IDS[:3]), "refusal": None}
    assert choice["finish_reason"] == "length"


def test_a_conversation_may_have_parts_and_a_developer(scripted: HttpEngine) -> None:
    said = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    text = TOKENIZER.decode(scripted.submitted(CHATS, messages=said).token_ids)
    assert "Be brief." in text and "Hi" in text and "developer" not in text


def test_a_streamed_completion_is_the_whole_one_in_pieces(http: HttpEngine) -> None:
    body = {"model": "scripted", "prompt": "Why?", "max_tokens": 100}
    events = http.events(COMPLETIONS, **body, stream_options={"include_usage": True}, return_token_ids=True)
    *pieces, last = events
    assert "".join(event["choices"][0]["text"] for event in pieces) == TEXT
    assert [token for event in pieces for token in event["choices"][0].get("token_ids", [])] == IDS
    assert [event["choices"][0]["finish_reason"] for event in pieces if event["choices"][0]["finish_reason"]] == [
        "stop"
    ]
    assert all(event["usage"] is None for event in pieces)
    assert last["choices"] == [] and last["usage"] == http.post(COMPLETIONS, **body)[1]["usage"]
    assert {event["id"] for event in events} == {events[0]["id"]}


def test_a_streamed_chat_begins_with_its_role(http: HttpEngine) -> None:
    first, *rest = http.events(CHATS, model="scripted", messages=CHAT, max_tokens=100)
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in rest) == TEXT
    assert rest[-1]["choices"][0]["finish_reason"] == "stop"
    assert all("usage" not in event for event in rest)


def test_several_prompts_and_choices_come_in_order_with_seeds_of_their_own(scripted: HttpEngine) -> None:
    connection = scripted.begin(COMPLETIONS, prompt=["a", "b"], n=2, seed=7, max_tokens=1)
    submits = [scripted.engine.target.next_submit() for _ in range(4)]
    assert [submit.token_ids for submit in submits] == [TOKENIZER.encode(text) for text in "aabb"]
    assert [submit.params.seed for submit in submits] == [7, derived_seed(7, 1)] * 2
    for submit, token in reversed(list(zip(submits, (5, 6, 7, 8), strict=True))):
        scripted.engine.target.step(Emission(submit.request, [token], finish_reason="length"))
    answer = json.loads(connection.getresponse().read())
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 2 and answer["usage"]["completion_tokens"] == 4


def test_token_ids_are_prompts(scripted: HttpEngine) -> None:
    for prompt, expected in ((IDS[:3], [IDS[:3]]), ([IDS[:2], [5]], [IDS[:2], [5]])):
        connection = scripted.begin(COMPLETIONS, prompt=prompt)
        assert [scripted.engine.target.next_submit().token_ids for _ in expected] == expected
        connection.close()


def test_logprobs_of_a_completion(http: HttpEngine) -> None:
    _, answer = http.post(COMPLETIONS, model="scripted", prompt="Why?", max_tokens=4, logprobs=1)
    found = answer["choices"][0]["logprobs"]
    pieces = [VOCABULARY.piece(token) for token in IDS[:4]]
    assert found["tokens"] == pieces
    assert found["token_logprobs"] == [-0.5] * 4
    assert found["top_logprobs"] == [{piece: -0.5, VOCABULARY.piece(28120): -1.5} for piece in pieces]
    assert found["text_offset"] == [sum(map(len, pieces[:n])) for n in range(4)]
    events = http.events(COMPLETIONS, model="scripted", prompt="Why?", max_tokens=4, logprobs=1)
    parts = [event["choices"][0]["logprobs"] for event in events if event["choices"][0]["logprobs"]]
    assert {key: [entry for part in parts for entry in part[key]] for key in found} == found


def test_logprobs_of_a_chat_have_the_bytes_of_tokens(http: HttpEngine) -> None:
    body: dict[str, Any] = {"model": "scripted", "messages": CHAT, "max_tokens": 100, "logprobs": True}
    _, answer = http.post(CHATS, **body, top_logprobs=1)
    content = answer["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == TEXT
    assert [entry["top_logprobs"][0]["logprob"] for entry in content] == [-1.5] * len(IDS)


def test_an_echoed_prompt_has_logprobs_but_for_its_first_token(http: HttpEngine) -> None:
    body = {"model": "scripted", "prompt": "Why is it?", "echo": True, "logprobs": 1}
    prompt = TOKENIZER.encode("Why is it?")
    for tokens in (0, 1):
        _, answer = http.post(COMPLETIONS, **body, max_tokens=tokens)
        (choice,) = answer["choices"]
        assert choice["text"] == "Why is it?" + TOKENIZER.decode(IDS[:tokens])
        found = choice["logprobs"]
        assert found["token_logprobs"] == [None] + [-0.5] * (len(prompt) - 1 + tokens)
        assert found["top_logprobs"][0] is None
        assert found["tokens"] == [VOCABULARY.piece(token) for token in prompt + IDS[:tokens]]


def test_metrics_of_a_request_on_request(http: HttpEngine) -> None:
    body = {"model": "scripted", "prompt": "Why?", "max_tokens": 4}
    assert "metrics" not in http.post(COMPLETIONS, **body)[1]
    found = http.post(COMPLETIONS, **body, return_metrics=True)[1]["metrics"]
    assert found["speculative_decoding"]["num_accepted_draft_tokens"] == 4
    assert found["speculative_decoding"]["accepted_by_source"] == {"draft": 3, "lookup": 1}
    assert found["speculative_decoding"]["draft_acceptance_rate"] == pytest.approx(4 / 6)
    streamed = http.events(CHATS, model="scripted", messages=CHAT, max_tokens=4, return_metrics=True)
    assert streamed[-1]["metrics"]["speculative_decoding"]["num_cache_hits"] == 1


def test_every_sampling_parameter_arrives(scripted: HttpEngine) -> None:
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "min_tokens": 3,
        "ignore_eos": True,
        "seed": 11,
    }
    others = {
        "stop": "x",
        "stop_token_ids": [5],
        "logit_bias": {"7": -100},
        "allowed_token_ids": [7, 8],
        "max_tokens": 9,
        "logprobs": 2,
        "user": "u",
    }
    params = scripted.submitted(COMPLETIONS, prompt="a", **given, **others).params
    assert {name: getattr(params, name) for name in given} == given
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("x",), (5,), {7: -100.0})
    assert params.allowed_token_ids == (7, 8)
    assert (params.max_tokens, params.logprobs, params.prompt_logprobs) == (9, 2, None)


def test_a_request_may_say_how_it_is_speculated_on() -> None:
    server = ServerConfig(names=("scripted",), port=0)
    with http_engine(server, draft="draft", speculation=Speculation("ssd", 4, (3, 2, 2, 1, 1), "jit")) as engine:
        for asked, expected in (
            ({"enabled": False}, Speculation("ar")),
            ({"num_speculative_tokens": 2}, Speculation("ssd", 2, (), "jit")),
            ({}, Speculation("ssd", 4, (3, 2, 2, 1, 1), "jit")),
        ):
            assert engine.submitted(COMPLETIONS, prompt="a", speculative=asked).params.speculation == expected


# -- errors ---------------------------------------------------------------------------------------------------------


def test_an_error_of_the_engine_is_the_answer_until_there_is_one_and_then_its_last_event(scripted: HttpEngine) -> None:
    target = scripted.engine.target
    for stream, tokens in ((False, [28120]), (True, []), (True, [28120])):
        connection = scripted.begin(COMPLETIONS, prompt="a", stream=stream)
        begun = stream and bool(tokens)
        request = target.next_submit().request
        if tokens:
            target.step(Emission(request, tokens))
        answer = connection.getresponse() if begun else None
        target.step(Emission(request, [], finish_reason="error", error="not a number"))
        answer = answer or connection.getresponse()
        content = answer.read().decode()
        assert answer.status == (200 if begun else 500)
        assert "not a number" in content
        assert content.endswith("data: [DONE]\n\n") == begun
        connection.close()


# -- about the engine -----------------------------------------------------------------------------------------------


def test_models_version_and_server_info(http: HttpEngine) -> None:
    models = json.loads(http.ask("GET", "/v1/models")[2])
    assert [model["id"] for model in models["data"]] == ["scripted", "alias"]
    assert json.loads(http.ask("GET", "/v1/models/alias")[2]) == models["data"][1]
    assert http.ask("GET", "/v1/models/other/one")[0] == 404
    assert json.loads(http.ask("GET", "/version")[2])["version"]
    info = http.ask("GET", "/server_info")[2].decode()
    assert (json.loads(info)["state"], json.loads(info)["plan"]) == ("ready", "")
    assert "/" not in info.replace("+", ""), "no paths"


def test_tokens_there_and_back(http: HttpEngine) -> None:
    status, answer = http.post("/tokenize", model="scripted", prompt=TEXT)
    assert (status, answer["tokens"], answer["count"]) == (200, IDS, len(IDS))
    assert http.post("/detokenize", tokens=IDS) == (200, {"prompt": TEXT})
    _, chat = http.post("/tokenize", messages=CHAT)
    assert "Why is the sky blue?" in TOKENIZER.decode(chat["tokens"])
    assert http.post("/tokenize", model="scripted")[0] == 400
    assert http.post("/detokenize", tokens=[49152])[0] == 400


def test_a_request_id_is_taken_and_given(http: HttpEngine) -> None:
    body = {"model": "scripted", "prompt": "a", "max_tokens": 1}
    _, headers, content = http.ask("POST", COMPLETIONS, body, {"x-request-id": "mine-1"})
    assert headers["x-request-id"] == "mine-1" and json.loads(content)["id"] == "cmpl-mine-1"
    _, headers, _ = http.ask("GET", "/health", headers={"x-request-id": "x" * 129})
    assert headers["x-request-id"] != "x" * 129


def test_health_while_it_loads_and_drains() -> None:
    with http_engine() as engine:
        assert [engine.ask("GET", f"/health{path}")[0] for path in ("", "/ready", "/live")] == [200, 200, 200]
        connection = engine.begin(COMPLETIONS, prompt="a")
        request = engine.engine.target.next_submit().request
        engine.engine.drain()
        while engine.ask("GET", "/health/ready")[0] == 200:
            pass
        assert engine.ask("GET", "/health")[0] == 200
        status, headers, _ = engine.ask("POST", COMPLETIONS, {"prompt": "a"})
        assert status == 503 and headers["retry-after"]
        engine.engine.target.step(Emission(request, [28120], finish_reason="stop"))
        assert json.loads(connection.getresponse().read())["choices"][0]["finish_reason"] == "stop"


def test_a_drain_that_takes_too_long_ends_streams_with_abort() -> None:
    with http_engine() as engine:
        connection = engine.begin(COMPLETIONS, prompt="a", stream=True)
        request = engine.engine.target.next_submit().request
        engine.engine.target.step(Emission(request, [28120]))
        engine.engine.drain(0.2)
        content = connection.getresponse().read().decode()
        assert '"finish_reason":"abort"' in content and content.endswith("data: [DONE]\n\n")
        engine.engine.target.wait_abort(request)
