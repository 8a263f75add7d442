"""The suffix memory in a real engine: whom it helps, and what is left of it when the target dies."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from ssd.client import Client, Completion
from ssd.config.params import SamplingParams, Speculation
from ssd.errors import SsdError
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.launch.server import ServerOptions
from ssd.launch.supervisor import Engine
from tests.faults.engine import gone, running_engine

PROMPT = "Write a letter to the owner of a lighthouse, and ask for a visit in spring."
TOKENS = 60
WITHIN_S = 60.0


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """With two API keys."""
    engine = Engine(resolve(EngineOptions(mode="ngram"), ServerOptions(port=0, api_key=("ann", "bob"))))
    engine.start()
    yield engine
    engine.stop(drain=0)


def asked(engine: Engine, key: str, **fields: Any) -> tuple[list[int], dict[str, Any]]:
    """The ids of an answer and its figures."""
    assert engine.url is not None
    connection = http.client.HTTPConnection(urlsplit(engine.url).netloc, timeout=WITHIN_S)
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"return_metrics": True, "return_token_ids": True}
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    connection.request("POST", "/v1/completions", json.dumps(body | fields), headers)
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return answer["choices"][0]["token_ids"], answer["metrics"]["speculative_decoding"]


def remembered(figures: dict[str, Any]) -> int:
    count: int = figures["accepted_by_source"].get("memory", 0)
    return count


def test_one_key_never_gets_a_token_of_another(engine: Engine) -> None:
    """Nor does a request with another salt, or one that opts out."""
    ids, first = asked(engine, "ann")
    again, second = asked(engine, "ann")
    assert again == ids and remembered(second) > TOKENS / 2 > remembered(first)
    for key, fields in (("bob", {}), ("ann", {"cache_salt": "other"}), ("ann", {"store": False})):
        other, figures = asked(engine, key, **fields)
        assert other == ids and remembered(figures) < TOKENS / 2, (key, fields)
    assert remembered(asked(engine, "bob")[1]) > TOKENS / 2


def test_a_text_that_is_not_to_be_stored_is_not(engine: Engine) -> None:
    fields = {"prompt": f"{PROMPT} Begin with the weather.", "store": False}
    ids, _ = asked(engine, "ann", **fields)
    asked(engine, "ann", **fields)
    first = asked(engine, "ann", **fields | {"store": True})
    second = asked(engine, "ann", **fields | {"store": True})
    assert first[0] == second[0] == ids
    assert remembered(first[1]) < TOKENS / 2 < remembered(second[1])


def test_a_new_target_begins_with_an_empty_memory() -> None:
    """And gives the same ids."""
    with running_engine(mode="ngram") as engine, Client(engine.address) as client:
        first, second = generated(client), generated(client)
        victim = engine.pids["target"]
        os.kill(victim, signal.SIGKILL)
        assert gone(victim)
        third, fourth = generated(client), generated(client)
        assert first.token_ids == second.token_ids == third.token_ids == fourth.token_ids
        counts = [answer.metrics.accepted_by_source.get("memory", 0) for answer in (first, second, third, fourth)]
        assert max(counts[0], counts[2]) < TOKENS / 2 < min(counts[1], counts[3])


def generated(client: Client) -> Completion:
    """An answer of the engine as soon as it can give one."""
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, speculation=Speculation("ngram"))
    deadline = time.monotonic() + WITHIN_S
    while True:
        try:
            return client.generate([PROMPT], params)[0]
        except SsdError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
