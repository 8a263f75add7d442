"""What waits for a client: nothing lost, nothing twice, one chunk however many came."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.frontend.output_collector import Origin, OutputCollector, Part, by_origin
from ssd.frontend.request_manager import MAX_UNREAD
from ssd.ipc import sockets
from ssd.ipc.messages import Emission, Submit
from ssd.ipc.public import Chunk, Done, Failed, Metrics, TokenLogprob, Usage, pack
from tests.frontend.http_engine import HttpEngine, http_engine
from tests.frontend.test_gateway import TOKENIZER
from tests.scripted_engine import following

DONE = Done(3, "stop", "!", [1], Usage(1, 2), Metrics())


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.booleans()), max_size=30))
def test_what_was_sent_is_what_came_whoever_waits(script: list[tuple[str, int, bool]]) -> None:
    output, sent = OutputCollector(3), list[Chunk]()
    for text, count, deliver in script:
        entries = [TokenLogprob(7, -1.0, [])] * count
        output.add(text, [7] * count, entries)
        if deliver:
            assert isinstance(output.head, Chunk)
            sent.append(output.head)
            assert not output.sent()
            assert output.head is None and output.tokens == 0
        else:
            waiting = output.head
            assert isinstance(waiting, Chunk) and output.tokens == len(waiting.token_ids) == len(waiting.logprobs or [])
    output.end(DONE)
    if isinstance(output.head, Chunk):
        sent.append(output.head)
        assert not output.sent()
    assert output.head == DONE and output.sent()
    assert "".join(chunk.text for chunk in sent) == "".join(text for text, _, _ in script)
    assert sum(len(chunk.token_ids) for chunk in sent) == sum(count for _, count, _ in script)


def test_log_probabilities_of_the_prompt_come_once() -> None:
    output = OutputCollector(3)
    output.add("a", [1], None, [TokenLogprob(1, -1.0, [])])
    output.add("b", [2])
    assert output.head == Chunk(3, "ab", [1, 2], None, [TokenLogprob(1, -1.0, [])])


@given(st.lists(st.tuples(st.sampled_from(["hit", "miss", "plain"]), st.integers(1, 3), st.booleans()), max_size=30))
def test_tokens_of_different_origins_stay_apart_and_in_order(script: list[tuple[Origin, int, bool]]) -> None:
    output, sent = OutputCollector(3), list[Part]()

    def deliver() -> None:
        while isinstance(part := output.head, Part):
            sent.append(part)
            before = output.tokens
            assert not output.sent() and output.tokens == before - len(part.token_ids)

    for number, (origin, count, delivers) in enumerate(script):
        output.add(f"{number} ", [number] * count, origin=origin)
        if delivers:
            deliver()
            assert output.head is None and output.tokens == 0 and output.seconds == 0
    output.end(DONE)
    deliver()
    assert output.head == DONE and output.sent()
    origins = [(token, part.origin) for part in sent for token in part.token_ids]
    assert origins == [(number, origin) for number, (origin, count, _) in enumerate(script) for _ in range(count)]
    assert "".join(part.text for part in sent) == "".join(f"{number} " for number in range(len(script)))
    if not any(delivers for *_, delivers in script):
        assert all(a.origin != b.origin for a, b in itertools.pairwise(sent))


def test_who_is_dropped_learns_the_end_only() -> None:
    output = OutputCollector(3)
    assert output.seconds == 0
    output.add("a", [1])
    assert output.seconds > 0
    output.drop(Failed(3, "slow_reader", "too slow"))
    assert output.head == Failed(3, "slow_reader", "too slow") and output.tokens == 0
    assert output.sent()


def test_as_many_tokens_as_may_wait_fit_a_message_with_all_their_alternatives() -> None:
    assert MAX_UNREAD < 2**15
    entry = TokenLogprob(2**31 - 1, -1e18, [(2**31 - 1, -1e18)] * 20)
    chunk = Chunk(2**63 - 1, "", [2**31 - 1] * 2**15, [entry] * 2**15)
    assert len(pack(chunk)[1]) < sockets.INTERNAL_BYTES - 2**22, "and text"


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


def test_the_page_is_told_whether_thoughts_can_be_switched(engine: HttpEngine) -> None:
    assert b'"takes_enable_thinking":false' in engine.ask("GET", "/server_info")[2]
