"""Theorem 12 against the published values, a brute-force search, and laws that it must recover."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.speculation.fan_out import hit_chance, hit_rate, miss_law, optimal_fan_out


@pytest.mark.parametrize(
    ("acceptance", "exponent", "lookahead", "budget", "expected"),
    [
        (0.8, 0.6, 7, 24, (4, 4, 3, 3, 2, 2, 2, 4)),
        (0.9, 0.6, 7, 24, (3, 3, 2, 2, 2, 2, 2, 8)),
        (0.8, 0.6, 4, 15, (3, 3, 2, 2, 5)),
    ],
)
def test_check_values(
    acceptance: float, exponent: float, lookahead: int, budget: int, expected: tuple[int, ...]
) -> None:
    """ALGORITHM 3."""
    assert optimal_fan_out(acceptance, exponent, lookahead, budget) == expected


@settings(max_examples=300)
@given(st.floats(0, 1), st.floats(0.05, 3), st.integers(0, 16), st.integers(0, 40))
def test_the_budget_is_spent_on_every_length(acceptance: float, exponent: float, lookahead: int, more: int) -> None:
    found = optimal_fan_out(acceptance, exponent, lookahead, lookahead + 1 + more)
    assert len(found) == lookahead + 1 and min(found) >= 1 and sum(found) == lookahead + 1 + more
    assert list(found[:-1]) == sorted(found[:-1], reverse=True)


@pytest.mark.parametrize("acceptance", [0.3, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("exponent", [0.4, 0.6, 1.2])
def test_no_other_list_hits_much_more(acceptance: float, exponent: float) -> None:
    """But for rounding: against every list of the same budget."""
    lookahead, budget, law = 3, 12, (0.5, exponent)
    lists = [(*head, budget - sum(head)) for head in product(range(1, budget), repeat=lookahead) if sum(head) < budget]
    best = max(hit_rate(acceptance, candidate, law) for candidate in lists)
    found = hit_rate(acceptance, optimal_fan_out(acceptance, exponent, lookahead, budget), law)
    uniform = hit_rate(acceptance, (budget // (lookahead + 1),) * (lookahead + 1), law)
    assert best - found <= 0.15 * (best - uniform) + 1e-3
    assert found >= uniform


def test_a_budget_that_leaves_a_length_out_is_refused() -> None:
    with pytest.raises(ValueError, match="4 chains do not cover the 5 accepted lengths"):
        optimal_fan_out(0.5, 0.6, 4, 4)


@given(st.floats(0.05, 0.9), st.floats(0.1, 2))
def test_a_power_law_is_recovered(c: float, r: float) -> None:
    assert miss_law({f: c * f**-r for f in (1, 2, 4, 8)}) == pytest.approx((c, r))


def test_the_papers_misses_follow_one() -> None:
    """ALGORITHM 4, 1B draft, T = 0: within a tenth at every fan-out."""
    rates = {2: 0.230, 4: 0.133, 8: 0.080, 16: 0.053, 32: 0.039, 64: 0.029}
    c, r = miss_law(rates)
    assert 0.4 < r < 0.8
    assert all(abs(c * f**-r / rate - 1) < 0.2 for f, rate in rates.items())


@pytest.mark.parametrize("rates", [{}, {3: 0.2}, {1: 0.5, 2: 0.0}])
def test_one_point_is_no_law(rates: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="two fan-outs"):
        miss_law(rates)


def test_hit_rate_by_hand() -> None:
    """a = .5, K = 1: half of the rounds accept none, half accept all."""
    assert hit_rate(0.5, (1, 4), (0.5, 0.5)) == pytest.approx(0.5 * 0.5 + 0.5 * 0.75)


def test_the_chance_of_a_hit_is_a_probability() -> None:
    assert hit_chance(4, (0.5, 0.5)) == pytest.approx(0.75)
    assert hit_chance(1, (3.0, 0.5)) == 0.0
