"""The origins of a streamed chat's tokens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ssd.frontend.output_collector import by_origin
from ssd.ipc.messages import Emission, Submit
from tests.frontend.http_engine import HttpEngine, http_engine
from tests.frontend.test_gateway import TOKENIZER
from tests.scripted_engine import following

IDS = TOKENIZER.encode("one two three four five six")
CHATS = "/v1/chat/completions"
ASKED = {"messages": [{"role": "user", "content": "Why?"}]}

ROUNDS = [  # (tokens, drafted, accepted, what was looked up), and the origins of the tokens
    (1, 0, 0, "", ["plain"]),
    (2, 2, 1, "first_round", ["draft", "rejected"]),
    (2, 1, 1, "hit", ["hit", "plain"]),
    (1, 3, 0, "late", ["rejected"]),
    (2, 4, 2, "token_not_covered", ["miss"]),  # the second one ended the request
    (1, 4, 3, "hit", ["hit"]),
]


@pytest.mark.parametrize(("tokens", "drafted", "accepted", "cache", "origins"), ROUNDS)
def test_a_round_has_draft_tokens_and_then_one_of_the_targets_own(
    tokens: int, drafted: int, accepted: int, cache: str, origins: list[str]
) -> None:
    ids = list(range(tokens))
    parts = list(by_origin(Emission(1, ids, drafted=drafted, accepted=accepted, cache=cache)))
    assert [origin for origin, _ in parts] == origins
    assert [token for _, part in parts for token in part] == ids and all(part for _, part in parts)


def rounds(submit: Submit) -> Iterator[Emission]:
    """Six tokens in four rounds: the prefill, a hit, a miss without draft tokens, a rejection at once."""
    yield Emission(submit.request, IDS[:1])
    yield Emission(submit.request, IDS[1:4], drafted=2, accepted=2, cache="hit")
    yield Emission(submit.request, IDS[4:5], cache="late")
    yield Emission(submit.request, IDS[5:6], drafted=2, cache="hit", finish_reason="length")


@pytest.fixture(scope="module")
def engine() -> Iterator[HttpEngine]:
    with http_engine() as engine, following(engine.engine, rounds):
        yield engine


def test_events_have_one_origin_if_that_is_asked_for(engine: HttpEngine) -> None:
    plain = [event["choices"][0] for event in engine.events(CHATS, **ASKED)]
    assert not [choice for choice in plain if "origin" in choice]
    told = [event["choices"][0] for event in engine.events(CHATS, **ASKED, return_origins=True, return_token_ids=True)]
    found = [(choice["origin"], choice["token_ids"]) for choice in told if "origin" in choice]
    merged = "".join(origin[0] * len(ids) for origin, ids in found)
    assert merged == "phhppr" and [token for _, ids in found for token in ids] == IDS
    texts = ["".join(choice["delta"].get("content") or "" for choice in each) for each in (plain, told)]
    assert texts[0] == texts[1] == TOKENIZER.decode(IDS)
    assert told[-1]["finish_reason"] == "length"


def test_a_stop_string_ends_the_parts_too(engine: HttpEngine) -> None:
    for stop in ("two", "one two", "three f"):
        found = [
            "".join(event["choices"][0]["delta"].get("content") or "" for event in engine.events(CHATS, **asked))
            for asked in ({**ASKED, "stop": stop}, {**ASKED, "stop": stop, "return_origins": True})
        ]
        assert found[0] == found[1] == TOKENIZER.decode(IDS).split(stop)[0]


def test_origins_are_for_streams(engine: HttpEngine) -> None:
    status, answer = engine.post(CHATS, **ASKED, return_origins=True)
    assert (status, answer["error"]["param"]) == (400, "return_origins")


def test_the_page_is_told_whether_thoughts_can_be_switched(engine: HttpEngine) -> None:
    assert b'"takes_enable_thinking":false' in engine.ask("GET", "/server_info")[2]
