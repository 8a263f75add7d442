"""How many cores a target uses: all where they bring something, fewer where they do not, and all again."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from ssd.verifier.core_choice import CoreCount

Seconds = Callable[[int], float]


def gaining(gain: float) -> Seconds:
    """Each doubling of the cores makes a verification `gain` times faster."""
    return lambda cores: 0.008 / gain ** (cores.bit_length() - 1)


def play(
    count: CoreCount, rounds: int, seconds: Seconds, dice: Random, sizes: tuple[int, ...] = (1, 1, 1, 5)
) -> list[int]:
    used = []
    for _ in range(rounds):
        used.append(count.cores(dice.choice(sizes)))
        count.note(seconds(used[-1]) * dice.uniform(0.97, 1.03))
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


@pytest.mark.parametrize("sizes", [(1,), (1, 1, 1, 5), tuple(range(1, 12)), tuple(range(16, 150))], ids=len)
def test_trials_are_few_rounds(sizes: tuple[int, ...]) -> None:
    used = play(CoreCount(2), 20_000, gaining(1.5), Random(2), sizes)
    assert used.count(1) < 0.017 * len(used)


def test_a_prompt_has_all_cores() -> None:
    count = CoreCount(8)
    play(count, 6000, gaining(0.9), Random(3), (1, 2))
    assert [count.cores(tokens) for tokens in (1, 2, 200)] == [1, 1, 8]


def test_fewer_cores_that_won_once_by_chance_are_not_used() -> None:
    """Nor while the size that won does not come again."""
    count = CoreCount(2)
    while not count.trying:
        count.cores(1)
        count.note(0.001)
    while count.trying:
        count.note(0.001)
        count.cores(1)
    used = [count.cores(size) for size in range(2, 2000) if count.note(0.001) is None]
    assert count.count == 2 and used.count(1) < 0.02 * len(used)
