"""KVSpans and pages: who gets them, who waits for them, and who pays when they run out."""

from __future__ import annotations

from ssd.execution.pages import PagePool
from ssd.verifier.scheduler import Scheduler
from tests.verifier.scheduling import commit, requests, scheduler, sequence, step


def test_places_are_given_in_the_order_of_arrival_and_given_again() -> None:
    made = scheduler(budget=50, places=2, lengths=[3, 3, 3, 3])
    assert requests(made.admit()) == [0, 1] and made.admit() == []
    assert sorted(s.slot for s in made.running) == [0, 1]
    slot = made.running[0].slot
    made.remove(made.running[0])
    assert requests(made.admit()) == [2] and made.running[-1].slot == slot
    assert requests(made.running) == [1, 2] and requests(list(made.waiting)) == [3]


def test_what_does_not_fit_waits_and_nobody_overtakes_it() -> None:
    made = scheduler(budget=50, pages=5, lengths=[12, 12, 1])
    step(made)
    assert requests(made.running) == [0] and requests(list(made.waiting)) == [1, 2]
    made.remove(made.running[0])
    made.admit()
    assert requests(made.running) == [1, 2]


def test_pages_that_running_prompts_will_need_are_not_given_away() -> None:
    """The first one has read a tenth of its prompt; the pages for the rest are free, but not for another one."""
    made = scheduler(budget=4, pages=12, lengths=[40, 8])
    for _ in range(9):
        step(made)
        assert requests(made.running) == [0] and requests(list(made.waiting)) == [1]
    made.remove(made.running[0])
    assert requests(made.admit()) == [1]


def test_pages_that_are_shared_are_not_needed_twice() -> None:
    """Two prompts of 18 with 16 tokens in common, in pages for 28."""
    pool = PagePool(7, 4)
    made = Scheduler(pool, 8, 50)
    for request in range(2):
        made.add(sequence(pool, request, [*range(16), 100 + request, 7]))
        step(made)
    assert requests(made.running) == [0, 1] and pool.live == 6


def test_alone_a_prompt_may_take_the_whole_cache() -> None:
    """Its one token more needs no page: it ends with it."""
    assert step(scheduler(budget=50, pages=2, lengths=[8])) == [(0, 8)]


def test_removing_gives_everything_back_wherever_a_sequence_is() -> None:
    made = scheduler(budget=6, places=2, lengths=[10, 3, 4])
    step(made)
    for request in (2, 0, 1):  # waiting, in the middle of its prompt, not yet begun
        found = made.find(request)
        assert found is not None
        made.remove(found)
        assert made.find(request) is None
    assert not made.running and not made.waiting and made._pool.live == 0


def test_the_newest_pays_and_keeps_its_tokens() -> None:
    """Three sequences of two pages in six; as the oldest wants a third, the newest goes to the front of the queue
    with every token it has, and comes back when there is room."""
    made = scheduler(budget=50, pages=6, lengths=[7, 7, 7])
    step(made)
    made.add(sequence(made._pool, 9, 3))
    step(made)
    newest = made.running[2]
    tokens = list(newest.tokens)
    newest.proposal, newest.cache = [5], "hit"
    batch, preempted = made.schedule()
    assert preempted == [newest] and requests([part.sequence for part in batch]) == [0, 1]
    assert requests(list(made.waiting)) == [2, 9]
    assert newest.tokens == tokens and newest.table.pages == []
    assert (newest.slot, newest.computed, newest.proposal, newest.cache) == (-1, 0, [], "")
    made._pool.check()
    commit(batch)
    assert made.admit() == [], "no room yet"
    made.remove(made.running[0])
    assert requests(made.admit())[0] == 2
    batch, _ = made.schedule()
    part = next(part for part in batch if part.sequence is newest)
    assert newest.tokens[: part.row.stop] == tokens and part.row.outputs == 1 and part.complete


def test_several_pay_newest_first_and_queue_up_oldest_first() -> None:
    made = scheduler(budget=50, pages=7, lengths=[4, 7, 7])
    step(made)
    oldest = made.running[0]
    oldest.tokens += [3] * 19  # six pages, of which one is there, with seven in all
    _, preempted = made.schedule()
    assert requests(preempted) == [2, 1] and requests(list(made.waiting)) == [1, 2]
    assert made.running == [oldest] and len(oldest.table.pages) == 6


def test_draft_tokens_push_nobody_out() -> None:
    made = scheduler(budget=50, pages=4, lengths=[7, 7])
    step(made)
    made.running[0].proposal = [5] * 4  # would need a third page
    batch, preempted = made.schedule()
    assert [part.drafted for part in batch] == [0, 0] and preempted == []
