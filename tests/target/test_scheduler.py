"""Who is in the next batch: the budget, the order of age, and who pays when pages run out."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.execution.pages import PagePool, PageTable
from ssd.params import Speculation
from ssd.target.scheduler import Scheduled, Scheduler
from ssd.target.sequence import Sequence
from tests.target.scripted import LONGEST, submit


def sequence(pool: PagePool, request: int, length: int, *, max_tokens: int = 8, k: int = 4) -> Sequence:
    """A request with `length` prompt tokens that no other one has."""
    prompt = range(1000 * request, 1000 * request + length)
    asked = submit(request, prompt, k=k, max_tokens=max_tokens)
    return Sequence.from_submit(asked, Speculation(), LONGEST, PageTable(pool), now=0.0)


def scheduler(budget: int, *, pages: int = 100, places: int = 8, lengths: list[int]) -> Scheduler:
    """With a sequence of each of these lengths waiting; pages of 4."""
    pool = PagePool(pages, 4)
    made = Scheduler(pool, places, budget)
    for request, length in enumerate(lengths):
        made.add(sequence(pool, request, length))
    return made


def commit(batch: list[Scheduled], accepted: int = 0) -> None:
    """What the engine does with a batch of which each row accepts at most `accepted` drafts."""
    for part in batch:
        s, row = part.sequence, part.row
        taken = min(accepted, part.drafted)
        known = len(row.token_ids) - part.drafted
        s.tokens += [*row.token_ids[known : known + taken], *([-7] if row.outputs else [])]
        s.computed += known + taken
        s.proposal = []
        s.table.share_computed(s.tokens, s.computed)


def step(made: Scheduler) -> list[tuple[int, int]]:
    """One step; (request, tokens of its row) in the order of the batch."""
    made.admit()
    batch, _ = made.schedule()
    commit(batch)
    return [(part.sequence.request, len(part.row.token_ids)) for part in batch]


def requests(sequences: list[Sequence]) -> list[int]:
    return [s.request for s in sequences]


# -- the budget -------------------------------------------------------------------------------------------------------


def test_prompts_are_read_in_pieces_oldest_first() -> None:
    made = scheduler(budget=10, lengths=[14, 7, 5])
    assert step(made) == [(0, 10)]
    assert step(made) == [(0, 4), (1, 6)]
    assert step(made) == [(0, 1), (1, 1), (2, 5)]
    assert step(made) == [(0, 1), (1, 1), (2, 1)]


def test_a_piece_wants_no_output_until_the_last() -> None:
    made = scheduler(budget=10, lengths=[14])
    made.admit()
    rows = []
    for _ in range(3):
        batch, _ = made.schedule()
        rows += [(part.row.start, len(part.row.token_ids), part.row.outputs) for part in batch]
        commit(batch)
    assert rows == [(0, 10, 0), (10, 4, 1), (14, 1, 1)]


def test_decoding_goes_on_beyond_the_budget() -> None:
    """Five sequences decode although the budget is two; a sixth that has yet to be read waits."""
    made = scheduler(budget=2, lengths=[1] * 5 + [6])
    for _ in range(3):
        assert step(made) == [(request, 1) for request in range(5)]


def test_drafts_take_what_is_left_of_the_budget() -> None:
    """Those of the oldest first; the one token that is certain is never left out."""
    made = scheduler(budget=8, lengths=[1, 1, 1])
    step(made)
    for s in made.running:
        s.proposal = [11, 12, 13, 14]
    batch, _ = made.schedule()
    assert [(part.row.token_ids[1:], part.drafted, part.row.outputs) for part in batch] == [
        ([11, 12, 13, 14], 4, 5),
        ([11, 12], 2, 3),
        ([], 0, 1),
    ]
    assert made.running[1].proposal == [11, 12, 13, 14], "scheduling changes no proposal"


# -- places and pages -------------------------------------------------------------------------------------------------


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
    newest.proposal, newest.hit = [5], True
    batch, preempted = made.schedule()
    assert preempted == [newest] and requests([part.sequence for part in batch]) == [0, 1]
    assert requests(list(made.waiting)) == [2, 9]
    assert newest.tokens == tokens and newest.table.pages == []
    assert (newest.slot, newest.computed, newest.proposal, newest.hit) == (-1, 0, [], None)
    made._pool.check()
    commit(batch)
    assert made.admit() == [], "no room yet"
    made.remove(made.running[0])
    assert requests(made.admit())[0] == 2
    batch, _ = made.schedule()
    part = next(part for part in batch if part.sequence is newest)
    assert newest.tokens[: part.row.stop] == tokens and part.row.outputs == 1


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


# -- any scenario -----------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12), st.integers(0, 5)), min_size=1, max_size=7),
    st.integers(1, 40),
    st.integers(0, 12),
    st.integers(1, 4),
    st.data(),
)
def test_every_batch_keeps_the_rules_and_everybody_ends(
    asked: list[tuple[int, int, int]], budget: int, spare: int, places: int, data: st.DataObject
) -> None:
    """`asked`: prompt length, tokens wanted, drafts a round."""
    pool = PagePool(8 + spare, 4)
    made = Scheduler(pool, places, budget)
    for request, (length, max_tokens, k) in enumerate(asked):
        made.add(sequence(pool, request, length, max_tokens=max_tokens, k=max(1, k)))
    for _ in range(20 * sum(length + wanted for length, wanted, _ in asked)):
        made.admit()
        running = list(made.running)
        for s in running:
            if len(s.tokens) - s.computed == 1:
                s.proposal = [5] * min(s.lookahead, asked[s.request][2])
        batch, preempted = made.schedule()
        check(batch, running, preempted, budget)
        commit(batch, data.draw(st.integers(0, 5)))
        for part in batch:
            if part.sequence.generated >= part.sequence.params.max_tokens:
                made.remove(part.sequence)
        pool.check()
        if not made.running and not made.waiting:
            break
    assert not made.running and not made.waiting and pool.live == 0


def check(batch: list[Scheduled], running: list[Sequence], preempted: list[Sequence], budget: int) -> None:
    """One batch of `running` sequences, oldest first."""
    left, inside = budget, [part.sequence for part in batch]
    assert requests(inside) == [s.request for s in running if s in inside], "not in the order of age"
    assert batch, "nobody gets on"
    assert preempted == running[::-1][: len(preempted)], "an older one was preempted"
    for s in running:
        if len(s.tokens) - s.computed == 1 and s not in preempted:
            assert s in inside, "a decoding sequence was left out"
    for part in batch:
        s, row = part.sequence, part.row
        known = s.tokens[row.start : row.start + len(row.token_ids) - part.drafted]
        reached = row.start + len(known) == len(s.tokens)
        assert row.start == s.computed and row.token_ids == known + s.proposal[: part.drafted]
        assert row.outputs == (part.drafted + 1 if reached else 0) and (reached or not part.drafted)
        assert len(row.token_ids) <= left or len(row.token_ids) == 1, "beyond the budget"
        assert reached or len(row.token_ids) == left, "a piece smaller than the budget allows"
        assert len(s.table.pages) * 4 >= row.stop
        left -= len(row.token_ids)
