"""The HTTP interface as a client sees it: the real frontend over real sockets, with a scripted target behind it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ssd.config.engine import Limits, ServerConfig
from ssd.config.params import Speculation, derived_seed
from ssd.ipc.messages import Emission
from tests.frontend.http_engine import HttpEngine, http_engine
from tests.frontend.test_gateway import TOKENIZER

TEXT = "Blue light scatters. Naïve — 日本語."
IDS = TOKENIZER.encode(TEXT)
VOCABULARY = TOKENIZER.vocabulary()
CHAT = [{"role": "user", "content": "Why is the sky blue?"}]


# -- answers --------------------------------------------------------------------------------------------------------


def test_a_completion(http: HttpEngine) -> None:
    status, answer = http.post("/v1/completions", model="scripted", prompt="Why?", max_tokens=100)
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
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": CHAT})):
        connection = scripted.connection()
        headers = {"content-type": "application/json"}
        connection.request("POST", path, json.dumps({"model": "alias", **body}), headers)
        submit = scripted.engine.target.next_submit()
        assert submit.params.max_tokens == (16 if "prompt" in body else 256)
        assert submit.params.temperature == 1.0
        connection.close()
        scripted.engine.target.wait_abort(submit.request)


def test_a_chat(http: HttpEngine) -> None:
    status, answer = http.post("/v1/chat/completions", model="alias", messages=CHAT, max_completion_tokens=3)
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
    connection = scripted.connection()
    body = json.dumps({"model": "scripted", "messages": said})
    connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    text = TOKENIZER.decode(scripted.engine.target.next_submit().token_ids)
    assert "Be brief." in text and "Hi" in text and "developer" not in text
    connection.close()


def test_a_streamed_completion_is_the_whole_one_in_pieces(http: HttpEngine) -> None:
    body = {"model": "scripted", "prompt": "Why?", "max_tokens": 100}
    events = http.events("/v1/completions", **body, stream_options={"include_usage": True}, return_token_ids=True)
    *pieces, last = events
    assert "".join(event["choices"][0]["text"] for event in pieces) == TEXT
    assert [token for event in pieces for token in event["choices"][0].get("token_ids", [])] == IDS
    assert [event["choices"][0]["finish_reason"] for event in pieces if event["choices"][0]["finish_reason"]] == [
        "stop"
    ]
    assert all(event["usage"] is None for event in pieces)
    assert last["choices"] == [] and last["usage"] == http.post("/v1/completions", **body)[1]["usage"]
    assert {event["id"] for event in events} == {events[0]["id"]}


def test_a_streamed_chat_begins_with_its_role(http: HttpEngine) -> None:
    first, *rest = http.events("/v1/chat/completions", model="scripted", messages=CHAT, max_tokens=100)
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in rest) == TEXT
    assert rest[-1]["choices"][0]["finish_reason"] == "stop"
    assert all("usage" not in event for event in rest)


def test_several_prompts_and_choices_come_in_order_with_seeds_of_their_own(scripted: HttpEngine) -> None:
    connection = scripted.connection()
    body = {"model": "scripted", "prompt": ["a", "b"], "n": 2, "seed": 7, "max_tokens": 1}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
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
        connection = scripted.connection()
        body = json.dumps({"model": "scripted", "prompt": prompt})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        assert [scripted.engine.target.next_submit().token_ids for _ in expected] == expected
        connection.close()


def test_logprobs_of_a_completion(http: HttpEngine) -> None:
    _, answer = http.post("/v1/completions", model="scripted", prompt="Why?", max_tokens=4, logprobs=1)
    found = answer["choices"][0]["logprobs"]
    pieces = [VOCABULARY.piece(token) for token in IDS[:4]]
    assert found["tokens"] == pieces
    assert found["token_logprobs"] == [-0.5] * 4
    assert found["top_logprobs"] == [{piece: -0.5, VOCABULARY.piece(28120): -1.5} for piece in pieces]
    assert found["text_offset"] == [sum(map(len, pieces[:n])) for n in range(4)]
    events = http.events("/v1/completions", model="scripted", prompt="Why?", max_tokens=4, logprobs=1)
    parts = [event["choices"][0]["logprobs"] for event in events if event["choices"][0]["logprobs"]]
    assert {key: [entry for part in parts for entry in part[key]] for key in found} == found


def test_logprobs_of_a_chat_have_the_bytes_of_tokens(http: HttpEngine) -> None:
    body: dict[str, Any] = {"model": "scripted", "messages": CHAT, "max_tokens": 100, "logprobs": True}
    _, answer = http.post("/v1/chat/completions", **body, top_logprobs=1)
    content = answer["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == TEXT
    assert [entry["top_logprobs"][0]["logprob"] for entry in content] == [-1.5] * len(IDS)


def test_an_echoed_prompt_has_logprobs_but_for_its_first_token(http: HttpEngine) -> None:
    body = {"model": "scripted", "prompt": "Why is it?", "echo": True, "logprobs": 1}
    prompt = TOKENIZER.encode("Why is it?")
    for tokens in (0, 1):
        _, answer = http.post("/v1/completions", **body, max_tokens=tokens)
        (choice,) = answer["choices"]
        assert choice["text"] == "Why is it?" + TOKENIZER.decode(IDS[:tokens])
        found = choice["logprobs"]
        assert found["token_logprobs"] == [None] + [-0.5] * (len(prompt) - 1 + tokens)
        assert found["top_logprobs"][0] is None
        assert found["tokens"] == [VOCABULARY.piece(token) for token in prompt + IDS[:tokens]]


def test_metrics_of_a_request_on_request(http: HttpEngine) -> None:
    body = {"model": "scripted", "prompt": "Why?", "max_tokens": 4}
    assert "metrics" not in http.post("/v1/completions", **body)[1]
    found = http.post("/v1/completions", **body, return_metrics=True)[1]["metrics"]
    assert found["speculative_decoding"]["num_accepted_draft_tokens"] == 4
    assert found["speculative_decoding"]["accepted_by_source"] == {"draft": 3, "lookup": 1}
    assert found["speculative_decoding"]["draft_acceptance_rate"] == pytest.approx(4 / 6)
    streamed = http.events("/v1/chat/completions", model="scripted", messages=CHAT, max_tokens=4, return_metrics=True)
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
    connection = scripted.connection()
    body = json.dumps({"model": "scripted", "prompt": "a", **given, **others})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    params = scripted.engine.target.next_submit().params
    assert {name: getattr(params, name) for name in given} == given
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("x",), (5,), {7: -100.0})
    assert params.allowed_token_ids == (7, 8)
    assert (params.max_tokens, params.logprobs, params.prompt_logprobs) == (9, 2, None)
    connection.close()


def test_a_request_may_say_how_it_is_speculated_on() -> None:
    server = ServerConfig(names=("scripted",), port=0)
    with http_engine(server, draft="draft", speculation=Speculation("ssd", 4, (3, 2, 2, 1, 1), "jit")) as engine:
        for asked, expected in (
            ({"enabled": False}, Speculation("ar")),
            ({"num_speculative_tokens": 2}, Speculation("ssd", 2, (), "jit")),
            ({}, Speculation("ssd", 4, (3, 2, 2, 1, 1), "jit")),
        ):
            connection = engine.connection()
            body = json.dumps({"model": "scripted", "prompt": "a", "speculative": asked})
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            assert engine.engine.target.next_submit().params.speculation == expected
            connection.close()


# -- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "status", "param", "message"),
    [
        ({"temperature": "hot"}, 400, "temperature", "temperature: Expected `float"),
        ({"temperature": -1}, 400, "temperature", ">= 0"),
        ({"prompt": ""}, 400, "prompt", "the prompt is empty"),
        ({"prompt": ["a", 1]}, 400, "prompt", "a list of texts"),
        ({"prompt": [49152]}, 400, "prompt", "token id 49152 is outside"),
        ({"prompt": [1] * 256}, 400, "prompt", "256 tokens; the context of 256"),
        ({"prompt": "a " * 20000}, 400, "prompt", "the context of 256 tokens cannot hold it"),
        ({"prompt": "a " * 1000}, 400, "prompt", "1001 tokens; the context of 256"),
        ({"prompt": [0] * 1_048_577}, 400, "prompt", "length <= 1048576"),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias", "no token id"),
        ({"logit_bias": {"49152": 1}}, 400, "logit_bias", "outside of the vocabulary"),
        ({"echo": True, "stream": True}, 400, "echo", "cannot be streamed"),
        ({"stop_token_ids": [49152]}, 400, "stop_token_ids", "outside of the vocabulary"),
        ({"speculative": {"num_speculative_tokens": 2}}, 400, "speculative", "mode ar"),
        ({"min_tokens": 17}, 400, "min_tokens", "min_tokens 17 is more than max_tokens 16"),
        ({"model": "other"}, 404, "model", "'other' is not served here; scripted, alias is"),
        ({"max_tokens": 0}, 400, "max_tokens", "at least 1"),
    ],
)
def test_what_is_wrong_is_said_and_named(
    http: HttpEngine, changes: dict[str, Any], status: int, param: str | None, message: str
) -> None:
    found, answer = http.post("/v1/completions", **{"model": "scripted", "prompt": "a", **changes})
    assert found == status
    assert answer["error"]["param"] == param
    assert message in answer["error"]["message"]
    assert set(answer["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": []}, "messages"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": "a " * 1000}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a " * 400}]}, "messages"),
    ],
)
def test_what_a_chat_cannot_do_is_named(http: HttpEngine, changes: dict[str, Any], param: str) -> None:
    status, answer = http.post("/v1/chat/completions", **{"model": "scripted", "messages": CHAT, **changes})
    assert (status, answer["error"]["param"]) == (400, param)


def test_null_is_the_same_as_nothing(http: HttpEngine) -> None:
    null = dict.fromkeys(["tools", "tool_choice", "temperature", "n", "stop", "logprobs", "response_format", "seed"])
    status, answer = http.post("/v1/chat/completions", model="scripted", messages=CHAT, max_tokens=2, **null)
    assert status == 200, answer


def test_bodies_that_are_no_json_and_paths_that_are_none(http: HttpEngine) -> None:
    bodies = [b"", b"{", b"[]", b"\xff", b'{"model": "\xff"}', b"[" * 100_000, b"null", b'{"model": NaN}']
    for body in bodies:
        status, _, content = http.ask("POST", "/v1/completions", body)
        assert status == 400 and "error" in json.loads(content), body[:20]
    assert http.ask("POST", "/v1/completions", b"{}", {"content-type": "text/plain"})[0] == 415
    assert http.ask("GET", "/v2")[0] == 404
    status, headers, _ = http.ask("GET", "/v1/completions")
    assert (status, headers["allow"]) == (405, "POST")


def test_an_error_of_the_engine_is_the_answer_until_there_is_one_and_then_its_last_event(scripted: HttpEngine) -> None:
    target = scripted.engine.target
    for stream, tokens in ((False, [28120]), (True, []), (True, [28120])):
        connection = scripted.connection()
        body = json.dumps({"model": "scripted", "prompt": "a", "stream": stream})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
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
    _, headers, content = http.ask("POST", "/v1/completions", body, {"x-request-id": "mine-1"})
    assert headers["x-request-id"] == "mine-1" and json.loads(content)["id"] == "cmpl-mine-1"
    _, headers, _ = http.ask("GET", "/health", headers={"x-request-id": "x" * 129})
    assert headers["x-request-id"] != "x" * 129


def test_health_while_it_loads_and_drains() -> None:
    from tests.scripted_engine import engine_config

    assert engine_config().server.limits == Limits()
    with http_engine() as engine:
        assert [engine.ask("GET", f"/health{path}")[0] for path in ("", "/ready", "/live")] == [200, 200, 200]
        connection = engine.connection()
        body = json.dumps({"model": "scripted", "prompt": "a"})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        request = engine.engine.target.next_submit().request
        engine.engine.drain()
        while engine.ask("GET", "/health/ready")[0] == 200:
            pass
        assert engine.ask("GET", "/health")[0] == 200
        status, headers, _ = engine.ask("POST", "/v1/completions", json.loads(body))
        assert status == 503 and headers["retry-after"]
        engine.engine.target.step(Emission(request, [28120], finish_reason="stop"))
        assert json.loads(connection.getresponse().read())["choices"][0]["finish_reason"] == "stop"


def test_a_drain_that_takes_too_long_ends_streams_with_abort() -> None:
    with http_engine() as engine:
        connection = engine.connection()
        body = json.dumps({"model": "scripted", "prompt": "a", "stream": True})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        request = engine.engine.target.next_submit().request
        engine.engine.target.step(Emission(request, [28120]))
        engine.engine.drain(0.2)
        content = connection.getresponse().read().decode()
        assert '"finish_reason":"abort"' in content and content.endswith("data: [DONE]\n\n")
        engine.engine.target.wait_abort(request)


def test_a_unix_socket_serves_too(tmp_path: Path) -> None:
    import socket

    server = ServerConfig(names=("scripted",), uds=str(tmp_path / "s"))
    with http_engine(server):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(server.uds)
            client.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
