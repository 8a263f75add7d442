"""How far a smaller draft guesses."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.draft.cascade import best_length, drafting_speed
from ssd.speculation.theory import LinearCost

MEMORY_BOUND = LinearCost(0.010, 0.0)


def test_the_speed_is_that_of_a_trial() -> None:
    """Tokens over time of many forwards with dice."""
    dice = random.Random(1)
    forward, token_s = LinearCost(0.010, 0.001), 0.002
    tokens = time = 0.0
    for _ in range(100_000):
        accepted = 0
        while accepted < 3 and dice.random() < 0.7:
            accepted += 1
        tokens += 1 + accepted
        time += 0.010 + 0.001 * 2 * 4 + 3 * 0.002
    assert drafting_speed(3, 0.7, forward, 2, token_s) == pytest.approx(tokens / time, rel=0.01)


@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.9])
def test_one_guess_pays_where_its_acceptance_exceeds_its_cost(acceptance: float) -> None:
    """(1 + a) / (T + t) > 1 / T is a > t / T."""
    assert best_length(acceptance, MEMORY_BOUND, 1, 0.99 * acceptance * 0.010, 16) >= 1
    assert best_length(acceptance, MEMORY_BOUND, 1, 1.01 * acceptance * 0.010, 16) == 0


def test_free_guesses_are_all_wanted_and_useless_ones_never() -> None:
    assert best_length(0.5, MEMORY_BOUND, 1, 0.0, 7) == 7
    assert best_length(0.0, MEMORY_BOUND, 1, 0.001, 7) == 0
    assert best_length(0.9, MEMORY_BOUND, 1, 0.001, 0) == 0


@given(st.floats(0.01, 0.99), st.floats(0, 0.01), st.integers(1, 64), st.floats(1e-5, 0.01), st.integers(0, 16))
def test_the_best_is_no_worse_than_any(acceptance: float, each: float, chains: int, token_s: float, most: int) -> None:
    figures = acceptance, LinearCost(0.005, each), chains, token_s
    best = best_length(*figures, most)
    assert 0 <= best <= most
    assert all(drafting_speed(best, *figures) >= drafting_speed(n, *figures) for n in range(most + 1))


def test_more_chains_make_guesses_dearer() -> None:
    """Where rows cost, a forward of many chains verifies fewer guesses of each."""
    lengths = [best_length(0.8, LinearCost(0.010, 0.0002), chains, 0.001, 16) for chains in (1, 8, 64)]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > lengths[-1]
