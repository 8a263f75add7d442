"""How many cores a target uses: all where they bring something, fewer where they do not, and all again."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from ssd.tuning.core_count import CoreCount

Seconds = Callable[[int], float]


def gaining(gain: float) -> Seconds:
    """Each doubling of the cores makes a verification `gain` times faster."""
    return lambda cores: 0.008 / gain ** (cores.bit_length() - 1)


def play(count: CoreCount, rounds: int, seconds: Seconds, dice: Random) -> list[int]:
    used, now = [], count.count
    for _ in range(rounds):
        used.append(now)
        now = count.note(dice.choice((1, 1, 1, 5)), seconds(now) * dice.uniform(0.97, 1.03))
    return used


@pytest.mark.parametrize(
    ("gain", "most", "expected"), [(1.5, 2, 2), (1.05, 2, 1), (0.9, 8, 1), (1.2, 16, 16), (1.5, 1, 1)]
)
def test_cores_that_bring_under_a_tenth_are_left_alone(gain: float, most: int, expected: int) -> None:
    count, dice = CoreCount(most), Random(0)
    play(count, 6000, gaining(gain), dice)
    assert count.count == expected


def test_cores_that_bring_something_again_are_used_again() -> None:
    count, dice = CoreCount(4), Random(1)
    play(count, 3000, gaining(0.9), dice)
    assert count.count == 1
    play(count, 3000, gaining(1.7), dice)
    assert count.count == 4


def test_trials_are_short() -> None:
    used = play(CoreCount(2), 20_000, gaining(1.5), Random(2))
    assert 0 < used.count(1) < 0.02 * len(used)


def test_a_trial_whose_rounds_do_not_come_again_is_given_up() -> None:
    count = CoreCount(2)
    used = [count.note(size, 0.001) for size in range(1, 2000)]
    assert count.count == 2 and used.count(1) < 0.2 * len(used)
