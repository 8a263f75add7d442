"""What a missed row does: the cases in which waiting clearly pays or clearly does not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ssd.speculation.theory import LinearCost, depth_worth_waiting_for

MS = 1e-3
ROUND = LinearCost(20 * MS, 0.0)
few = st.integers(1, 8)
acceptances = st.integers(1, 19).map(lambda n: n / 20)
depth_times = st.integers(1, 40).map(lambda n: n * MS)


def test_nobody_waits_without_a_miss() -> None:
    assert (
        depth_worth_waiting_for([2, 3], missed=0, lookahead=4, acceptance=0.9, verify=LinearCost(1.0, 0.0), depth_s=0.0)
        == 0
    )


def test_a_free_draft_is_awaited_in_full() -> None:
    assert depth_worth_waiting_for([4, 4], missed=1, lookahead=4, acceptance=0.3, verify=ROUND, depth_s=0.0) == 4


def test_a_useless_draft_is_not_awaited() -> None:
    assert depth_worth_waiting_for([], missed=3, lookahead=4, acceptance=0.0, verify=ROUND, depth_s=0.0) == 0
    assert depth_worth_waiting_for([], missed=3, lookahead=4, acceptance=0.0, verify=ROUND, depth_s=0.001) == 0


def test_a_slow_draft_is_not_awaited() -> None:
    assert depth_worth_waiting_for([], missed=1, lookahead=4, acceptance=0.9, verify=ROUND, depth_s=0.5) == 0


def test_alone_by_hand() -> None:
    """Tokens per second at depths 0, 1, 2 with a = .5, 20 ms and 5 ms: 1/20, 1.5/25, 1.75/30 -> 50, 60, 58.3."""
    assert depth_worth_waiting_for([], missed=1, lookahead=4, acceptance=0.5, verify=ROUND, depth_s=5 * MS) == 1
    assert depth_worth_waiting_for([], 1, 4, 0.5, ROUND, 5 * MS, away_s=ROUND.fixed) == 0
    assert depth_worth_waiting_for([], 1, 4, 0.5, ROUND, 0.0, away_s=ROUND.fixed / 4) == 4


def test_a_token_that_is_dear_to_verify_is_not_waited_for() -> None:
    """Another token takes 3 ms more: 1/20, 1.5/28, 1.75/36 -> 50, 53.6, 48.6; and 6 ms: 50, 48.4, 41.7."""
    for each, worth in ((3 * MS, 1), (6 * MS, 0)):
        line = LinearCost(20 * MS - each, each)
        assert depth_worth_waiting_for([], missed=1, lookahead=4, acceptance=0.5, verify=line, depth_s=5 * MS) == worth


def test_ready_rows_are_not_stalled_for_one_miss() -> None:
    """The same miss among seven rows that could go at once."""
    ready = [4] * 7
    assert depth_worth_waiting_for(ready, missed=1, lookahead=4, acceptance=0.5, verify=ROUND, depth_s=5 * MS) == 0


@given(few, few, few, acceptances, depth_times)
def test_more_ready_rows_never_wait_longer(
    ready: int, more: int, missed: int, acceptance: float, depth_s: float
) -> None:
    few_wait, many_wait = (
        depth_worth_waiting_for([4] * rows, missed, 8, acceptance, ROUND, depth_s) for rows in (ready, ready + more)
    )
    assert 0 <= many_wait <= few_wait <= 8


@given(few, few, acceptances, depth_times)
def test_the_lookahead_is_the_most(missed: int, lookahead: int, acceptance: float, depth_s: float) -> None:
    """And a smaller one gives the same answer unless it cuts it."""
    wide = depth_worth_waiting_for([], missed, 8, acceptance, ROUND, depth_s)
    assert depth_worth_waiting_for([], missed, lookahead, acceptance, ROUND, depth_s) == min(wide, lookahead)
