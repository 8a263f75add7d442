"""`/v1/embeddings` and Ollama's two: bodies in, vectors out, from a scripted target."""

from __future__ import annotations

import base64
import json
import math
import re
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ssd.config.engine import Limits, ServerConfig
from ssd.ipc.messages import Emission, Submit
from tests.frontend.http_engine import HttpEngine, http_engine
from tests.scripted_engine import following

PATH = "/v1/embeddings"
WIDTH = 4


def vector(submit: Submit) -> list[float]:
    """What the scripted target pools: numbers that show the prompt and the pooling."""
    sign = -1.0 if submit.params.pooling == "last" else 1.0
    return [sign * float(len(submit.token_ids)), float(submit.token_ids[0]), 0.5, float(submit.token_ids[-1])]


@contextmanager
def embedding(engine: HttpEngine, seen: list[Submit] | None = None) -> Iterator[None]:
    def script(submit: Submit) -> Iterator[Emission]:
        if seen is not None:
            seen.append(submit)
        raw = array("f", vector(submit)).tobytes()
        yield Emission(submit.request, [], finish_reason="stop", embedding=raw)

    with following(engine.engine, script):
        yield


def unit(numbers: list[float]) -> list[float]:
    return [number / math.hypot(*numbers) for number in numbers]


def vectors(answer: Any) -> list[list[float]]:
    assert [entry["index"] for entry in answer["data"]] == list(range(len(answer["data"])))
    return [entry["embedding"] for entry in answer["data"]]


@pytest.fixture(scope="module")
def http() -> Iterator[HttpEngine]:
    with http_engine() as engine:
        yield engine


@pytest.mark.parametrize(
    ("given", "count"),
    [("one two", 1), (["one", "two three"], 2), ([5, 6, 7], 1), ([[5], [6, 7]], 2), (["same", "same"], 2)],
)
def test_inputs_of_every_kind(http: HttpEngine, given: Any, count: int) -> None:
    seen: list[Submit] = []
    with embedding(http, seen):
        status, answer = http.post(PATH, input=given, model="alias")
    assert status == 200, answer
    assert (answer["object"], answer["model"], len(answer["data"])) == ("list", "alias", count)
    assert all(entry["object"] == "embedding" for entry in answer["data"])
    assert len(seen) == count
    for each in seen:
        params = each.params
        assert (params.max_tokens, params.pooling, params.speculation.mode, params.store) == (1, "mean", "ar", False)
    tokens = sum(len(each.token_ids) for each in seen)
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    expected = sorted(unit(vector(each)) for each in seen)
    for found, right in zip(sorted(vectors(answer)), expected, strict=True):
        assert found == pytest.approx(right, rel=1e-6)


def test_options(http: HttpEngine) -> None:
    ids = [5, 6, 7]
    with embedding(http):
        (raw,) = vectors(http.post(PATH, input=ids, normalize=False)[1])
        assert raw == [3.0, 5.0, 0.5, 7.0]
        (last,) = vectors(http.post(PATH, input=ids, normalize=False, pooling="last")[1])
        assert last == [-3.0, 5.0, 0.5, 7.0]
        (short,) = vectors(http.post(PATH, input=ids, dimensions=2)[1])
        assert short == pytest.approx(unit([3.0, 5.0]))
        (cut,) = vectors(http.post(PATH, input=ids, truncate_prompt_tokens=2, normalize=False)[1])
        assert cut == [2.0, 6.0, 0.5, 7.0]
        (plain,) = vectors(http.post(PATH, input=ids)[1])
        (coded,) = vectors(http.post(PATH, input=ids, encoding_format="base64", user="me")[1])
        assert array("f", base64.b64decode(coded)) == array("f", plain)


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "input", "missing_parameter"),
        ({"input": ""}, "input", "invalid_request"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": ["one", ""]}, "input", "invalid_request"),
        ({"input": ["one", [5]]}, "input", "invalid_value"),
        ({"input": [5] * 100_000}, "input", "context_length_exceeded"),
        ({"input": "one " * 100_000}, "input", "context_length_exceeded"),
        ({"input": ["x"] * 2049}, "input", "invalid_value"),
        ({"input": "x", "dimensions": WIDTH + 1}, "dimensions", "invalid_value"),
        ({"input": "x", "dimensions": 0}, "dimensions", "invalid_value"),
        ({"input": "x", "pooling": "cls"}, "pooling", "invalid_value"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format", "invalid_value"),
        ({"input": [2**30]}, "input", "invalid_request"),
        ({"input": "x", "add_special_tokens": False}, "add_special_tokens", "unsupported_parameter"),
    ],
)
def test_bodies_that_are_wrong(http: HttpEngine, body: dict[str, Any], param: str, code: str) -> None:
    with embedding(http):
        status, answer = http.post(PATH, **body)
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, code), answer


def test_the_input_that_is_wrong_is_named(http: HttpEngine) -> None:
    with embedding(http):
        _, answer = http.post(PATH, input=["x"] * 70 + [""])
    assert answer["error"]["message"] == "input[70]: the prompt is empty"
    with embedding(http):
        _, answer = http.post(PATH, input=[[1], [999_999]])
    assert answer["error"]["message"].startswith("input[1]: token id 999999")
    with embedding(http):
        _, answer = http.post(PATH, input=["x", "one " * 3000])
    assert answer["error"]["message"].startswith("input[1]: ")


def test_more_inputs_than_requests_may_be_open() -> None:
    server = ServerConfig(names=("scripted",), port=0, limits=Limits(max_open_requests=3))
    with http_engine(server) as engine:
        seen: list[Submit] = []
        with embedding(engine, seen):
            inputs = [[5 + number % 50] * (1 + number % 7) for number in range(2048)]
            status, answer = engine.post(PATH, input=inputs, normalize=False)
        assert status == 200 and len(seen) == 2048
        assert [(found[0], found[1]) for found in vectors(answer)] == [(len(ids), ids[0]) for ids in inputs]


def test_a_large_answer_comes_in_parts(http: HttpEngine) -> None:
    def script(submit: Submit) -> Iterator[Emission]:
        raw = array("f", [0.123456789 + submit.token_ids[0]] * 4096).tobytes()
        yield Emission(submit.request, [], finish_reason="stop", embedding=raw)

    with following(http.engine, script):
        status, headers, content = http.ask("POST", PATH, {"input": [[5 + n] for n in range(40)], "normalize": False})
        assert (status, headers["content-type"]) == (200, "application/json")
        assert "content-length" not in headers and len(content) > 2**20
        found = vectors(json.loads(content))
        assert [array("f", each) for each in found] == [array("f", [0.123456789 + 5 + n] * 4096) for n in range(40)]


def test_a_client_that_leaves_ends_its_requests(http: HttpEngine) -> None:
    connection = http.begin(PATH, input=[[5], [6], [7]])
    requests = {http.engine.target.next_submit().request for _ in range(3)}
    connection.close()
    for request in requests:
        http.engine.target.wait_abort(request)


def test_a_failing_input_ends_the_others(http: HttpEngine) -> None:
    connection = http.begin(PATH, input=[[5], [6]])
    first, second = (http.engine.target.next_submit().request for _ in range(2))
    http.engine.target.step(Emission(first, [], finish_reason="error", error="the model broke"))
    answer = connection.getresponse()
    error = json.loads(answer.read())["error"]
    assert (answer.status, error["code"], error["message"]) == (500, "engine_error", "input[0]: the model broke")
    http.engine.target.wait_abort(second)
    connection.close()


def test_a_target_that_has_none_is_an_error(http: HttpEngine) -> None:
    def script(submit: Submit) -> Iterator[Emission]:
        yield Emission(submit.request, [], finish_reason="error", error="the mock computes no hidden states")

    with following(http.engine, script):
        status, answer = http.post(PATH, input="x")
    assert (status, answer["error"]["message"]) == (500, "the mock computes no hidden states")


def test_metrics_count_each_input(http: HttpEngine) -> None:
    with embedding(http):
        before = _counted(http)
        http.post(PATH, input=["one", "two"])
        assert _counted(http) == before + 2


def _counted(http: HttpEngine) -> float:
    text = http.ask("GET", "/metrics")[2].decode()
    found = re.findall(r'^ssd:request_success_total\{finished_reason="stop".*\} (.*)$', text, re.MULTILINE)
    return sum(map(float, found))


def test_ollamas_doors(http: HttpEngine) -> None:
    with embedding(http):
        status, answer = http.post("/api/embed", model="alias", input=["one", "one two"], options={"num_ctx": 9})
        assert status == 200 and answer["model"] == "alias", answer
        assert [math.hypot(*each) for each in answer["embeddings"]] == pytest.approx([1.0, 1.0])
        assert answer["prompt_eval_count"] > 0 and answer["total_duration"] > 0
        _, single = http.post("/api/embed", model="alias", input="one", dimensions=2)
        assert [len(each) for each in single["embeddings"]] == [2]
        for nothing in ("", []):
            status, loaded = http.post("/api/embed", model="alias", input=nothing)
            assert (status, loaded["embeddings"], loaded["prompt_eval_count"]) == (200, [], 0)
        for empty in ([""], ["", ""]):
            status, refused = http.post("/api/embed", model="alias", input=empty)
            assert status == 400 and refused["error"].endswith("the prompt is empty")
        _, old = http.post("/api/embeddings", model="alias", prompt="one", keep_alive="5m")
        assert old["embedding"][2] == 0.5
        long = "one " * 100_000
        assert len(http.post("/api/embed", model="alias", input=long)[1]["embeddings"]) == 1
        status, refused = http.post("/api/embed", model="alias", input=long, truncate=False)
        assert status == 400 and list(refused) == ["error"] and "context" in refused["error"]
        status, unknown = http.post("/api/embed", model="other", input="x")
        assert status == 404 and "other" in unknown["error"]


def test_quotas_count_embeddings() -> None:
    server = ServerConfig(names=("scripted",), port=0, quotas={"default": {"tokens-per-minute": 60}})
    with http_engine(server) as engine, embedding(engine):
        for path, field in ((PATH, "input"), ("/api/embed", "input"), ("/api/embeddings", "prompt")):
            status, headers, _ = engine.ask("POST", path, {"model": "scripted", field: "one two"})
            assert status == 200
        assert 0 < int(headers["x-ratelimit-remaining-tokens"]) < 60
        assert engine.ask("POST", PATH, {"model": "scripted", "input": ["many words"] * 60})[0] == 200
        status, headers, content = engine.ask("POST", "/api/embed", {"model": "scripted", "input": "one"})
        assert status == 429 and headers["retry-after"] and "60 tokens a minute" in json.loads(content)["error"]
        assert engine.ask("POST", "/api/embed", {"model": "scripted", "input": []})[0] == 200
