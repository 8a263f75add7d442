"""Who is in the next batch: the budget, the order of age, and who waits for whom."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.execution.pages import PagePool
from ssd.verifier.scheduler import Scheduled, Scheduler, even_shares
from ssd.verifier.sequence import Sequence
from tests.verifier.scheduling import commit, drafts, requests, scheduler, sequence, step

# -- the budget -------------------------------------------------------------------------------------------------------


def test_the_shortest_is_read_first_and_the_oldest_has_its_share() -> None:
    """The rows stay in the order of age."""
    made = scheduler(budget=10, lengths=[14, 7, 5])
    assert step(made) == [(0, 3), (1, 2), (2, 5)]
    assert step(made) == [(0, 4), (1, 5), (2, 1)]
    assert step(made) == [(0, 7), (1, 1), (2, 1)]
    assert step(made) == [(0, 1), (1, 1), (2, 1)]


def test_of_equal_prompts_the_oldest_is_read_whole() -> None:
    """Equal chunks would give nobody a first token before the third step."""
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


def test_drafts_share_what_is_left_of_the_budget() -> None:
    """The first ones of a sequence are likelier right than the last ones of another; the one token that is certain is
    never left out."""
    made = scheduler(budget=8, lengths=[1, 1, 1])
    step(made)
    assert drafts(made) == [2, 2, 1]


@pytest.mark.parametrize("proposed", range(8))
def test_where_pages_are_short_the_draft_tokens_that_fit_are_verified(proposed: int) -> None:
    """Never none because there were many: a cascade has more where a drafted token was right, and the ratio rule may
    not be asked to forget that token."""
    made = scheduler(budget=16, pages=3, lengths=[7])
    step(made)
    made.running[0].proposal = list(range(proposed))
    (part,), preempted = made.schedule()
    check_part(part)
    assert part.drafted == min(proposed, 3 * 4 - 8) and not preempted


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


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), max_size=6), st.integers(-3, 40), st.integers(1, 9))
def test_no_want_beyond_k_changes_who_gets_a_kth(wants: list[tuple[int, int]], budget: int, k: int) -> None:
    """A cascade has more tokens where a drafted one was right. So the ratio rule may not be asked to drop a token
    because its own row, or another one, has tokens behind it. By the definition, too: round by round, in order."""
    fewer = even_shares([min(want, k) for want, _ in wants], budget)
    more = even_shares([want if want < k else want + extra for want, extra in wants], budget)
    assert [min(share, k) for share in more] == fewer
    turns = sorted((turn, row) for row, (want, _) in enumerate(wants) for turn in range(want))[: max(0, budget)]
    shares = even_shares([want for want, _ in wants], budget)
    assert shares == [sum(row == index for _, row in turns) for index in range(len(wants))]


@pytest.mark.parametrize("second", [1, 2, 3, 7])
def test_the_first_row_gets_the_remainder_whatever_the_second_wants(second: int) -> None:
    made = scheduler(budget=5, lengths=[1, 1])  # beside two committed tokens there is room for three
    step(made)
    for row, count in zip(made.running, (2, second), strict=True):
        row.proposal = list(range(count))
    batch, _ = made.schedule()
    assert [part.drafted for part in batch] == [2, 1]


# -- short and long ---------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(
    st.integers(8, 64),
    st.integers(100, 600),
    st.integers(0, 10),
    st.integers(0, 5),
    st.data(),
)
def test_short_prompts_pass_long_ones(budget: int, long: int, arrival: int, decoding: int, data: st.DataObject) -> None:
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


@settings(max_examples=150)
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


@settings(max_examples=300)
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
