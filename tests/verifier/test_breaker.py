"""When the draft is left alone and when it is tried again, on rounds and times that the test makes up."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle

import pytest
from msgspec import structs

from ssd.config.params import Mode, Speculation
from ssd.execution.runner import Runner
from ssd.ipc.messages import Release
from ssd.ipc.public import Message
from ssd.verifier.breaker import UNSEEN_S, Breaker, Seen
from ssd.verifier.draft_session import TrackedRequests
from tests.draft.audit import World, plainly
from tests.draft.pair import PAGE_SIZE, Clock, Draft, Pair, config, params, use_clock
from tests.models import tiny

VERIFY_S = 0.01
GOOD = Seen(rows=2, shown=True, ticked=True, drafted=2, accepted=2)
USELESS = Seen(rows=2, shown=True, ticked=True, drafted=2)
UNCOVERED = Seen(rows=2, shown=True, ticked=True)
UNSEEN = Seen(rows=2, ticked=True)
SILENT = Seen(rows=2)
IN_VAIN = Seen(rows=2, ticked=True, lost=VERIFY_S)
TORN = Seen(rows=2, ticked=True, rejected=True)
NOBODY = Seen()


class Played:
    """A breaker and the time: a round lasts a verification and what it has lost by waiting."""

    def __init__(self, *seen: Seen) -> None:
        self.breaker, self.now, self.lost = Breaker(), 1000.0, 0.0
        self.breaker.round(NOBODY, self.now, VERIFY_S)
        if seen:
            self.until_it_changes(*seen)
            assert self.breaker.state == "open"

    def play(self, seen: Seen, lasted: float | None = None, verify_s: float = VERIFY_S) -> None:
        self.now += verify_s + seen.lost if lasted is None else lasted
        self.lost += seen.lost
        self.breaker.round(seen, self.now, verify_s)

    def until_it_changes(self, *seen: Seen, most: float = 60.0) -> float:
        """Rounds in turn until the state changes; returns the seconds, or about `most`."""
        before, began = self.breaker.state, self.now
        rounds: Iterator[Seen] = cycle(seen)
        while self.breaker.state == before and self.now < began + most:
            self.play(next(rounds))
        return self.now - began


def changes(played: Played, *seen: Seen) -> bool:
    before = played.breaker.state
    played.until_it_changes(*seen)
    return played.breaker.state != before


@pytest.mark.parametrize(
    ("seen", "seconds", "reason"),
    [
        (SILENT, 0.25, "no sign of life"),
        (replace(SILENT, reading=True), 2.0, "no sign of life"),
        (UNSEEN, 2.0, "nothing came"),
        (replace(UNSEEN, reading=True), 2.0, "nothing came"),
        (IN_VAIN, 0.5, "waiting for it"),
        (replace(IN_VAIN, ticked=False), 0.25, "no sign of life"),
        (replace(GOOD, lost=0.035), 0.405, "waiting for it"),
        (TORN, 0.03, "not sound"),
        (USELESS, 0.24, "not accepted"),
    ],
)
def test_what_opens_it(seen: Seen, seconds: float, reason: str) -> None:
    played = Played()
    assert played.until_it_changes(seen) == pytest.approx(seconds, abs=VERIFY_S + seen.lost)
    assert played.breaker.state == "open" and reason in played.breaker.reason
    assert not played.breaker.admits(0)
    assert played.lost < 0.4


@pytest.mark.parametrize(
    "seen",
    [
        (GOOD,),
        (UNCOVERED,),
        (NOBODY,),
        (*[SILENT] * 20, UNCOVERED),
        (*[SILENT] * 20, UNSEEN, *[SILENT] * 20, UNCOVERED),
        (*[SILENT] * 20, replace(NOBODY, ticked=True), *[SILENT] * 20, UNCOVERED),
        (*[UNSEEN] * 150, UNCOVERED),
        (*[IN_VAIN] * 10, *[GOOD] * 20),
        (*[USELESS] * 15, replace(GOOD, accepted=4)),
        (replace(GOOD, lost=0.005),),
        (TORN, TORN, replace(GOOD, accepted=5)),
    ],
)
def test_what_does_not(seen: tuple[Seen, ...]) -> None:
    played = Played()
    assert not changes(played, *seen)
    assert played.breaker.admits(7)


@pytest.mark.parametrize("verify_s", [0.002, 0.006, 0.05, 0.2])
@pytest.mark.parametrize("stopped_s", [0.05, 0.1, 0.2])
def test_a_draft_that_loses_its_core_for_a_moment_is_kept(stopped_s: float, verify_s: float) -> None:
    """The target waits as long as it ever does, then goes on until the draft has its core again. Every second."""
    played = Played()
    for _ in range(60):
        late = min(stopped_s, 0.2)
        played.play(replace(SILENT, lost=late), late, verify_s)
        for _ in range(round((stopped_s - late) / verify_s)):
            played.play(SILENT, verify_s, verify_s)
        for _ in range(round(1 / verify_s)):
            played.play(GOOD, verify_s, verify_s)
        assert played.breaker.state == "closed"


def test_a_target_that_was_away_itself_knows_nothing_of_the_draft() -> None:
    played = Played()
    for _ in range(20):
        played.play(SILENT, lasted=30.0)
        played.play(SILENT)
        played.play(UNCOVERED)
    assert played.breaker.state == "closed"


def test_slow_verifications_make_it_no_hastier() -> None:
    """Of a target that takes a second for a round, three rounds are too few to judge by, and it waits by seconds."""
    played = Played()
    for _ in range(2):
        played.play(replace(SILENT, lost=0.2), 1.2, verify_s=1.0)
    assert played.breaker.state == "closed"
    played.play(SILENT, 1.0, verify_s=1.0)
    assert played.breaker.reason == "there is no sign of life"


def test_nothing_is_saved_up() -> None:
    """Ten good seconds do not make waits in vain last longer."""
    played = Played()
    played.until_it_changes(GOOD, most=10)
    assert played.breaker.patient
    assert played.until_it_changes(IN_VAIN) == pytest.approx(0.5)


def test_one_request_tries_after_a_back_off_that_doubles() -> None:
    played = Played(UNSEEN)
    waits = []
    for _ in range(9):
        waits.append(played.until_it_changes(NOBODY))
        assert played.breaker.state == "half_open" and played.breaker.admits(0) and not played.breaker.admits(1)
        played.until_it_changes(IN_VAIN)
        assert played.breaker.state == "open"
    assert waits == pytest.approx([0.25, 0.5, 1, 2, 4, 8, 16, 32, 32], abs=2 * VERIFY_S)


@pytest.mark.parametrize("stall", [SILENT, replace(SILENT, reading=True)], ids=["drafts", "reads"])
@pytest.mark.parametrize("seconds", [1.0, 2.2, 10.0])
def test_a_stall_that_has_ended_is_forgiven_at_once(stall: Seen, seconds: float) -> None:
    """The draft has a long text to catch up with, in which some waits are in vain."""
    played = Played()
    played.until_it_changes(GOOD, most=1)
    played.play(replace(stall, lost=0.2))
    ends = played.now + seconds - 0.2
    while played.now < ends:
        played.play(stall)
    opened = not stall.reading or seconds > 2
    assert (played.breaker.state == "open") == opened
    assert played.breaker.briefly_stalled == (opened and seconds < UNSEEN_S + 0.25), "it has its texts for two seconds"
    played.play(UNCOVERED)
    assert played.breaker.state == "closed" and played.breaker.admits(5) and not played.breaker.briefly_stalled
    assert played.breaker.patient
    for _ in range(20):
        played.play(IN_VAIN)
    assert played.breaker.state == "closed"


def test_slow_steps_of_a_draft_that_reads_use_up_nothing_where_nothing_is_lost() -> None:
    played = Played()
    for _ in range(4):
        played.until_it_changes(replace(SILENT, reading=True), most=0.5)
        played.play(replace(UNCOVERED, reading=True))
    played.until_it_changes(SILENT)
    assert played.breaker.briefly_stalled


def test_a_draft_that_stalls_again_and_again_is_not_forgiven() -> None:
    """Three stalls in a row are; one that lasts has its next ones forgiven again."""
    played, closed = Played(), []
    for stall in range(6):
        played.until_it_changes(SILENT)
        played.play(UNCOVERED)
        closed.append(played.breaker.state == "closed")
        if not closed[-1]:
            assert played.until_it_changes(NOBODY) == pytest.approx(2 * 2 ** (stall - 3), abs=2 * VERIFY_S)
            played.until_it_changes(GOOD)
    assert closed == [True, True, True, False, False, False]
    played.until_it_changes(GOOD, most=200)
    played.until_it_changes(SILENT)
    played.play(UNCOVERED)
    assert played.breaker.state == "closed"


@pytest.mark.parametrize("mode", ["sd", "ssd", "auto"])
@pytest.mark.parametrize("sequences", [1, 5])
@pytest.mark.parametrize("seconds", [1.0, 2.0])
def test_after_a_stall_of_the_draft_its_tokens_are_there_at_once(
    world: World, mode: Mode, sequences: int, seconds: float
) -> None:
    """It is told of no release, hears of all outcomes late, and is right at once, for every sequence."""
    settings = config(Speculation(mode, 4, (3,), "jit"))
    planned, usable = structs.replace(settings.speculation, mode="sd"), [True]
    prompts = [tiny.token_ids(12, request) for request in range(sequences)]
    plain = plainly(world, prompts, 0.0, 180)
    pair = Pair(settings, world.target, Draft(settings, Runner(world.target.model, 400, PAGE_SIZE)))
    if mode == "auto":
        pair.proposer.plans.planned = lambda row, _: planned if usable[-1] else structs.replace(planned, mode="ngram")  # type: ignore[method-assign]
        situate = pair.proposer.tuning.situate
        pair.proposer.tuning.situate = lambda kinds, drafted, tokens: (
            usable.append(bool(drafted)) or situate(kinds, drafted, tokens)
        )  # type: ignore[method-assign,func-returns-value]
    clock, held, told, brought = Clock(), list[Message](), list[Message](), list[float]()
    begins, ends = 1000.3, 1000.3 + seconds

    def later() -> None:
        """A round takes 50 ms."""
        clock.sleep(0.05)
        brought.append(clock.now)
        while held and clock.now >= ends:
            pair.deliver(held.pop(0))

    def post(message: Message) -> bool:
        told.append(message)
        if begins <= clock.now < ends:
            held.append(message)
            return True
        return pair.deliver(message)

    pair.between_steps, pair.post = later, post
    use_clock(clock)
    try:
        texts = pair.run(prompts, params(sequences, 180))
    finally:
        use_clock(time)
    assert texts.ids == plain.ids
    after = sum(now > ends for now in brought)
    before = sum(now <= ends for now in brought)
    assert before > 15 and after <= 3 + (180 - before) / 5
    assert not any(isinstance(message, Release) for message in told[:-sequences])


def test_a_target_without_work_lets_the_back_off_pass() -> None:
    played = Played(UNSEEN)
    played.play(NOBODY, lasted=600.0)
    assert played.breaker.state == "half_open"


@pytest.mark.parametrize(
    ("seen", "seconds"),
    [(UNCOVERED, 2.0), (UNSEEN, 2.0), (SILENT, 0.25), (IN_VAIN, 0.1), (USELESS, 0.04), (TORN, 0.01)],
)
def test_a_trial_ends(seen: Seen, seconds: float) -> None:
    """One that costs nothing lasts two seconds: the text may be long, and hits be rare."""
    played = Played(TORN)
    played.until_it_changes(NOBODY)
    assert not changes(played, NOBODY), "without a request there is no trial"
    assert played.until_it_changes(seen) == pytest.approx(seconds, abs=2 * VERIFY_S)
    assert played.breaker.state == "open"


def test_a_trial_lasts_as_long_as_a_long_back_off() -> None:
    played = Played(UNSEEN)
    for _ in range(5):
        played.until_it_changes(NOBODY)
        played.until_it_changes(TORN)
    played.until_it_changes(NOBODY)
    assert played.until_it_changes(UNCOVERED) == pytest.approx(8, abs=2 * VERIFY_S)


def test_the_first_token_that_is_right_closes_it() -> None:
    played = Played(UNSEEN)
    played.until_it_changes(NOBODY)
    assert played.until_it_changes(UNCOVERED, UNCOVERED, GOOD) == pytest.approx(3 * VERIFY_S)
    assert played.breaker.state == "closed" and played.breaker.admits(5)


@pytest.mark.parametrize(("good", "wait"), [(1, 2.0), (3.9, 2.0), (4.1, 1.0), (6.1, 0.5), (7.1, 0.25), (50, 0.25)])
def test_one_that_lasts_is_forgiven_by_and_by(good: float, wait: float) -> None:
    """Its next back-off halves when it has been in use for twice as long."""
    played = Played(UNSEEN)
    for _ in range(2):
        played.until_it_changes(NOBODY)
        played.until_it_changes(TORN)
    played.until_it_changes(NOBODY)
    played.until_it_changes(GOOD)
    played.until_it_changes(GOOD, most=good)
    played.until_it_changes(TORN)
    assert played.until_it_changes(NOBODY) == pytest.approx(wait, abs=2 * VERIFY_S)


@pytest.mark.parametrize("every", [0.3, 1.0, 3.0])
def test_on_a_busy_machine_it_is_not_given_up_and_taken_back_all_the_time(every: float) -> None:
    """A minute with bursts of waits in vain; after it, the draft is used as before."""
    chance, played = random.Random(1), Played()
    given_up, late, calm = 0, 0, played.now + chance.expovariate(1 / every)
    while played.now < 1060:
        if played.now >= calm:
            late, calm = chance.randint(3, 40), played.now + chance.expovariate(1 / every)
        before = played.breaker.state
        played.play(NOBODY if before == "open" else IN_VAIN if late > 0 else GOOD)
        late -= 1
        given_up += before == "closed" and played.breaker.state == "open"
    assert given_up <= 12
    while played.breaker.state != "closed":
        assert played.until_it_changes(NOBODY if played.breaker.state == "open" else GOOD) <= 32.1
    assert not changes(played, GOOD)


# -- where it is measured what a draft brings -----------------------------------------------------------------------


def test_a_draft_that_is_slower_than_none_is_left_alone_and_its_trials_cost_little() -> None:
    """Its tokens are right, but each round takes too long: by a fifth, then by a hundredth."""
    for gain in (-0.2, -0.01):
        played, lost, open_s = Played(), 0.0, 0.0
        while played.now < 1100:
            used = played.breaker.state != "open"
            lost, open_s = lost - gain * used, open_s + VERIFY_S * (not used)
            played.play(replace(GOOD, gain=gain) if used else NOBODY)
        assert open_s > 50 and "without it is" in played.breaker.reason
        assert lost < 10_000 * 0.01 and played.breaker.state == "open"


def test_a_draft_on_trial_must_win_and_is_kept_then() -> None:
    played = Played(TORN)
    played.until_it_changes(NOBODY)
    winning = (replace(GOOD, gain=-0.4), replace(GOOD, gain=0.6))
    assert played.until_it_changes(*winning) == pytest.approx(0.4, abs=0.02)
    assert played.breaker.state == "closed" and not changes(played, *winning)


# -- single requests ---------------------------------------------------------------------------------------------------


def test_a_request_that_the_draft_has_lost_is_given_up_and_may_return() -> None:
    tracked = TrackedRequests()
    for request in (1, 2):
        tracked.add(request, awaited=True)
    kept = [tracked.note_shown(1, anything=False, waited=0.125, now=10 + wait / 8) for wait in range(4)]
    assert kept == [True, True, True, False] and 1 not in tracked and 2 in tracked
    assert not tracked.may_return(1, 11.3) and tracked.may_return(1, 11.4) and not tracked.may_return(2, 11.4)
    tracked.add(1, awaited=True)
    assert tracked.note_shown(1, anything=False, waited=0.04, now=11.5), "it is waited for again, not for long"
    assert not tracked.note_shown(1, anything=False, waited=0.04, now=11.6)


def test_what_is_shown_restores_trust() -> None:
    tracked = TrackedRequests()
    tracked.add(1, awaited=True)
    for now in range(10):
        for anything in (False, False, True):
            assert tracked.note_shown(1, anything, waited=0.2, now=now)
    assert tracked.note_shown(1, anything=False, waited=0.0, now=10.9), "without a wait it costs nothing"
    assert not tracked.note_shown(1, anything=False, waited=0.0, now=11.1), "but nothing comes any more"


def test_who_is_waited_for() -> None:
    """A text that is computed again is not, until something was seen of it."""
    tracked = TrackedRequests()
    tracked.add(1, awaited=True)
    tracked.add(2, awaited=False)
    assert (tracked.worth_waiting(1), tracked.worth_waiting(2), tracked.worth_waiting(3)) == (True, False, False)
    assert tracked.reading
    for request in (1, 2):
        tracked.note_shown(request, anything=True, waited=0.0, now=0)
    assert tracked.worth_waiting(2) and not tracked.reading
    assert tracked.forget(1) and not tracked.forget(1) and tracked.clear() == [2] and len(tracked) == 0
