"""Batches larger than what the engine takes at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ssd.client import Client
from ssd.client.steps import Batch
from ssd.config.engine import Limits, ServerConfig
from ssd.errors import RequestError
from tests.client.serving import LoopClient, echo, endless
from tests.scripted_engine import Script, engine_config, following, gateway_thread, scripted_engine


@contextmanager
def small(script: Script) -> Iterator[str]:
    """The address of an engine that takes three requests at a time."""
    config = engine_config(server=ServerConfig(names=("scripted",), limits=Limits(max_open_requests=3)))
    with scripted_engine() as engine, gateway_thread(engine, config), following(engine, script):
        yield engine.address


@pytest.mark.parametrize("places", [1, 3, 20])
@pytest.mark.parametrize("others", [0, 1])
def test_every_request_is_answered_once_and_few_are_refused(places: int, others: int) -> None:
    """An engine in a loop: `others` of its places are taken, by somebody else, from the second request on."""
    batch, taken, answered, refusals = Batch(50), dict[int, bool](), list[int](), 0
    while len(answered) < 50:
        while (request := batch.send()) is not None:
            room = sum(taken.values()) < max(1, places - (others if answered else 0))
            taken[request] = room
        request = batch.follow()
        if taken.pop(request):
            answered.append(request)
        else:
            refusals += 1
            assert batch.refused(request)
    assert sorted(answered) == list(range(50))
    assert refusals <= 50 + places


def test_a_request_refused_though_no_other_of_the_batch_was_open_stays_refused() -> None:
    batch = Batch(2)
    assert (batch.send(), batch.send(), batch.send()) == (0, 1, None)
    assert batch.follow() == 0
    assert not batch.refused(0)


@pytest.mark.parametrize("kind", [Client, LoopClient])
def test_a_batch_goes_on_as_places_free(kind: type[Client]) -> None:
    prompts = ["word " * (1 + n % 5) + str(n) for n in range(30)]
    with small(echo) as address, kind(address) as client:
        assert [completion.text for completion in client.generate(prompts)] == prompts


def test_an_engine_that_others_fill_refuses_the_batch() -> None:
    with small(endless) as address, Client(address) as other, Client(address) as client:
        streams = [other.stream("a") for _ in range(3)]
        for stream in streams:
            next(stream)
        with pytest.raises(RequestError) as caught:
            client.generate(["b", "c"])
        assert caught.value.code == "overloaded"
