"""What a missed row does: the cases in which waiting clearly pays or clearly does not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.speculation.theory import LinearCost, depth_worth_waiting_for

MS = 1e-3
ROUND = LinearCost(20 * MS, 0.0)
few = st.integers(1, 8)
acceptances = st.integers(1, 19).map(lambda n: n / 20)
depth_times = st.integers(1, 40).map(lambda n: n * MS)


def worth(*given: Any, **named: Any) -> int:
    return depth_worth_waiting_for(*given, **named).depth


def test_nobody_waits_without_a_miss() -> None:
    assert worth([2, 3], missed=0, lookahead=4, acceptance=0.9, verify=LinearCost(1.0, 0.0), depth_s=0.0) == 0


def test_a_free_draft_is_awaited_in_full() -> None:
    assert worth([4, 4], missed=1, lookahead=4, acceptance=0.3, verify=ROUND, depth_s=0.0) == 4


def test_a_useless_draft_is_not_awaited() -> None:
    assert worth([], missed=3, lookahead=4, acceptance=0.0, verify=ROUND, depth_s=0.0) == 0
    assert worth([], missed=3, lookahead=4, acceptance=0.0, verify=ROUND, depth_s=0.001) == 0


def test_a_slow_draft_is_not_awaited() -> None:
    assert worth([], missed=1, lookahead=4, acceptance=0.9, verify=ROUND, depth_s=0.5) == 0


def test_alone_by_hand() -> None:
    """Tokens per second at depths 0, 1, 2 with a = .5, 20 ms and 5 ms: 1/20, 1.5/25, 1.75/30 -> 50, 60, 58.3."""
    assert worth([], missed=1, lookahead=4, acceptance=0.5, verify=ROUND, depth_s=5 * MS) == 1
    assert worth([], 1, 4, 0.5, ROUND, 5 * MS, away_s=ROUND.fixed) == 0
    assert worth([], 1, 4, 0.5, ROUND, 0.0, away_s=ROUND.fixed / 4) == 4


def test_the_figures_say_why() -> None:
    """As above: half a token more in 5 ms is 100 a second, against 50; in 20 ms it is 25."""
    paid, lost = (depth_worth_waiting_for([], 1, 4, 0.5, ROUND, step * MS) for step in (5, 20))
    assert paid == (1, 1, pytest.approx(0.5), pytest.approx(5 * MS), pytest.approx(50))
    assert lost == (0, 1, pytest.approx(0.5), pytest.approx(20 * MS), pytest.approx(50))
    assert depth_worth_waiting_for([], 1, 4, 0.5, ROUND, 5 * MS, speed=120.0)[::4] == (0, 120.0)


def test_a_token_that_is_dear_to_verify_is_not_waited_for() -> None:
    """Another token takes 3 ms more: 1/20, 1.5/28, 1.75/36 -> 50, 53.6, 48.6; and 6 ms: 50, 48.4, 41.7."""
    for each, most in ((3 * MS, 1), (6 * MS, 0)):
        line = LinearCost(20 * MS - each, each)
        assert worth([], missed=1, lookahead=4, acceptance=0.5, verify=line, depth_s=5 * MS) == most


def test_ready_rows_are_not_stalled_for_one_miss() -> None:
    """The same miss among seven rows that could go at once."""
    ready = [4] * 7
    assert worth(ready, missed=1, lookahead=4, acceptance=0.5, verify=ROUND, depth_s=5 * MS) == 0


@given(few, few, few, acceptances, depth_times)
def test_more_ready_rows_never_wait_longer(
    ready: int, more: int, missed: int, acceptance: float, depth_s: float
) -> None:
    few_wait, many_wait = (worth([4] * rows, missed, 8, acceptance, ROUND, depth_s) for rows in (ready, ready + more))
    assert 0 <= many_wait <= few_wait <= 8


@given(few, few, acceptances, depth_times)
def test_the_lookahead_is_the_most(missed: int, lookahead: int, acceptance: float, depth_s: float) -> None:
    """And a smaller one gives the same answer unless it cuts it."""
    wide = worth([], missed, 8, acceptance, ROUND, depth_s)
    assert worth([], missed, lookahead, acceptance, ROUND, depth_s) == min(wide, lookahead)
