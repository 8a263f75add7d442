"""Who is in the next batch: the budget, the order of age, who waits for whom, and who pays when pages run out."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.execution.pages import PagePool, PageTable
from ssd.params import Speculation
from ssd.target.scheduler import Scheduled, Scheduler, even_shares
from ssd.target.sequence import Sequence
from tests.target.scripted import submit

CONTEXT = 10_000


def sequence(pool: PagePool, request: int, prompt: int | Iterable[int], *, max_tokens: int = 8, k: int = 4) -> Sequence:
    """A request with this prompt, or one of so many tokens that no other one has."""
    if isinstance(prompt, int):
        prompt = range(CONTEXT * request, CONTEXT * request + prompt)
    asked = submit(request, prompt, k=k, max_tokens=max_tokens)
    return Sequence.from_submit(asked, Speculation(), CONTEXT, PageTable(pool), now=0.0)


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
        s.tokens += [*row.token_ids[known : known + taken], *([-7] if part.complete else [])]
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


def test_the_shortest_is_read_first_and_the_oldest_has_its_share() -> None:
    """The rows stay in the order of age."""
    made = scheduler(budget=10, lengths=[14, 7, 5])
    assert step(made) == [(0, 3), (1, 2), (2, 5)]
    assert step(made) == [(0, 4), (1, 5), (2, 1)]
    assert step(made) == [(0, 7), (1, 1), (2, 1)]
    assert step(made) == [(0, 1), (1, 1), (2, 1)]


def test_of_equal_prompts_the_oldest_is_read_whole() -> None:
    """Equal pieces would give nobody a first token before the third step."""
    made = scheduler(budget=10, lengths=[9, 9, 9])
    assert step(made) == [(0, 9), (1, 1)]
    assert step(made) == [(0, 1), (1, 8), (2, 1)]
    assert step(made) == [(0, 1), (1, 1), (2, 8)]


def test_only_the_last_piece_ends_in_a_sample_that_counts() -> None:
    made = scheduler(budget=10, lengths=[14])
    made.admit()
    rows = []
    for _ in range(3):
        batch, _ = made.schedule()
        rows += [(part.row.start, len(part.row.token_ids), part.row.outputs, part.complete) for part in batch]
        commit(batch)
    assert rows == [(0, 10, 1, False), (10, 4, 1, True), (14, 1, 1, True)]


def test_decoding_goes_on_beyond_the_budget() -> None:
    """Five sequences decode although the budget is two; a sixth is read all the same, one token a step."""
    made = scheduler(budget=2, lengths=[1] * 5 + [6])
    for _ in range(3):
        assert step(made) == [(request, 1) for request in range(6)]


def drafts(made: Scheduler) -> list[int]:
    """How many of four proposed tokens each decoding sequence verifies in the next batch."""
    for s in made.running:
        s.proposal = [11, 12, 13, 14] if s.pending == 1 else []
    batch, _ = made.schedule()
    for part in batch:
        assert list(part.draft) == [11, 12, 13, 14][: part.drafted] and part.row.outputs == part.drafted + 1
    assert all(s.proposal == [11, 12, 13, 14] for s in made.running if s.pending == 1), "scheduling changes no proposal"
    return [part.drafted for part in batch if part.sequence.pending == 1]


def test_drafts_share_what_is_left_of_the_budget() -> None:
    """The first ones of a sequence are likelier right than the last ones of another; the one token that is certain is
    never left out."""
    made = scheduler(budget=8, lengths=[1, 1, 1])
    step(made)
    assert drafts(made) == [2, 2, 1]


def test_drafts_leave_half_of_the_budget_to_prompts() -> None:
    """As far as prompts need it."""
    made = scheduler(budget=12, lengths=[1, 1, 1])
    step(made)
    made.add(sequence(made._pool, 3, 30))
    made.admit()
    assert drafts(made) == [1, 1, 1]
    made.remove(made.running[3])
    made.add(sequence(made._pool, 4, 3))
    made.admit()
    assert drafts(made) == [2, 2, 2]


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), max_size=6), st.integers(-3, 40))
def test_even_shares_are_max_min_fair(wants: list[int], budget: int) -> None:
    """All is given that is wanted and there; whoever lacks something has at most one less than anybody."""
    shares = even_shares(wants, budget)
    assert sum(shares) == min(sum(wants), max(0, budget))
    for mine, want in zip(shares, wants, strict=True):
        assert 0 <= mine <= want
        assert mine == want or mine >= max(shares) - 1
    for alike in set(wants):
        mine = [share for share, want in zip(shares, wants, strict=True) if want == alike]
        assert mine == sorted(mine, reverse=True), "what is over goes to the first"


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


# -- short and long ---------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(
    st.integers(8, 64),
    st.integers(100, 600),
    st.integers(0, 10),
    st.integers(0, 5),
    st.data(),
)
def test_a_short_prompt_is_not_kept_waiting_by_a_long_one(
    budget: int, long: int, arrival: int, decoding: int, data: st.DataObject
) -> None:
    """While a long prompt is read and others decode with as many draft tokens as they like, one of up to half of the
    budget has its first token two steps after it came, and the long one advances in every step."""
    pool = PagePool(400, 4)
    made = Scheduler(pool, 16, budget)
    others = [sequence(pool, request, 1, max_tokens=1000) for request in range(min(decoding, budget // 2))]
    reader = sequence(pool, 8, long)
    short = sequence(pool, 9, data.draw(st.integers(1, budget // 2)))
    for s in (*others, reader):
        made.add(s)
    for _ in range(1 + arrival):
        step(made)
    made.add(short)
    before = reader.computed
    for _ in range(2):
        made.admit()
        for s in others:
            s.proposal = [5] * data.draw(st.integers(0, 8))
        batch, _ = made.schedule()
        commit(batch)
        assert reader.computed > before
        before = reader.computed
    assert short.generated >= 1


def test_a_stream_of_short_prompts_does_not_starve_a_long_one() -> None:
    """In every step new ones come that could take the whole budget."""
    pool = PagePool(400, 4)
    made = Scheduler(pool, 4, 12)
    reader = sequence(pool, 0, 90)
    made.add(reader)
    for now in range(90 // (12 // 4)):
        for request in range(3):
            made.add(sequence(pool, 1 + 3 * now + request, 12, max_tokens=1))
        step(made)
        for s in [s for s in made.running if s is not reader and s.generated]:
            made.remove(s)
    assert reader.generated >= 1


# -- the same prompt at the same time ---------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 70), st.integers(1, 9), st.integers(1, 60))
def test_what_is_common_is_read_once(length: int, copies: int, budget: int) -> None:
    """Copies of one prompt that come together: what whole pages do not hold is all that each reads for itself."""
    pool = PagePool(400, 4)
    made = Scheduler(pool, 16, budget)
    for request in range(copies):
        made.add(sequence(pool, request, range(length), max_tokens=1000))
    made.admit()
    total = 0
    while not all(s.generated for s in made.running):
        batch, _ = made.schedule()
        total += sum(len(part.row.token_ids) for part in batch if part.sequence.generated == 0)
        commit(batch)
    in_pages = (length - 1) // 4 * 4
    assert total == length + (copies - 1) * (length - in_pages)
    assert [s.cached for s in made.running] == [0] + [in_pages] * (copies - 1)


def test_nobody_waits_for_another_prompt() -> None:
    """One that differs in the first page, and one that comes when the common page is there."""
    pool = PagePool(100, 4)
    made = Scheduler(pool, 8, 40)
    made.add(sequence(pool, 0, range(10)))
    made.add(sequence(pool, 1, [9, *range(1, 10)]))
    made.add(sequence(pool, 2, range(10)))
    assert step(made) == [(0, 10), (1, 10)]
    made.add(sequence(pool, 3, range(6)))
    assert step(made) == [(0, 1), (1, 1), (2, 2), (3, 2)]


def test_nobody_waits_for_a_page_that_it_must_compute_itself() -> None:
    """The last one of a prompt, which leaves a query."""
    pool = PagePool(100, 4)
    made = Scheduler(pool, 8, 8)
    for request in range(2):
        made.add(sequence(pool, request, range(10)))
    assert step(made) == [(0, 8)]
    assert step(made) == [(0, 2), (1, 2)]


def test_one_that_waited_goes_on_alone_if_the_other_ends() -> None:
    pool = PagePool(100, 4)
    made = Scheduler(pool, 8, 6)
    for request in range(2):
        made.add(sequence(pool, request, range(20)))
    assert step(made) == [(0, 6)]
    made.remove(made.running[0])
    assert step(made) == [(1, 6)] and made.running[0].computed == 10


# -- any scenario -----------------------------------------------------------------------------------------------------

prompts = st.one_of(st.integers(1, 20), st.lists(st.integers(0, 1), min_size=1, max_size=20))


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.tuples(prompts, st.integers(1, 12), st.integers(0, 5), st.integers(0, 9)), min_size=1, max_size=7),
    st.integers(1, 40),
    st.integers(0, 12),
    st.integers(1, 5),
    st.data(),
)
def test_every_batch_keeps_the_rules_and_everybody_ends(
    asked: list[tuple[int | list[int], int, int, int]], budget: int, spare: int, places: int, data: st.DataObject
) -> None:
    """`asked`: prompt (many begin alike), tokens wanted, drafts a round, step of arrival."""
    pool = PagePool(8 + spare, 4)
    made = Scheduler(pool, places, budget)
    coming = [
        (arrival, sequence(pool, request, prompt, max_tokens=max_tokens, k=max(1, k)))
        for request, (prompt, max_tokens, k, arrival) in enumerate(asked)
    ]
    begun: list[Sequence] = []
    for now in range(20 * sum(s.prompt_length + s.params.max_tokens for _, s in coming)):
        for _, s in (one for one in coming if one[0] == now):
            made.add(s)
        begun += [s for s in made.admit() if s not in begun]
        running = list(made.running)
        for s in running:
            if s.pending == 1:
                s.proposal = [5] * min(s.lookahead, asked[s.request][2])
        batch, preempted = made.schedule()
        if running:
            check(batch, running, preempted, budget)
        commit(batch, data.draw(st.integers(0, 5)))
        for part in batch:
            if part.sequence.generated >= part.sequence.params.max_tokens:
                made.remove(part.sequence)
        pool.check()
        if now > 9 and not made.running and not made.waiting:
            break
    assert not made.running and not made.waiting and pool.live == 0
    order = sorted(coming, key=lambda one: one[0])
    assert requests(begun) == [s.request for _, s in order], "not in the order of arrival"


def check(batch: list[Scheduled], running: list[Sequence], preempted: list[Sequence], budget: int) -> None:
    """One batch of `running` sequences, oldest first."""
    inside = [part.sequence for part in batch]
    assert requests(inside) == [s.request for s in running if s in inside], "not in the order of age"
    assert batch, "nobody gets on"
    assert preempted == running[::-1][: len(preempted)], "an older one was preempted"
    decoding = [s for s in running if s.pending == 1 and s not in preempted]
    reading = [s for s in running if s.pending > 1 and s not in preempted]
    assert all(s in inside for s in decoding), "a decoding sequence was left out"
    for part in batch:
        check_part(part)
    tokens = {part.sequence.request: len(part.row.token_ids) for part in batch}
    drafted = sum(part.drafted for part in batch)
    assert sum(tokens.values()) <= max(budget, len(decoding) + bool(reading)), "beyond the budget"
    kept = min(sum(s.pending for s in reading), (budget + 1) // 2)
    proposed = sum(len(s.proposal) for s in decoding)
    assert drafted <= min(proposed, max(0, budget - len(decoding) - kept)), "drafts took too much"
    if reading and not preempted and drafted == min(proposed, max(0, budget - len(decoding) - kept)):
        left = max(1, budget - len(decoding) - drafted)
        share = max(1, left // len(reading))
        assert tokens[reading[0].request] >= min(reading[0].pending, share), "the oldest does not advance"
        read = sum(tokens.get(s.request, 0) for s in reading)
        for s in reading:
            if s.request in tokens:
                assert s.pending > share or tokens[s.request] == s.pending, "a short one was read in part"
            else:
                waits = any(s.tokens[:1] == other.tokens[:1] for other in reading if other is not s)
                assert waits or (read == left and s.pending > share), "left out for no reason"


def check_part(part: Scheduled) -> None:
    s, row = part.sequence, part.row
    known = s.tokens[row.start : row.start + len(row.token_ids) - part.drafted]
    reached = row.start + len(known) == len(s.tokens)
    assert row.start == s.computed and row.token_ids == known + s.proposal[: part.drafted]
    assert part.complete == reached and (reached or not part.drafted)
    assert row.outputs == part.sampled == part.drafted + 1 and part.prompt_outputs == 0
    assert len(s.table.pages) * 4 >= row.stop
