"""When a process that died is started again."""

from __future__ import annotations

import math

from ssd.launch.restarts import Restarts


def test_each_death_of_a_minute_doubles_the_wait_and_the_sixth_is_the_last() -> None:
    restarts = Restarts()
    assert [restarts.died(now) for now in range(6)] == [0.1, 0.2, 0.4, 0.8, 1.6, None]
    assert restarts.due is None


def test_deaths_older_than_a_minute_are_forgotten() -> None:
    restarts = Restarts()
    for now in range(0, 1300, 13):
        restarts.came_up()
        assert restarts.died(now) is not None
    restarts.came_up()
    assert restarts.died(1400) == 0.1


def test_deaths_in_a_row_count_however_long_each_start_takes() -> None:
    restarts = Restarts()
    restarts.came_up()
    assert [restarts.died(now) is None for now in range(0, 600, 100)] == [False] * 5 + [True]
    assert restarts.deaths == 6


def test_the_wait_grows_up_to_a_bound_and_with_no_bound_to_their_number_it_always_comes_back() -> None:
    restarts = Restarts(per_minute=math.inf, longest=0.5)
    assert {restarts.died(now / 100) for now in range(5000)} == {0.1, 0.2, 0.4, 0.5}


def test_a_start_that_is_due_is_told_once() -> None:
    restarts = Restarts()
    assert not restarts.taken(0.0)
    restarts.died(0.0)
    assert not restarts.taken(0.05)
    assert restarts.taken(0.1) and not restarts.taken(0.2)
    restarts.replace(7.0)
    assert restarts.taken(7.0)
    assert restarts.died(7.0) == 0.2, "only the death counts"
