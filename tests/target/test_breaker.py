"""When the draft is left alone and when it is tried again, on rounds that the test makes up."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, cycle, takewhile

import pytest

from ssd.target.draft_session import Breaker, Seen, TrackedRequests

GOOD = Seen(rows=2, shown=True, ticked=True, drafted=2, accepted=2)
USELESS = Seen(rows=2, shown=True, ticked=True, drafted=2)
UNCOVERED = Seen(rows=2, shown=True, ticked=True)
SILENT = Seen(rows=2)
IN_VAIN = Seen(rows=2, ticked=True, waited=40.0, in_vain=True)
TORN = Seen(rows=2, ticked=True, rejected=True)
NOBODY = Seen()


def play(breaker: Breaker, *seen: Seen, most: int = 2000) -> int:
    """Rounds in turn until the state changes; how many."""
    before = breaker.state
    rounds: Iterator[Seen] = cycle(seen)
    for played in range(1, most + 1):
        breaker.round(next(rounds))
        if breaker.state != before:
            return played
    return most + 1


def opened(*seen: Seen) -> Breaker:
    breaker = Breaker()
    play(breaker, *seen)
    assert breaker.state == "open"
    return breaker


@pytest.mark.parametrize(
    ("seen", "rounds", "reason"),
    [
        (SILENT, 3, "no sign of life"),
        (IN_VAIN, 3, "waiting for it"),
        (replace(IN_VAIN, ticked=False), 3, "waiting for it"),
        (TORN, 3, "not sound"),
        (USELESS, 24, "not accepted"),
        (replace(SILENT, reading=True), 32, "nothing came"),
        (replace(SILENT, ticked=True), 32, "nothing came"),
        (replace(GOOD, waited=3.5), 3, "waiting for it"),
    ],
)
def test_what_opens_it(seen: Seen, rounds: int, reason: str) -> None:
    breaker = Breaker()
    assert play(breaker, seen) == rounds
    assert breaker.state == "open" and reason in breaker.reason
    assert not breaker.admits(0)


@pytest.mark.parametrize(
    "seen",
    [
        (GOOD,),
        (UNCOVERED,),
        (NOBODY,),
        (SILENT, SILENT, UNCOVERED),
        (SILENT, SILENT, replace(SILENT, ticked=True), UNCOVERED),
        (replace(GOOD, waited=50.0), *[GOOD] * 70),
        (IN_VAIN, IN_VAIN, replace(GOOD, accepted=5)),
        (*[USELESS] * 15, replace(GOOD, accepted=4)),
        (replace(GOOD, waited=0.8),),
        (TORN, TORN, replace(GOOD, accepted=5)),
    ],
)
def test_what_does_not(seen: tuple[Seen, ...]) -> None:
    breaker = Breaker()
    assert play(breaker, *seen) > 2000
    assert breaker.admits(7)


def test_nothing_is_saved_up() -> None:
    """A thousand good rounds do not make three missed ones last longer."""
    breaker = Breaker()
    play(breaker, GOOD, most=1000)
    assert breaker.patient
    assert play(breaker, IN_VAIN) == 3


def test_one_request_tries_after_a_back_off_that_doubles() -> None:
    breaker = opened(SILENT)
    waits = []
    for _ in range(6):
        waits.append(play(breaker, NOBODY))
        assert breaker.state == "half_open" and breaker.admits(0) and not breaker.admits(1)
        assert play(breaker, IN_VAIN) == 1
        assert breaker.state == "open"
    assert waits == [32, 64, 128, 256, 512, 512]


@pytest.mark.parametrize(("seen", "rounds"), [(UNCOVERED, 32), (SILENT, 32), (USELESS, 4), (TORN, 1)])
def test_a_trial_ends(seen: Seen, rounds: int) -> None:
    """One that costs nothing lasts as long as the back-off before it: the text may be long, and hits be rare."""
    breaker = opened(TORN)
    play(breaker, NOBODY)
    assert play(breaker, NOBODY) > 2000, "without a request there is no trial"
    assert play(breaker, seen) == rounds
    assert breaker.state == "open"


def test_the_first_token_that_is_right_closes_it() -> None:
    breaker = opened(SILENT)
    play(breaker, NOBODY)
    assert play(breaker, UNCOVERED, UNCOVERED, GOOD) == 3
    assert breaker.state == "closed" and breaker.admits(5)


@pytest.mark.parametrize(("good", "wait"), [(10, 256), (500, 256), (512, 128), (768, 64), (896, 32), (5000, 32)])
def test_one_that_lasts_is_forgiven_by_and_by(good: int, wait: int) -> None:
    """Its next back-off halves when it has been in use for twice as many rounds."""
    breaker = opened(SILENT)
    for _ in range(2):
        play(breaker, NOBODY)
        play(breaker, IN_VAIN)
    play(breaker, NOBODY)
    play(breaker, GOOD)
    play(breaker, GOOD, most=good)
    play(breaker, SILENT)
    assert play(breaker, NOBODY) == wait


@pytest.mark.parametrize("every", [20, 60, 200])
def test_on_a_busy_machine_it_is_not_given_up_and_taken_back_all_the_time(every: int) -> None:
    """A minute of 80 rounds a second with bursts of waits in vain; after it, the draft is used as before."""
    chance, breaker, seconds, rounds = random.Random(1), Breaker(), 60, 80
    given_up, late, calm = 0, 0, chance.expovariate(1 / every)
    for _ in range(rounds * seconds):
        calm -= 1
        if calm <= 0:
            late, calm = chance.randint(3, 6), chance.expovariate(1 / every)
        before = breaker.state
        breaker.round(NOBODY if before == "open" else IN_VAIN if late > 0 else GOOD)
        late -= 1
        given_up += before == "closed" and breaker.state == "open"
    assert given_up <= 12
    while breaker.state != "closed":
        waited = play(breaker, NOBODY if breaker.state == "open" else GOOD)
        assert waited <= 512
    assert play(breaker, GOOD) > 2000


# -- single requests ---------------------------------------------------------------------------------------------------


def test_a_request_that_the_draft_has_lost_is_given_up_and_may_return() -> None:
    tracked = TrackedRequests()
    for request in (1, 2):
        tracked.add(request, awaited=True)
    kept = [tracked.showed(1, anything=False, waited=True, now=10) for _ in range(4)]
    assert kept == [True, True, True, False] and 1 not in tracked and 2 in tracked
    assert not tracked.may_return(1, 41) and tracked.may_return(1, 42) and not tracked.may_return(2, 42)
    tracked.add(1, awaited=True)
    assert not tracked.showed(1, anything=False, waited=True, now=42), "it has one wait"


def test_what_is_shown_restores_trust() -> None:
    tracked = TrackedRequests()
    tracked.add(1, awaited=True)
    for _ in range(10):
        assert all(tracked.showed(1, anything, waited=True, now=0) for anything in (False, False, True))
    unseen = takewhile(lambda _: tracked.showed(1, anything=False, waited=False, now=0), count())
    assert 70 < len(list(unseen)) < 90, "without a wait it costs less"


def test_who_is_waited_for() -> None:
    """A text that is computed again is not, until something was seen of it."""
    tracked = TrackedRequests()
    tracked.add(1, awaited=True)
    tracked.add(2, awaited=False)
    assert (tracked.worth_waiting(1), tracked.worth_waiting(2), tracked.worth_waiting(3)) == (True, False, False)
    assert tracked.reading
    for request in (1, 2):
        tracked.showed(request, anything=True, waited=False, now=0)
    assert tracked.worth_waiting(2) and not tracked.reading
    assert tracked.forget(1) and not tracked.forget(1) and tracked.clear() == [2] and len(tracked) == 0
