"""Acceptance laws and draws of the simulation, each against what it was made of."""

from __future__ import annotations

import pytest

from ssd.errors import UsageError
from ssd.speculation.theory import expected_tokens
from tools.simulate.statistics import AcceptanceLaw, Draws, Statistics, mixed

K = 4
ALL, TWO = AcceptanceLaw((1.0,)), AcceptanceLaw((1.0, 1.0, 0.0))
NEVER_MISSES = (0.0, 1.0)


def test_a_law_gives_back_the_histogram_it_was_made_of() -> None:
    shares = [0.2, 0.1, 0.3, 0.4]
    law = AcceptanceLaw.from_shares(shares)
    assert law.shares(3) == pytest.approx(shares)
    assert law.tokens(3) == pytest.approx(1 + 0.1 + 0.6 + 1.2)
    drawn = [law.accepted((i + 0.5) / 1000, 3) for i in range(1000)]
    assert [drawn.count(length) / 1000 for length in range(4)] == pytest.approx(shares)
    assert max(law.accepted((i + 0.5) / 1000, 2) for i in range(1000)) == 2


def test_the_rate_of_a_geometric_law_is_its_parameter() -> None:
    assert AcceptanceLaw((0.8,)).rate(7) == pytest.approx(0.8)
    assert AcceptanceLaw((0.8,)).tokens(7) == pytest.approx(expected_tokens(0.8, 7))


def test_hits_and_misses_together_are_what_was_drafted() -> None:
    """A larger fan-out changes which rounds hit, not what is accepted over all of them."""
    plain, miss = AcceptanceLaw((0.9, 0.95)), AcceptanceLaw((0.75, 0.9))
    for fan_out in ((1,), (3,), (4, 3, 2, 1, 9)):
        law = Statistics(plain, plain, miss, (0.2, 0.6)).foreseeing(fan_out, K)
        hits = sum(share * law.hit_chance(k, K, fan_out) for k, share in enumerate(plain.shares(K)))
        assert mixed(hits, law.hit, miss, K).tokens(K) == pytest.approx(plain.tokens(K))
        assert law.hit.tokens(K) > plain.tokens(K)


def test_misses_that_accept_more_than_there_is_are_refused() -> None:
    with pytest.raises(UsageError, match="misses"):
        Statistics(TWO, TWO, ALL, (0.5, 0.0)).foreseeing((1,), K)


def test_a_law_scaled_to_a_mean_has_it() -> None:
    law = Statistics.alike(AcceptanceLaw((0.8, 0.95)), NEVER_MISSES).scaled(2.5, K)
    assert law.plain.tokens(K) == pytest.approx(2.5) and law.hit == law.plain


def test_draws_are_even() -> None:
    draws = Draws(5, rows=2, rounds=64)
    for row in range(2):
        assert sorted(int(64 * draws.outcome(row, index)) for index in range(64)) == list(range(64))
        assert draws.outcome(row, 3) == draws.outcome(row, 67)
    assert [draws.outcome(0, i) for i in range(64)] != [draws.outcome(1, i) for i in range(64)]
