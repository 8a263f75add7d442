"""What the receiver makes of speculations that come in time, late, wrong or doubled."""

from __future__ import annotations

import random

from ssd.config.params import Speculation
from ssd.ipc.board import Prepared
from ssd.ipc.messages import Admit, Launch, Verified
from ssd.law import Law
from ssd.plugins.remote.link import Entry, Trunk
from ssd.plugins.remote.receiver.request import ReceivedRequest

TEXT = list(range(100, 120))


def request() -> ReceivedRequest:
    return ReceivedRequest(Admit(5, 1, 3, TEXT, Law(), Speculation("ssd", 4, (3,), "jit")), 7)


def say(known: ReceivedRequest, round: int, base: int, accepted: int, *tokens: int) -> Prepared | None:
    """Let the draft say what follows an outcome: its token, and more."""
    found = known.heard(Entry(5, round, base, accepted, tokens[0], 2, 3, list(tokens[1:])))
    return found[0] if found else None


def brief(shown: Prepared | None) -> tuple[int, ...] | None:
    """Round, accepted length, token and ids."""
    return None if shown is None else (shown.key.round, shown.key.accepted, shown.key.token, *shown.ids)


def test_a_speculation_in_time_is_shown_with_its_place_and_again_when_it_is_longer() -> None:
    known = request()
    first = say(known, 3, 20, 0, 9, 1)
    assert first is not None and first[1:] == ((7, 5, 3, 20, 0, 9), [1], (2, 3))
    assert say(known, 3, 20, 0, 9, 1) is None
    longer = say(known, 3, 20, 0, 9, 1, 2)
    assert longer is not None and longer.entry == first.entry and longer.ids == [1, 2]
    assert say(known, 3, 20, 0, 9, 7, 7, 7) is None  # the target may have read the other one


def test_what_was_taken_goes_on_as_the_outcome_of_the_next_round() -> None:
    known = request()
    say(known, 3, 20, 0, 9, 1, 2, 3, 4, 5)
    assert known.outcome(Verified(5, 3, 0, 9, 2))
    assert known.text == [*TEXT, 9] and known.flight == [1, 2]
    assert [brief(shown) for shown in known.useful()] == [(4, 2, 3, 4, 5)]


def test_a_late_speculation_that_agrees_with_what_came_since_is_of_use() -> None:
    known = request()
    assert known.outcome(Verified(5, 3, 0, 9, 0)) and known.outcome(Verified(5, 4, 0, 1, 0))
    assert brief(say(known, 3, 20, 0, 9, 1, 2, 3)) == (5, 0, 2, 3)
    assert say(known, 3, 20, 0, 8, 1, 2, 3) is None
    assert say(known, 4, 21, 0, 7, 2, 3) is None
    assert say(known, 4, 21, 1, 1, 2, 3) is None  # so many were not accepted


def test_a_break_in_what_is_verified_is_an_outcome_too() -> None:
    known = request()
    say(known, 3, 20, 0, 9, 1, 2)
    assert known.outcome(Verified(5, 3, 0, 9, 2))
    assert brief(say(known, 3, 20, 0, 9, 1, 7, 8)) == (4, 1, 7, 8)
    assert say(known, 4, 21, 1, 6, 5) is None  # the draft has not said what it follows
    assert known.expects(Trunk(5, 4, 21, [1, 2])) == []
    assert brief(say(known, 4, 21, 1, 6, 5)) == (4, 1, 6, 5)
    assert known.outcome(Verified(5, 4, 1, 7, 1))
    assert known.text == [*TEXT, 9, 1, 7] and known.flight == [8]


def test_a_target_that_waits_gets_what_is_there_and_says_what_it_took() -> None:
    known = request()
    say(known, 3, 20, 0, 9, 1, 2, 3)
    assert known.outcome(Verified(5, 3, 0, 9, None)) and known.flight is None
    assert [brief(shown) for shown in known.useful()] == [(3, 0, 9, 1, 2, 3)]
    assert known.launched(Launch(5, 4, 2)) and known.flight == [1, 2]
    assert [brief(shown) for shown in known.useful()] == [(4, 2, 3)]
    assert known.outcome(Verified(5, 4, 0, 50, None))
    assert known.launched(Launch(5, 5, 2, [60, 61])) and known.flight == [60, 61]


def test_what_does_not_follow_is_refused() -> None:
    known = request()
    assert not known.outcome(Verified(5, 4, 0, 9, 0))  # of another round
    assert not known.outcome(Verified(5, 3, 1, 9, 0))  # accepted more than was verified
    assert not known.outcome(Verified(5, 3, 0, 9, 1))  # verifies what was not shown
    assert not known.launched(Launch(5, 3, 0))  # does not wait
    assert known.outcome(Verified(5, 3, 0, 9, None))
    assert not known.launched(Launch(5, 4, 1)) and not known.launched(Launch(5, 3, 0))


def test_nothing_grows_without_bound() -> None:
    known = request()
    for token in range(500):
        say(known, 3, 20, 0, token, 1)
    assert len(known.shown) <= 63 and len(known._paths) <= 256
    for round in range(3, 300):
        assert known.outcome(Verified(5, round, 0, 9, 0))
    assert len(known._rounds) <= 64


def test_the_draft_s_trunk_says_what_comes_next_and_breaks_in_it_are_answered_rounds_later() -> None:
    known = request()
    found = known.expects(Trunk(5, 3, 20, [9, 1, 2, 3, 4, 5]))
    assert found is not None and [brief(shown) for shown in found] == [(3, 0, 9, 1, 2, 3, 4, 5)]
    assert say(known, 3, 20, 3, 7, 8, 8) is None  # a break that this round cannot have
    assert known.outcome(Verified(5, 3, 0, 9, 2))  # verifies 1 2
    known.useful()
    assert {brief(shown) for shown in known.shown.values()} == {(4, 2, 3, 4, 5), (4, 2, 7, 8, 8)}
    assert known.outcome(Verified(5, 4, 2, 7, 2)) and known.useful() == []
    assert known.text == [*TEXT, 9, 1, 2, 7] and known.flight == [8, 8] and known.expected == [8, 8]
    assert known.expects(Trunk(5, 4, 21, [1, 2, 3])) == []  # it knows no better yet
    assert known.expects(Trunk(5, 3, 19, [1])) is None


def test_it_has_the_texts_of_the_target_whatever_arrives_when() -> None:
    """A target that writes a fixed text, and a draft that is wrong now and then, and late by several rounds."""
    choice = random.Random(3)
    right = [choice.randrange(4) for _ in range(2000)]
    known, text, flight, hits = request(), list(TEXT), list[int](), 0
    waiting: list[tuple[int, int, int, list[int]]] = []
    for round in range(3, 300):
        base = len(text)
        known.expects(Trunk(5, round, base, flight))
        for accepted in range(len(flight) + 1):
            if flight[:accepted] == right[base - 20 : base - 20 + accepted]:
                start = base - 20 + accepted
                guess = [token if choice.random() < 0.8 else choice.randrange(4) for token in right[start : start + 9]]
                waiting.append((round, base, accepted, guess))
        choice.shuffle(waiting)
        for _ in range(len(waiting) // 2):
            late, then, k, guess = waiting.pop()
            say(known, late, then, k, *guess)
        accepted = next((i for i, token in enumerate(flight) if token != right[base - 20 + i]), len(flight))
        token = right[base - 20 + accepted]
        shown = known.shown.get((round, accepted, token))
        ids = [] if shown is None else shown.ids[: choice.randrange(5)]
        hits += bool(ids)
        assert known.outcome(Verified(5, round, accepted, token, len(ids)))
        known.useful()
        text += [*flight[:accepted], token]
        flight = ids
        assert (known.text, known.flight) == (text, flight)
    assert hits > 100
