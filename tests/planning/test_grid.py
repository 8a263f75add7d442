"""Predictions and break-even points against closed forms, the tuner, each other and the simulator."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.planning.break_even import MAX_BATCH, break_even, paying_batches, where, with_acceptance, with_misses
from ssd.planning.grid import Grid, Pair, forecast
from ssd.planning.profile import PAPER
from ssd.speculation.fan_out import hit_rate
from ssd.speculation.theory import LinearCost, acceptance_rate, expected_tokens_by_position, speedup_sd, speedup_ssd
from ssd.tuning.costs import CostTable
from ssd.tuning.predictor import predicted, predicted_sd
from tools.simulate.cascade import Level
from tools.simulate.run import simulate
from tools.simulate.setup import Devices, Setup
from tools.simulate.statistics import AcceptanceLaw, Statistics

MS = 1e-3
LLAMA = PAPER.pair()
EVEN = replace(LLAMA, acceptance=(0.8,))
GRID = Grid((1, 2, 4, 7), (8, 16, 24))

pairs = st.builds(
    Pair,
    verify=st.builds(LinearCost, st.floats(1e-3, 0.1), st.floats(0, 1e-3)),
    step=st.builds(LinearCost, st.floats(0, 0.02), st.floats(0, 1e-4)),
    acceptance=st.lists(st.floats(0, 1), min_size=1, max_size=4).map(tuple),
    misses=st.tuples(st.floats(0, 1), st.floats(0, 2)),
    overhead=st.floats(0, 0.01),
    target_gpus=st.floats(0.5, 8),
    draft_gpus=st.floats(0, 4),
)


# -- speeds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("lookahead", [1, 4, 7])
def test_all_hits_and_free_drafts_are_theorem_7(batch: int, lookahead: int) -> None:
    pair = replace(LLAMA, step=LinearCost(0.0, 0.0), misses=(0.0, 1.0))
    found = forecast(pair, batch, Grid((lookahead,), (16,)))
    round_s = pair.verify.at(batch * (lookahead + 1)) + pair.overhead
    tokens = expected_tokens_by_position(pair.acceptance, lookahead)
    expected = batch * speedup_ssd(1.0, tokens, 1.0, 0.0, 0.0) / round_s
    assert found.best.hits == 1.0
    assert found.best.speed == pytest.approx(expected)
    assert found.best_sd[1] == pytest.approx(batch * speedup_sd(tokens, 0.0) / round_s)


def test_plain_decoding_knows_no_k_and_no_overhead() -> None:
    for grid in (Grid((1,), (8,)), GRID):
        assert forecast(LLAMA, 4, grid).ar == pytest.approx(4 / (18.2 * MS + 4 * 64e-6))


def test_the_speeds_are_those_of_the_tuner() -> None:
    """With the acceptance rate that goes with each K, and the overhead in every verification."""
    assert [LLAMA.round_s(tokens) for tokens in (0, 5)] == pytest.approx([19.2 * MS, 19.2 * MS + 5 * 64e-6])
    found = forecast(LLAMA, 4, GRID)
    assert [(s.lookahead, s.budget) for s in found.settings] == [
        (k, b) for k in GRID.lookaheads for b in GRID.budgets if b > k
    ]
    for setting in found.settings:
        rate = AcceptanceLaw(LLAMA.acceptance).rate(setting.lookahead)
        assert LLAMA.rate(setting.lookahead) == rate
        assert setting.speed == predicted(LLAMA, 4, setting.lookahead, setting.fan_out)
        assert setting.hits == hit_rate(rate, setting.fan_out, LLAMA.misses)
        assert sum(setting.fan_out) == setting.budget or max(setting.fan_out) == 16
    assert max(forecast(LLAMA, 1, Grid((1,), (63,))).best.fan_out) == 16
    assert found.sd == tuple((k, predicted_sd(LLAMA, 4, k)) for k in GRID.lookaheads)


def test_models_that_work_in_turn_have_times_of_their_own() -> None:
    alone = replace(LLAMA, verify_alone=LinearCost(10 * MS, 0.0), step_alone=LinearCost(1 * MS, 0.0))
    together, apart = forecast(LLAMA, 2, GRID), forecast(alone, 2, GRID)
    assert apart.settings == together.settings
    assert apart.ar == pytest.approx(2 / (10 * MS))
    for lookahead, speed in apart.sd:
        tokens = expected_tokens_by_position(LLAMA.acceptance, lookahead)
        assert speed == pytest.approx(2 * tokens / (10 * MS + LLAMA.overhead + lookahead * MS))


def test_a_staircase_is_planned_with_as_it_is() -> None:
    """Kernels take four rows at once: the fifth token of a verification costs as much as the first."""
    stairs = CostTable({1: 10 * MS, 4: 10 * MS, 5: 20 * MS, 8: 20 * MS, 9: 30 * MS})
    step = CostTable({1: 1 * MS, 16: 1 * MS})
    pair = Pair(stairs, step, (0.7,), (0.2, 0.6), verify_alone=stairs, step_alone=step)
    grid = Grid((2, 3, 4, 5, 6), (8,))
    found = forecast(pair, 1, grid)
    assert found.ar == pytest.approx(100)
    assert (found.best_sd[0], found.best.lookahead) == (3, 3)
    line = replace(pair, verify=LinearCost(8 * MS, 2 * MS), verify_alone=None)
    assert forecast(line, 1, grid).best_sd[0] == 2


@settings(max_examples=40)
@given(pairs, st.integers(1, 32))
def test_the_best_setting_is_the_fastest_of_its_table(pair: Pair, batch: int) -> None:
    found = forecast(pair, batch, GRID)
    assert found.best in found.settings and found.best_sd in found.sd
    assert found.best.speed == max(setting.speed for setting in found.settings)
    assert found.best_sd[1] == max(speed for _, speed in found.sd)
    alike = [sum(s.fan_out) for s in found.settings if s.speed == found.best.speed]
    assert sum(found.best.fan_out) == min(alike)


def test_more_acceptance_more_hits_and_faster_steps_are_never_slower() -> None:
    """One sequence; in a batch where hardly anything hits the tuner's prediction falls a little (break_even.py)."""

    def speeds(changed: list[Pair]) -> list[float]:
        return [forecast(pair, 1, GRID).best.speed for pair in changed]

    levels = [level / 20 for level in range(21)]
    for rising in (
        speeds([with_acceptance(LLAMA, level) for level in levels]),
        speeds([with_misses(LLAMA, level) for level in levels]),
        speeds([replace(LLAMA, step=LinearCost(10 * MS * (1 - level), 0.0)) for level in levels]),
    ):
        assert rising == sorted(rising) and rising[-1] > rising[0]


def test_acceptance_changes_from_none_over_the_present_one_to_all() -> None:
    assert with_acceptance(LLAMA, 0.5).acceptance == pytest.approx(LLAMA.acceptance)
    assert max(with_acceptance(LLAMA, 0.0).acceptance) == 0.0
    assert with_acceptance(LLAMA, 1.0).acceptance == pytest.approx((1.0,) * 7)
    assert 0 < with_acceptance(replace(LLAMA, acceptance=(0.0,)), 0.9).acceptance[0] < 1


def test_the_rate_counts_tokens_that_were_tested() -> None:
    """Rates .5 and 1: half of the rounds accept both tokens, half test one. 1 of 1.5."""
    assert acceptance_rate((0.5, 1.0), 2) == pytest.approx(1 / 1.5)
    assert acceptance_rate((0.7,), 5) == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("lookaheads", "budgets", "words"),
    [
        ((7,), (7,), "K = 7 needs a budget of at least K \\+ 1 = 8"),
        ((1, 2, 9), (4, 9), "K = 9"),
        ((3, 4), (3, 8), "budget of 3 is below K \\+ 1 = 4"),
        ((), (8,), "K of at least 1"),
        ((0,), (8,), "K of at least 1"),
        ((1,), (), "budget"),
    ],
)
def test_a_grid_without_a_setting_is_refused(lookaheads: tuple[int, ...], budgets: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Grid(lookaheads, budgets).check()


# -- break-even -------------------------------------------------------------------------------------------------------


def test_ranges_by_hand() -> None:
    points = [piece / 8 for piece in range(9)]
    assert where(lambda x: x - 0.3, points) == (pytest.approx((0.3, 1.0)),)
    assert where(lambda x: 0.3 - x, points) == (pytest.approx((0.0, 0.3)),)
    assert where(lambda x: 0.04 - (x - 0.5) ** 2, points) == (pytest.approx((0.3, 0.7)),)
    assert where(lambda x: (x - 0.3) * (x - 0.7), points) == (pytest.approx((0.0, 0.3)), pytest.approx((0.7, 1.0)))
    assert where(lambda x: 1.0, points) == ((0.0, 1.0),)
    assert where(lambda x: -1.0, points) == ()
    assert where(lambda x: 37.5 - x, [1, 2, 4, 8, 16, 32, 64], whole=True) == ((1, 37),)
    assert where(lambda x: x - 36.5, [1, 2, 4, 8, 16, 32, 64], whole=True) == ((37, 64),)


@pytest.mark.parametrize("batch", [1, 8])
def test_at_the_break_even_points_both_sides_are_equal(batch: int) -> None:
    found = forecast(EVEN, batch, GRID)
    even = break_even(EVEN, found, GRID)
    for mode, ranges in (("sd", even.acceptance_over_sd), ("ar", even.acceptance_over_ar)):
        ((threshold, top),) = ranges
        assert 0 < threshold < 0.8 and top == 1.0
        per_gpu = forecast(replace(EVEN, acceptance=(threshold,)), batch, GRID).per_gpu(EVEN)
        assert per_gpu["ssd"] == pytest.approx(per_gpu[mode], rel=1e-5)
    ((hits, top),) = even.hits_over_sd
    assert hits < found.best.hits < top == 1.0
    c, r = EVEN.misses
    fewer = replace(EVEN, misses=(c * (1 - hits) / (1 - found.best.hits), r))
    per_gpu = forecast(fewer, batch, GRID).per_gpu(EVEN)
    assert per_gpu["ssd"] == pytest.approx(per_gpu["sd"], rel=1e-5)
    dear = replace(EVEN, draft_gpus=even.worth)
    per_gpu = found.per_gpu(dear)
    assert per_gpu["ssd"] == pytest.approx(max(per_gpu["ar"], per_gpu["sd"]))


@settings(max_examples=15)
@given(pairs, st.integers(1, 32))
def test_a_draft_device_pays_where_it_is_worth_more_than_it_takes(pair: Pair, batch: int) -> None:
    grid = Grid((1, 4), (8,))
    found = forecast(pair, batch, grid)
    even = break_even(pair, found, grid)
    if abs(even.worth - pair.draft_gpus) > 1e-6:
        assert even.pays == (even.worth > pair.draft_gpus)
    for first, last in (*even.acceptance_over_sd, *even.acceptance_over_ar, *even.hits_over_sd):
        assert 0 <= first <= last <= 1


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_more_hits_never_make_it_slower(batch: int) -> None:
    speeds = [forecast(with_misses(LLAMA, level / 10), batch, GRID).best.speed for level in range(11)]
    assert all(more >= 0.999 * less for less, more in pairwise(speeds))


def test_the_last_batch_that_pays_is_the_last() -> None:
    ((first, last),) = paying_batches(LLAMA, GRID)
    assert first == 1 and 1 < last < MAX_BATCH
    for batch, pays in ((int(last), True), (int(last) + 1, False)):
        assert break_even(LLAMA, forecast(LLAMA, batch, GRID), GRID).pays == pays


def test_a_draft_that_is_never_right_never_pays_and_one_for_nothing_does() -> None:
    useless = replace(LLAMA, acceptance=(0.0,))
    assert paying_batches(useless, GRID) == ()
    free = replace(LLAMA, draft_gpus=0.0)
    assert break_even(free, forecast(free, 1, GRID), GRID).pays
    assert paying_batches(free, GRID) == ((1, MAX_BATCH),)


# -- the simulator ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lookahead", [2, 4, 7, 8])
def test_the_simulated_engine_is_as_fast_as_predicted(lookahead: int) -> None:
    """The paper's pair alone: `ssd` within 10 %, `sd` within 3 % (measured: 4 % and 0.1 %)."""
    found = forecast(LLAMA, 1, Grid((lookahead,), (24,)))
    law = AcceptanceLaw(LLAMA.acceptance)
    devices = Devices(LLAMA.verify, (Level(LLAMA.step),), overhead=LLAMA.overhead)
    statistics = Statistics.alike(law, LLAMA.misses).foreseeing(found.best.fan_out, lookahead)
    setup = Setup(devices, statistics, "ssd", "anytime", lookahead, found.best.fan_out, 1, "auto")
    assert found.best.speed == pytest.approx(simulate(setup).throughput, rel=0.10)
    assert found.best_sd[1] == pytest.approx(simulate(replace(setup, mode="sd")).throughput, rel=0.03)
    assert found.ar == pytest.approx(simulate(replace(setup, mode="ar"), 64).throughput)
