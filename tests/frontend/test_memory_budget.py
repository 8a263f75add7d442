"""How much memory prompts may take, of one client and of all."""

from __future__ import annotations

import pytest

from ssd.config.params import SamplingParams
from ssd.errors import RequestError
from ssd.frontend import request_manager
from ssd.frontend.memory_budget import MemoryBudget, prompt_bytes
from ssd.ipc.public import Cancel, ChatMessage, Done, Failed, Generate
from tests.frontend.http_engine import answering, http_engine
from tests.frontend.raw_client import RawClient, prompt, scripted_frontend

TEXT = "word " * 100
LONG = {"prompt": "word " * 100_000}


class Holder:
    """What keeps bytes."""


def test_one_peer_may_hold_so_much_and_all_together_so_much() -> None:
    budget = MemoryBudget(each=100, in_all=150)
    budget.take("a", 60)
    budget.take("b", 50)
    with pytest.raises(RequestError, match="of this client hold 60 of 100 bytes"):
        budget.take("a", 41)
    with pytest.raises(RequestError, match="of all clients hold 110 of 150 bytes"):
        budget.take("b", 41)
    budget.take("a", 40)
    assert budget.held == 150, "what is refused is not counted"
    budget.give_back("a", 60)
    budget.take("b", 50)


def test_what_is_given_back_is_forgotten() -> None:
    budget = MemoryBudget(each=10, in_all=10)
    for _ in range(3):
        budget.take("a", 10)
        budget.give_back("a", 10)
    assert budget.held == 0 and not budget._peers


def test_one_prompt_of_any_size_is_let_in_where_nothing_is_held() -> None:
    budget = MemoryBudget(each=10, in_all=10)
    budget.take("a", 1000)
    with pytest.raises(RequestError):
        budget.take("b", 1)


def test_bytes_come_back_when_what_keeps_them_is_freed() -> None:
    budget, holder = MemoryBudget(), Holder()
    budget.take("a", 5)
    budget.give_back_with(holder, "a", 5)
    assert budget.held == 5
    del holder
    assert budget.held == 0


def test_a_text_counts_with_what_it_takes_and_not_with_what_was_sent() -> None:
    plain, wide = Generate(1, "a" * 10_000), Generate(1, "a" * 10_000 + "\N{GRINNING FACE}")
    assert 10_000 < prompt_bytes(plain) < 10_100 and 40_000 < prompt_bytes(wide) < 40_200
    assert prompt_bytes(Generate(1, messages=[ChatMessage("user", "a" * 5000)] * 2)) > 10_000
    assert prompt_bytes(Generate(1, token_ids=[5] * 1000)) == 40_000
    allowed = SamplingParams(allowed_token_ids=(5,) * 1000)
    assert prompt_bytes(Generate(1, token_ids=[5], params=allowed)) == 40_040


def test_a_client_is_told_that_its_prompts_are_too_much_and_may_go_on_when_one_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = prompt_bytes(Generate(1, TEXT))
    monkeypatch.setattr(request_manager, "MemoryBudget", lambda: MemoryBudget(each=2 * size, in_all=3 * size))
    with scripted_frontend() as setup:
        other = RawClient(setup.engine.address)
        for name in (1, 2):
            setup.client.send(prompt(name, TEXT))
            setup.engine.target.next_submit()
        refused = setup.client.ask(prompt(3, TEXT))
        assert isinstance(refused, Failed) and (refused.id, refused.code) == (3, "overloaded")
        other.send(prompt(1, TEXT))
        setup.engine.target.next_submit()
        assert other.ask(prompt(2, TEXT)).code == "overloaded", "that is all of what all may have"
        assert isinstance(setup.client.ask(Cancel(1)), Done)
        other.send(prompt(2, TEXT))
        setup.engine.target.next_submit()
        other.close()


def test_bodies_that_do_not_end_keep_out_no_short_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_manager, "MemoryBudget", lambda: MemoryBudget(each=2**20, in_all=2**20))
    with http_engine() as http, answering(http, [5]):
        held = http.connection()
        held.putrequest("POST", "/v1/completions")
        held.putheader("content-type", "application/json")
        held.putheader("content-length", str(2**20))
        held.endheaders(b"{")
        question = {"model": "scripted", "prompt": "a", "max_tokens": 1}
        while http.post("/v1/completions", **question | {"user": "x" * 500, "stop": ["x" * 250] * 4} | LONG)[0] != 429:
            pass
        assert http.post("/v1/completions", **question)[0] == 200
        held.close()


def test_one_body_of_any_size_is_let_in_and_a_large_answer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_manager, "MemoryBudget", lambda: MemoryBudget(each=2**16, in_all=2**16))
    with http_engine() as http, answering(http, [5]):
        status, answer = http.post("/tokenize", prompt="a " * 100_000)
        assert (status, answer["count"]) == (200, 100_001)
        held = http.connection()
        held.putrequest("POST", "/tokenize")
        held.putheader("content-type", "application/json")
        held.putheader("content-length", str(50_000))
        held.endheaders(b"{")
        while http.post("/tokenize", prompt="a " * 20_000)[0] != 429:
            pass
        held.close()
