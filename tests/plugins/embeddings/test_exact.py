"""Vectors over HTTP are those of the ZeroMQ client, by the built-in target."""

from __future__ import annotations

import json
import urllib.request
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ssd.client import Client
from ssd.config.params import Pooling, SamplingParams
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.launch.server import ServerOptions
from ssd.launch.supervisor import Engine
from tests.exactness.test_embeddings import POOLINGS, TEXTS


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    options = EngineOptions(max_num_seqs=4, max_num_batched_tokens=128, activations="int16")
    with Engine(resolve(options, ServerOptions(port=0))) as engine:
        yield engine


def post(engine: Engine, **body: Any) -> Any:
    raw = json.dumps(body).encode()
    request = urllib.request.Request(f"{engine.url}/v1/embeddings", raw, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_many_beside_chats_are_those_of_one_alone(engine: Engine, pooling: Pooling) -> None:
    with ThreadPoolExecutor(1) as pool, Client(engine.address) as client:
        alone = [post(engine, input=text, pooling=pooling)["data"][0]["embedding"] for text in TEXTS]
        chats = pool.submit(client.generate, ["Say hello."] * 4, SamplingParams(max_tokens=60), chat=True)
        together = post(engine, input=TEXTS * 8, pooling=pooling)
        chats.result()
    assert [entry["embedding"] for entry in together["data"]] == alone * 8
    assert together["usage"]["prompt_tokens"] >= 8 * 500


@pytest.mark.parametrize("pooling", POOLINGS)
def test_they_are_those_of_a_client(engine: Engine, pooling: Pooling) -> None:
    with Client(engine.address) as client:
        found = client.generate(TEXTS, SamplingParams(pooling=pooling))
    over_http = post(engine, input=TEXTS, pooling=pooling, normalize=False)
    for completion, entry in zip(found, over_http["data"], strict=True):
        assert array("f", entry["embedding"]).tolist() == completion.embedding
