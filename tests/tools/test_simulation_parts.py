"""Acceptance laws, draws and cascades of the simulation, each against what it was made of."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from ssd.errors import UsageError
from ssd.speculation.theory import LinearCost, expected_tokens
from tools.simulate.cascade import Level, cascade_pays, draft_seconds, drafter
from tools.simulate.run import simulate
from tools.simulate.setup import Devices, Setup
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


SMALL, MEDIUM = Level(LinearCost(0.5, 0.0), 3, 0.8, 0.6), Level(LinearCost(2.0, 0.0), 0, 0.0, 0.9)
TINY = Level(LinearCost(0.1, 0.0), 2, 0.7, 0.3)


@pytest.mark.parametrize("levels", [[SMALL, MEDIUM], [TINY, SMALL, MEDIUM]])
def test_the_time_of_a_cascade_is_the_mean_of_its_rounds(levels: list[Level]) -> None:
    found, count = 0.0, 20_000
    device = drafter(levels, Random(3))
    for _ in range(count):
        drafted = 0
        while drafted < 7:
            step = device.next()
            drafted += step.tokens
            found += step.time.at(1)
    assert found / count == pytest.approx(draft_seconds(levels, 7), rel=0.01)


def test_a_cascade_that_is_always_right() -> None:
    """Two rounds of 3 + 1 tokens for 7: 2 x (3 x 0.5 + 2)."""
    right = replace(SMALL, by_next=1.0)
    assert draft_seconds([right, MEDIUM], 7) == pytest.approx(2 * 3.5)
    assert draft_seconds([replace(SMALL, by_next=0.0), MEDIUM], 7) == pytest.approx(7 * 3.5)


def test_a_forward_of_the_larger_draft_is_over_all_proposed_rows() -> None:
    medium = Level(LinearCost(2.0, 0.1))
    levels = [replace(SMALL, by_next=1.0), medium]
    assert draft_seconds(levels, 4, chains=5) == pytest.approx(1.5 + 2 + 0.1 * 5 * 4)
    assert drafter(levels, Random(0)).next().time.at(5) == pytest.approx(1.5 + 2 + 0.1 * 5 * 4)


def test_the_predicted_speed_of_a_cascade_is_the_simulated_one() -> None:
    verify = LinearCost(18.0, 0.0)
    found = cascade_pays([SMALL, MEDIUM], verify, 7, overhead=0.5)
    assert [(p.first, p.last) for p in found] == [(0, 0), (0, 1), (1, 1)]
    levels = [SMALL, MEDIUM]
    for first, last, _, speed in found:
        law = Statistics.alike(AcceptanceLaw((levels[last].by_target,)), NEVER_MISSES)
        case = Setup(Devices(verify, tuple(levels[first : last + 1]), overhead=0.5), law, "sd")
        assert simulate(case, 4096).tokens_per_second == pytest.approx(speed, rel=0.01)


def test_a_cascade_pays_where_its_small_draft_is_right_and_not_where_it_is_wrong() -> None:
    def gain(by_next: float) -> float:
        _, both, medium = cascade_pays([replace(SMALL, by_next=by_next), MEDIUM], LinearCost(18.0, 0.0), 7)
        return both.tokens_per_second / medium.tokens_per_second

    assert gain(0.9) > 1.1 and gain(0.1) < 0.9


def test_a_cascade_that_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError):
        cascade_pays([], LinearCost(1.0, 0.0), 7)
    with pytest.raises(UsageError):
        cascade_pays([MEDIUM], LinearCost(1.0, 0.0), 0)
    with pytest.raises(UsageError):
        drafter([MEDIUM, MEDIUM], Random(0))
