"""What rank 0 tells the others: rows and what is new of their page tables, never more, and enough."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.errors import SsdError
from ssd.execution.batch import Row
from ssd.ipc.messages import RANK_STEP, RankStep, RowStep
from ssd.ipc.public import pack, unpack
from ssd.law import Law
from ssd.verifier.ranks import PageTables, step_of

SIZE = 4

# A slot, pages that it gives back at its end, new ones, whether it is another sequence now, tokens of the row.
Turn = tuple[int, int, int, bool, int]
TURNS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 4), st.booleans(), st.integers(1, 9)), max_size=30
)


def travelled(step: RankStep) -> RankStep:
    _, heard = unpack(pack(step), RANK_STEP)
    assert isinstance(heard, RankStep)
    return heard


@given(TURNS)
def test_page_tables_are_the_same_on_both_sides(turns: list[Turn]) -> None:
    """Whatever becomes of the sequences: they grow, lose pages and end, and their slots go to others."""
    ours, theirs = PageTables(SIZE), PageTables(SIZE)
    tables: dict[int, list[int]] = {}
    page = 0
    for slot, given_back, new, another, tokens in turns:
        table = [] if another else tables.get(slot, [])[: -given_back or None]
        table = [*table, *range(page, page + new + 1)]
        page += new + 1
        tables[slot] = table
        stop = SIZE * len(table) - tokens % SIZE
        row = Row([7] * min(tokens, stop), stop - min(tokens, stop), table, 1, slot)
        heard = travelled(step_of([row], None, ours))
        got = theirs.row(heard.rows[0])
        assert got == Row(row.token_ids, row.start, table[: len(got.pages)], 1, slot)
        assert SIZE * len(got.pages) >= row.stop


def test_what_is_known_is_not_said_again() -> None:
    ours = PageTables(SIZE)
    told = [ours.news(Row([1], at, [8, 9, 3], 1, 5)) for at in (0, 1, 3, 4, 9)]
    assert [(step.kept, step.pages) for step in told] == [(0, [8]), (1, []), (1, []), (1, [9]), (2, [3])]
    shorter = ours.news(Row([1], 4, [8, 9, 3], 1, 5))
    assert (shorter.kept, shorter.pages) == (2, [])
    assert ours.news(Row([1], 4, [8, 2], 1, 5)) == RowStep(5, 4, [1], 1, 0, [8, 2])


def test_laws_travel_with_their_rows() -> None:
    rows = [Row([1, 2], 0, [0], 2, slot) for slot in (0, 1)]
    step = travelled(step_of(rows, [Law(), Law(0.7, seed=2**63 - 1)], PageTables(SIZE)))
    assert step.laws == [Law(), Law(0.7, seed=2**63 - 1)]


def test_a_rank_that_missed_something_says_so() -> None:
    with pytest.raises(SsdError, match="rank 0 knows of 3 pages of slot 1 where there are 0"):
        PageTables(SIZE).row(RowStep(1, 9, [5], 1, 3, []))
