"""The invariants of the target's memory (docs/invariants.md), against a model that remembers what is in every slot."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ssd.execution import pages as pages_module
from ssd.execution.pages import OutOfPages, PagePool, PageTable

Prefix = tuple[int, ...]

# Two token ids and short texts: prefixes collide all the time.
texts = st.lists(st.integers(0, 1), min_size=1, max_size=14)


@dataclass
class Sequence:
    """As the engine keeps one: `computed` of its `tokens` have keys and values in the pages of `table`."""

    tokens: list[int]
    table: PageTable
    computed: int = 0
    state: Prefix = ()  # the text that its own state has read


class Pages(RuleBasedStateMachine):
    """Sequences begin, are computed in chunks, verify drafts, end. `slots` is the memory: which text a slot's key and
    value were computed from, the token itself included, since a key depends on everything before it."""

    has_states = False

    @initialize(count=st.integers(2, 12), size=st.integers(1, 4), saved=st.integers(0, 4))
    def empty(self, count: int, size: int, saved: int) -> None:
        self.pool = PagePool(count, size, "model", range(saved) if self.has_states else None)
        self.saved: dict[int, Prefix] = {}
        self.size = size
        self.slots: dict[tuple[int, int], Prefix] = {}
        self.alive: list[Sequence] = []
        self.texts: list[list[int]] = []  # the tokens of every sequence there ever was

    def owners(self, page: int) -> int:
        return sum(page in sequence.table.pages for sequence in self.alive)

    def place(self, sequence: Sequence, position: int) -> tuple[int, int]:
        return sequence.table.pages[position // self.size], position % self.size

    @rule(tokens=texts)
    def begin(self, tokens: list[int]) -> None:
        """A prefix hit leaves a token to compute (I5), consists of whole pages, and they hold just that prefix."""
        self.texts.append(tokens)
        sequence = Sequence(tokens, PageTable(self.pool))
        self.alive.append(sequence)
        sequence.computed = sequence.table.adopt_prefix(tokens)
        assert sequence.computed < len(tokens)
        assert sequence.computed == len(sequence.table.pages) * self.size
        for position in range(sequence.computed):
            assert self.slots[self.place(sequence, position)] == tuple(tokens[: position + 1])

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), more=texts)
    def begin_like_another(self, data: st.DataObject, more: list[int]) -> None:
        """With all that another sequence, perhaps long gone, had up to now."""
        self.begin(data.draw(st.sampled_from(self.texts))[:14] + more)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), draft=st.lists(st.integers(0, 1), max_size=5))
    def step(self, data: st.DataObject, draft: list[int]) -> None:
        """A row: a chunk of what is known, and when it reaches the end, drafts of which some are accepted."""
        sequence = data.draw(st.sampled_from(self.alive))
        known = data.draw(st.integers(1, len(sequence.tokens) - sequence.computed))
        if sequence.computed + known < len(sequence.tokens):
            draft = []
        row = sequence.tokens[: sequence.computed + known] + draft
        if not self.grown(sequence, len(row)):
            return
        for position in range(sequence.computed, len(row)):
            page, offset = self.place(sequence, position)
            assert self.owners(page) == 1, "a page that others read was written to (I3)"
            self.slots[page, offset] = tuple(row[: position + 1])
        self.states_change(sequence, row, len(draft))
        sequence.computed += known
        if sequence.computed == len(sequence.tokens):
            accepted = data.draw(st.integers(0, len(draft)))
            sequence.tokens += [*draft[:accepted], data.draw(st.integers(0, 1))]
            sequence.computed += accepted
        before = list(sequence.table.pages), self.pool.available
        sequence.table.share_computed(sequence.tokens, sequence.computed)
        assert (sequence.table.pages, self.pool.available) == before, "rolling back moved pages (I4)"

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def look_again(self, data: st.DataObject) -> None:
        """In the middle of its text: what another has computed since is taken, in whole pages and not too much."""
        sequence = data.draw(st.sampled_from(self.alive))
        most = data.draw(st.integers(0, len(sequence.tokens) - 1))
        before, shared = sequence.computed, list(sequence.table.pages[: sequence.computed // self.size])
        sequence.computed = sequence.table.adopt_prefix(sequence.tokens, before, most)
        assert sequence.table.pages[: len(shared)] == shared
        if sequence.computed != before:
            assert before < sequence.computed <= most and sequence.computed % self.size == 0
            assert sequence.computed == len(sequence.table.pages) * self.size

    def states_change(self, sequence: Sequence, row: list[int], drafted: int) -> None:
        """The row begins from a state of its own text, and leaves states without a token that may be rejected."""
        lasting = len(sequence.tokens) == len(row)
        written = sequence.computed if drafted else len(row)
        use = sequence.table.use_state(written, lasting)
        if use is None:
            assert not self.has_states
            return
        begins = () if not use.held else sequence.state if use.source is None else self.saved[use.source]
        assert begins == tuple(row[: use.held]) and use.held <= sequence.computed
        assert use.saved <= use.written <= len(row) - drafted
        sequence.state = tuple(row[: use.written])
        if use.save >= 0:
            assert use.held < use.saved and use.saved % self.size == 0
            self.saved[use.save] = tuple(row[: use.saved])
        sequence.table.state_computed(use.written)

    def grown(self, sequence: Sequence, length: int) -> bool:
        """GraphShape is made unless there is truly none: then every page of the pool belongs to somebody alive."""
        missing, available = sequence.table.missing(length), self.pool.available
        try:
            sequence.table.grow(length)
        except OutOfPages:
            assert missing > available and all(self.owners(page) for page in range(self.pool.count))
            return False
        assert missing <= available and len(sequence.table.pages) * self.size >= length
        return True

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.alive))
        self.alive.remove(sequence)
        sequence.table.free()
        assert sequence.table.pages == []

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        """Preemption: the pages go; as nobody takes any in between, what could be found before is found after."""
        sequence = data.draw(st.sampled_from(self.alive))
        findable = cached(self.pool, sequence.tokens)
        sequence.table.free()
        sequence.computed = sequence.table.adopt_prefix(sequence.tokens)
        assert sequence.computed == findable

    @invariant()
    def books_balance(self) -> None:
        """I7, and the same from the outside: live pages are those that somebody has."""
        self.pool.check()
        live = {page for sequence in self.alive for page in sequence.table.pages}
        assert self.pool.live == len(live) and self.pool.live + self.pool.available == self.pool.count

    @invariant()
    def what_is_computed_stays(self) -> None:
        """I1, and nobody overwrote a slot below a computed length (I3); a table's pages only ever grow at the end."""
        for sequence in self.alive:
            assert sequence.computed <= len(sequence.tokens)
            assert len(set(sequence.table.pages)) == len(sequence.table.pages)
            for position in range(sequence.computed):
                assert self.slots[self.place(sequence, position)] == tuple(sequence.tokens[: position + 1])

    def teardown(self) -> None:
        for sequence in getattr(self, "alive", []):
            sequence.table.free()
            self.pool.check()
        if hasattr(self, "pool"):
            assert self.pool.live == 0 and self.pool.available == self.pool.count


class PagesWithStates(Pages):
    """The same with layers that have a state: it is found with the pages before it, and never holds a draft."""

    has_states = True

    @rule(data=st.data())
    def found_states_are_right(self, data: st.DataObject) -> None:
        for tokens in self.texts:
            table = PageTable(self.pool)
            found = table.adopt_prefix(tokens)
            if found:
                assert self.saved[table.use_state(found).source] == tuple(tokens[:found])
            table.free()


PagesWithStates.TestCase.settings = settings(max_examples=300, stateful_step_count=40)
TestPagesWithStates = PagesWithStates.TestCase
Pages.TestCase.settings = settings(max_examples=300, stateful_step_count=40)
TestPages = Pages.TestCase


# -- one thing at a time ----------------------------------------------------------------------------------------------


def computed(pool: PagePool, tokens: list[int]) -> PageTable:
    """A sequence whose tokens are all computed and shared."""
    table = PageTable(pool)
    table.adopt_prefix(tokens)
    table.grow(len(tokens))
    table.share_computed(tokens, len(tokens))
    return table


def cached(pool: PagePool, tokens: list[int]) -> int:
    """How many tokens of a prompt would be found now (looking moves the pages to the end of the queue)."""
    table = PageTable(pool)
    found = table.adopt_prefix(tokens)
    table.free()
    return found


@pytest.mark.parametrize(("length", "found"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)])
def test_a_fully_cached_prompt_leaves_a_query(length: int, found: int) -> None:
    text = list(range(13))
    pool = PagePool(8, 4)
    computed(pool, text)
    assert cached(pool, text[:length]) == found


def test_the_content_of_released_pages_is_found() -> None:
    pool = PagePool(8, 4)
    computed(pool, list(range(9))).free()
    assert pool.live == 0 and cached(pool, list(range(9))) == 8


def test_only_what_is_accepted_is_found() -> None:
    """A page with one rejected or missing token is nobody else's (I2)."""
    pool, text = PagePool(8, 4), list(range(12))
    table = PageTable(pool)
    table.grow(12)
    table.share_computed(text, 7)
    assert cached(pool, text) == 4
    table.share_computed(text, 8)
    assert cached(pool, text) == 8


def test_a_page_is_found_below_its_own_prefix_only() -> None:
    pool = PagePool(8, 2)
    computed(pool, [1, 2, 3, 4])
    assert cached(pool, [3, 4, 9]) == 0 and cached(pool, [1, 2, 3, 5, 9]) == 2


def test_token_ids_do_not_run_together() -> None:
    """1, 23 and 12, 3 are written with the same digits: both are found, each for itself."""
    pool = PagePool(8, 2)
    tables = [computed(pool, [1, 23, 4, 4]), computed(pool, [12, 3, 4, 4])]
    for text, table in zip(([1, 23, 4, 4, 0], [12, 3, 4, 4, 0]), tables, strict=True):
        found = PageTable(pool)
        assert found.adopt_prefix(text) == 4 and found.pages == table.pages


def test_eviction_takes_the_oldest_and_of_a_text_the_tail() -> None:
    pool, old, new = PagePool(4, 2), [1, 1, 2, 2, 9], [3, 3, 4, 4, 9]
    for text in (old, new):
        computed(pool, text[:4]).free()
    expected = [(4, 4), (2, 4), (0, 4), (0, 2), (0, 0)]
    private = PageTable(pool)
    for taken, left in enumerate(expected):
        private.grow(2 * taken)
        # Looking at the old text first and at the new one second keeps their order in the queue.
        assert (cached(pool, old), cached(pool, new)) == left


def test_what_was_used_lately_is_evicted_last() -> None:
    pool = PagePool(2, 2)
    for text in ([1, 1], [2, 2]):
        computed(pool, text).free()
    assert cached(pool, [1, 1, 0]) == 2
    PageTable(pool).grow(2)
    assert cached(pool, [1, 1, 0]) == 2 and cached(pool, [2, 2, 0]) == 0


def test_pages_in_use_are_never_evicted() -> None:
    pool = PagePool(3, 2)
    keeper = computed(pool, [1, 1, 2, 2])
    table = PageTable(pool)
    table.grow(2)
    with pytest.raises(OutOfPages):
        table.grow(4)
    assert cached(pool, [1, 1, 2, 2, 0]) == 4
    assert len(table.pages) == 1 and not set(table.pages) & set(keeper.pages)


def test_out_of_pages_keeps_what_it_got() -> None:
    """The scheduler frees somebody else's and asks again."""
    pool = PagePool(4, 2)
    other, table = computed(pool, [5, 6]), PageTable(pool)
    with pytest.raises(OutOfPages):
        table.grow(8)
    assert len(table.pages) == 3
    other.free()
    table.grow(8)
    assert len(table.pages) == 4


def test_a_freed_table_has_nothing_to_free() -> None:
    pool = PagePool(4, 2)
    table, other = computed(pool, [1, 2, 3, 4, 5]), computed(pool, [1, 2])
    table.free()
    table.free()
    assert not table.pages
    assert pool.live == len(other.pages) == 1
    pool.check()


def test_equal_texts_computed_side_by_side_do_not_share() -> None:
    """The later one keeps its private pages; a third finds those of the first, and all of it can be given back."""
    pool = PagePool(6, 2)
    tables = [PageTable(pool) for _ in range(2)]
    for table in tables:
        table.grow(4)
    for table in tables:
        table.share_computed([1, 2, 3, 4], 4)
        pool.check()
    third = PageTable(pool)
    assert third.adopt_prefix([1, 2, 3, 4, 5]) == 4 and third.pages == tables[0].pages
    for table in (third, *tables):
        table.free()
        pool.check()
    assert pool.live == 0 and cached(pool, [1, 2, 3, 4, 5]) == 4


def test_what_another_computed_meanwhile_is_taken_in_the_middle_of_a_text() -> None:
    """One page each, then one of them goes on: the other takes its second page, and gives its own half of it back."""
    pool, text = PagePool(8, 2), [1, 2, 3, 4, 5, 6]
    first, second = PageTable(pool), PageTable(pool)
    for table in (first, second):
        table.grow(3)
        table.share_computed(text, 3)
    assert second.adopt_prefix(text, 3) == 3, "there is nothing yet"
    first.grow(6)
    first.share_computed(text, 6)
    assert second.adopt_prefix(text, 3, most=3) == 3, "it may not"
    assert second.adopt_prefix(text, 3) == 4 and second.pages == [second.pages[0], first.pages[1]]
    assert pool.live == 4
    pool.check()


def test_salt_and_page_size_separate() -> None:
    """Two models, types or page sizes never agree on the identity of a page."""
    identities = set()
    for salt, size in (("a/float32", 2), ("b/float32", 2), ("a/bfloat16", 2), ("a/float32", 4)):
        pool = PagePool(4, size, salt)
        computed(pool, [1, 2, 3, 4])
        identities.update(pool.find([1, 2, 3, 4], size, [], pool.root("")))
    assert len(identities) == 4


def stepped(
    table: PageTable, tokens: list[int], computed: int, drafted: int = 0, *, lasting: bool = False
) -> int | None:
    """Compute a row up to the end of `tokens`, of which the last are drafts and rejected; return the slot it saves."""
    table.grow(len(tokens))
    use = table.use_state(computed if drafted else len(tokens), lasting)
    assert use is not None
    table.state_computed(use.written)
    table.share_computed(tokens, len(tokens) - drafted)
    return use.save if use.save >= 0 else None


def with_states(count: int) -> PagePool:
    return PagePool(32, 2, state_slots=range(count))


def test_a_prefix_is_found_as_far_as_there_is_a_state() -> None:
    """The state of a prompt's last page is there; pages before it alone are of no use."""
    pool, text = with_states(4), list(range(9))
    stepped(PageTable(pool), text, 0, lasting=True)
    assert cached(pool, text) == 8 and cached(pool, [*text[:6], 99]) == 0


def test_where_texts_branch_a_state_is_saved() -> None:
    """The second text computes the common part again and saves its state, so that a third one finds it."""
    pool, common = with_states(4), [1, 2, 3, 4, 5, 6]
    for last, found in ((7, 0), (8, 0), (9, 6)):
        table = PageTable(pool)
        assert table.adopt_prefix([*common, last, last, last]) == found
        stepped(table, [*common, last, last, last], found, lasting=True)
        table.free()


def test_the_states_of_an_answer_replace_each_other_but_not_that_of_its_prompt() -> None:
    pool, table, text = with_states(4), None, [1, 2, 3]
    table = PageTable(pool)
    stepped(table, text, 0, lasting=True)
    for token in range(4, 12):
        text.append(token)
        stepped(table, text, len(text) - 1)
    assert cached(pool, [1, 2, 3]) == 2 and cached(pool, [*text, 0]) == 10
    assert cached(pool, [*text[:9], 0]) == 2, "the states before the last one are gone"


def test_drafts_are_in_no_state_until_they_are_accepted() -> None:
    pool, table = with_states(4), None
    table = PageTable(pool)
    assert stepped(table, [1, 2, 3], 0, drafted=2) is None and table.held == 0
    assert stepped(table, [1, 5, 6, 7], 1, drafted=3) is None and table.held == 1
    assert cached(pool, [1, 5, 6, 7]) == 0


def test_a_state_that_a_sequence_begins_from_is_not_given_away() -> None:
    pool = with_states(1)
    first = PageTable(pool)
    assert stepped(first, [1, 2, 3], 0, lasting=True) == 0
    second, other = PageTable(pool), PageTable(pool)
    assert second.adopt_prefix([1, 2, 9]) == 2
    assert stepped(other, [5, 6, 7], 0, lasting=True) is None
    stepped(second, [1, 2, 9], 2)
    third = PageTable(pool)
    assert stepped(third, [7, 8, 9], 0, lasting=True) == 0 and cached(pool, [1, 2, 9]) == 0


def test_a_text_is_found_by_those_of_its_salt_alone() -> None:
    pool, text = PagePool(16, 2), [1, 2, 3, 4, 5]
    for salt in ("", "a", "b"):
        assert PageTable(pool, salt).adopt_prefix(text) == 0
        table = PageTable(pool, salt)
        table.grow(len(text))
        table.share_computed(text, len(text))
        assert PageTable(pool, salt).adopt_prefix(text) == 4
        table.free()
        assert table.adopt_prefix(text) == 4


def test_a_salt_that_is_the_text_of_a_page_does_not_lead_behind_that_page() -> None:
    pool, first, second = PagePool(16, 2), [11, 12], [13, 14]
    for salt, text in (("", [*first, 9]), (",".join(map(str, first)), [*second, 9])):
        table = PageTable(pool, salt)
        table.grow(len(text))
        table.share_computed(text, len(text))
    assert PageTable(pool).adopt_prefix([*first, *second, 9]) == 2


def test_hashes_find_and_ids_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should two pages ever collide, the second text does not get the first one's keys and values."""
    monkeypatch.setattr(pages_module, "chain_hash", lambda parent, ids: b"the same for all")
    pool = PagePool(4, 2)
    computed(pool, [1, 2])
    assert cached(pool, [3, 4, 5]) == 0 and cached(pool, [1, 2, 5]) == 2


@given(st.integers(1, 30), st.integers(1, 8))
def test_a_sequence_alone_lies_in_neighbouring_pages(pages: int, size: int) -> None:
    """So that its keys are read without gathering them."""
    pool = PagePool(32, size)
    table = PageTable(pool)
    for length in range(1, pages * size + 1):
        table.grow(length)
    assert table.pages == list(range(table.pages[0], table.pages[0] + pages))


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 8))
def test_missing_is_what_growing_takes(have: int, wanted: int, size: int) -> None:
    pool = PagePool(128, size)
    table = PageTable(pool)
    table.grow(have)
    before, missing = len(table.pages), table.missing(wanted)
    table.grow(wanted)
    assert len(table.pages) - before == missing
    assert len(table.pages) * size >= wanted and (missing == 0 or (len(table.pages) - 1) * size < wanted)
