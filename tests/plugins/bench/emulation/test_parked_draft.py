"""A draft that has left, where it would pay."""

from __future__ import annotations

from msgspec.structs import replace

from ssd.client import Client
from ssd.config.emulation import DeviceTimes, ForwardTime
from tests.faults.test_parked_draft import PROMPT, is_parked, params, running, state, until

_TIMES = DeviceTimes(ForwardTime(0.06), ForwardTime(0.002))


def test_a_plan_that_wants_the_draft_brings_it_back() -> None:
    with running(emulate=_TIMES) as engine, Client(engine.address) as client:
        until(lambda: is_parked(engine))
        expected = client.generate(PROMPT, replace(params("ar"), max_tokens=16)).token_ids
        answers = (client.generate(PROMPT, replace(params("auto"), max_tokens=16)).token_ids for _ in range(200))
        assert any(ids == expected and state(engine) == "up" for ids in answers)
