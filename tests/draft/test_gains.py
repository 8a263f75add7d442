"""What a chain is worth, and how many of them a step should grow."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.draft.chain_scheduler import gain, outcome_probability, worth_growing
from ssd.speculation.fan_out import hit_rate
from ssd.speculation.theory import LinearCost


@given(st.floats(0.05, 0.95), st.floats(0.05, 1.0), st.floats(0.1, 2.0), st.lists(st.integers(1, 9), min_size=1))
def test_the_outcomes_of_a_list_are_as_likely_as_its_hit_rate(a: float, c: float, r: float, fan_out: list[int]) -> None:
    lookahead = len(fan_out) - 1
    total = sum(
        outcome_probability(k, lookahead, rank, a, (c, r)) for k, f in enumerate(fan_out) for rank in range(1, f + 1)
    )
    assert total == pytest.approx(hit_rate(a, fan_out, (c, r)))


@given(st.floats(0.05, 0.95), st.floats(0.05, 1.0), st.floats(0.1, 2.0), st.integers(0, 8), st.integers(1, 16))
def test_a_better_candidate_is_likelier(a: float, c: float, r: float, accepted: int, rank: int) -> None:
    first, second = (outcome_probability(accepted, 8, n, a, (c, r)) for n in (rank, rank + 1))
    if rank > 1:  # the first one has 1 - c, which may be anything
        assert first >= second
    assert second >= 0


def test_another_token_counts_if_all_before_it_are_right() -> None:
    """Against dice: tokens that a chain of one more brings."""
    dice = random.Random(3)
    rounds = 200_000
    brought = sum(dice.random() < 0.3 and all(dice.random() < 0.8 for _ in range(3)) for _ in range(rounds))
    assert gain(0.3, 2, 0.8) == pytest.approx(brought / rounds, rel=0.02)


def test_chains_that_cost_nothing_all_grow_and_dear_ones_do_not() -> None:
    gains = [0.5, 0.3, 0.1, 0.01, 0.001]
    assert worth_growing(gains, LinearCost(0.010, 0.0)) == 5
    assert worth_growing(gains, LinearCost(0.0, 0.010)) == 1
    assert worth_growing(gains, LinearCost(0.010, 0.002)) == 2
    assert worth_growing([], LinearCost(0.010, 0.002)) == 0
    assert worth_growing([0.2] * 5, LinearCost(0.001, 0.010)) == 5  # alike: more of them share what is fixed


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=40), st.floats(0, 0.1), st.floats(0, 0.1))
def test_no_other_number_brings_more_a_second(gains: list[float], fixed: float, each: float) -> None:
    gains, step = sorted(gains, reverse=True), LinearCost(fixed + 1e-6, each)
    rates = [sum(gains[:n]) / step.at(n) for n in range(1, len(gains) + 1)]
    assert rates[worth_growing(gains, step) - 1] == pytest.approx(max(rates))
