"""What waits for a client: nothing lost, nothing twice, one chunk however many came."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.config.engine import Limits
from ssd.frontend.output_collector import Origin, OutputCollector, Part
from ssd.ipc import sockets
from ssd.ipc.public import Chunk, Done, Failed, Metrics, TokenLogprob, Usage, pack

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

    assert msgspec.convert({"slow_reader_tokens": 2**15}, Limits).slow_reader_tokens == 2**15
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"slow_reader_tokens": 2**15 + 1}, Limits)
    entry = TokenLogprob(2**31 - 1, -1e18, [(2**31 - 1, -1e18)] * 20)
    chunk = Chunk(2**63 - 1, "", [2**31 - 1] * 2**15, [entry] * 2**15)
    assert len(pack(chunk)[1]) < sockets.INTERNAL_BYTES - 2**22, "and text"
