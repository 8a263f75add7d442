"""The tuner against worlds whose best setting is known: times and rates in, the setting out."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.speculation.fan_out import hit_rate
from ssd.speculation.theory import LinearCost
from ssd.tuning.learner import AfterMiss, Learner, LinearFit, Measurements
from ssd.tuning.tuner import ALIKE, ALIKE_ON_ONE_BUS, Choices, SpeculationPlan, best_plan, predicted, predicted_sd

MS = 1e-3
ANY = Choices(tuple(range(9)))
# Two cores: a verification of 55 ms and a little more for each token, tree steps of 17 ms however many chains.
CPU = Measurements(LinearCost(55 * MS, 1 * MS), LinearCost(17 * MS, 0.05 * MS), 55 * MS, (0.55,), 0.55, (0.5, 0.7))
# The paper's pair: 18 ms, a step 2 ms.
GPU = Measurements(LinearCost(18 * MS, 0.02 * MS), LinearCost(2 * MS, 0.002 * MS), 18 * MS, (0.85,), 0.85, (0.25, 0.6))


def test_speed_by_hand() -> None:
    """K = 1, F = 1, 1; a token takes no time of its own, a step little of a verification: depth 1. a = .5, c = .5."""
    measured = Measurements(LinearCost(0.1, 0.0), LinearCost(0.02, 0.0), 0.1, (0.5,), 0.5, (0.5, 1.0))
    # hit: 1.5 tokens in .1 s, half of the rounds; a miss goes at once: 1 token in .1, or waits: 1.5 in .15.
    with_misses = replace(measured, missed=AfterMiss(1.2, 0.01, 0.0))
    assert predicted(with_misses, 1, 1, (1, 1)) == pytest.approx((0.5 * 1.5 + 0.5 * 1.2) / (0.1 + 0.5 * 0.01))
    going, waiting = (0.5 * 1.5 + 0.5 * 1) / 0.1, 1.5 / (0.1 + 0.5 * 0.02)
    assert predicted(measured, 1, 1, (1, 1)) == pytest.approx(max(going, waiting))


def test_draft_tokens_of_missed_rows_take_time_too() -> None:
    """As above, but each token takes 10 ms: a hit verifies 2, a miss 4 of which it keeps as many."""
    measured = Measurements(
        LinearCost(0.1, 0.01), LinearCost(0.02, 0.0), 0.11, (0.5,), 0.5, (0.5, 1.0), AfterMiss(1.5, 0.0, 3.0)
    )
    assert predicted(measured, 1, 1, (1, 1)) == pytest.approx(1.5 / (0.1 + 0.01 * (0.5 * 2 + 0.5 * 4)))


def test_where_misses_cost_little_no_budget_is_chosen_that_leaves_time_for_no_step() -> None:
    """Seen on two cores at batch 4: with all chains at once nothing would be hit, and every row be like the missed ones
    of other plans, which had chains to take from."""
    verify, step = LinearCost(0.0586, 0.00242), LinearCost(0.0185, 0.000635)
    measured = Measurements(verify, step, 0.0683, (0.6, 0.67, 0.87), 0.6, (0.51, 0.83), AfterMiss(1.73, 0.0028, 1.4))
    assert 4 * sum(best_plan(measured, 4, ANY).fan_out) <= 64


def test_tokens_between_two_depths() -> None:
    measured = replace(GPU, acceptance=(0.5, 0.4))
    assert [measured.tokens(d) for d in (0, 1, 2, 3)] == pytest.approx([1, 1.5, 1.7, 1.78])
    assert measured.tokens(1.5) == pytest.approx(1.6)


@pytest.mark.parametrize("measured", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("batch", [1, 4, 16])
def test_no_setting_that_was_not_tried_is_much_better(measured: Measurements, batch: int) -> None:
    """Uniform lists and random ones, of any K."""
    found = best_plan(measured, batch, ANY)
    dice = Random(0)
    for _ in range(300):
        lookahead = dice.randint(1, 8)
        other = [dice.randint(1, 5) for _ in range(lookahead + 1)]
        if sum(other) <= 32:
            assert predicted(measured, batch, len(other) - 1, other) <= found.speed * 1.02


def test_a_useless_draft_is_left_alone() -> None:
    assert best_plan(replace(CPU, acceptance=(0.02,), rate=0.02), 1, ANY).lookahead == 0


def test_a_draft_as_slow_as_the_target_is_left_alone() -> None:
    assert best_plan(replace(CPU, step=LinearCost(80 * MS, 0)), 1, ANY).lookahead == 0


def test_where_tokens_cost_what_they_bring_nothing_is_drafted() -> None:
    """A large batch on a processor that computes at its limit."""
    assert best_plan(replace(CPU, verify=LinearCost(1 * MS, 20 * MS), plain=321 * MS), 16, ANY).lookahead == 0


def test_a_better_draft_looks_further_ahead() -> None:
    depths = [best_plan(replace(GPU, acceptance=(a,), rate=a), 1, ANY).lookahead for a in (0.3, 0.6, 0.9)]
    assert depths == sorted(depths) and depths[0] < depths[-1]


def test_a_plan_stays_unless_another_is_clearly_better() -> None:
    best = best_plan(GPU, 1, ANY)
    near = SpeculationPlan(best.lookahead, (*best.fan_out[:-1], best.fan_out[-1] - 1), 0.0)
    assert best_plan(GPU, 1, ANY, near).fan_out == near.fan_out
    far = SpeculationPlan(1, (1, 1), 0.0)
    assert best_plan(GPU, 1, ANY, far) == best
    plain = SpeculationPlan(0, (), 0.0)
    assert best_plan(replace(GPU, acceptance=(0.01,), rate=0.01), 1, ANY, plain).lookahead == 0


def test_what_was_measured_decides_whether_a_draft_pays() -> None:
    """However the predictions see it; and between two plans with a draft they see as before."""
    plan = best_plan(CPU, 1, ANY)
    assert plan.speed > 1.2 / CPU.plain
    slow, fast = (replace(CPU, speed=factor / CPU.plain) for factor in (0.95, 1.1))
    assert best_plan(slow, 1, ANY, plan, plan).lookahead == 0
    kept = best_plan(fast, 1, ANY, plan, plan)
    assert kept[:2] == plan[:2] and kept.speed == pytest.approx(1.1 / CPU.plain)


def test_a_prediction_alone_gives_up_only_a_draft_that_is_clearly_slower() -> None:
    present = best_plan(CPU, 1, ANY)
    for faster, gives_up in ((1.1, False), (1.3, True)):
        found = best_plan(replace(CPU, plain=1 / (faster * present.speed)), 1, ANY, present)
        assert (found.lookahead == 0) is gives_up
    measured = replace(CPU, plain=1 / (1.1 * present.speed), speed=present.speed)
    assert best_plan(measured, 1, ANY, present, present).lookahead == 0


def test_only_what_may_be_chosen_is() -> None:
    for choices in (Choices((4,)), Choices((0, 1, 2), (3,)), Choices((3,), (4, 3, 2, 1)), Choices((2, 5), (), 7)):
        plan = best_plan(GPU, 1, choices)
        assert plan.lookahead in choices.lookaheads
        assert len(plan.fan_out) == (len(choices.fan_out) or plan.lookahead + 1)
        assert not choices.fan_out or set(plan.fan_out) == set(choices.fan_out)
        assert choices.fan_out or sum(plan.fan_out) <= choices.chains
    useless = replace(GPU, acceptance=(0.0,), rate=0.0)
    assert best_plan(useless, 1, Choices((4,))).lookahead == 4


def test_in_turn_by_hand() -> None:
    """K = 2, a = .5: 1.75 tokens in 20 ms of verification and two steps of 2 ms."""
    measured = replace(GPU, verify=LinearCost(20 * MS, 0.0), step=LinearCost(2 * MS, 0.0), acceptance=(0.5,), rate=0.5)
    assert predicted_sd(measured, 1, 2) == pytest.approx(1.75 / 0.024)
    found = best_plan(measured, 1, Choices(tuple(range(9)), ahead=False))
    assert found.speed == pytest.approx(max(predicted_sd(measured, 1, k) for k in range(1, 9)))


# -- learning ---------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.floats(0.001, 0.1), st.floats(0, 0.01), st.lists(st.integers(1, 40), min_size=5, max_size=60))
def test_a_straight_line_is_found(fixed: float, each: float, sizes: list[int]) -> None:
    fit = LinearFit()
    for size in sizes:
        fit.note(size, fixed + each * size)
    mean = sum(sizes) / len(sizes)
    assert fit.cost().each >= 0
    if max(sizes) - min(sizes) > 3:
        assert fit.cost().at(mean) == pytest.approx(fixed + each * mean, rel=1e-6)
        assert fit.cost().each == pytest.approx(each, rel=1e-6, abs=1e-9)


def play(
    learner: Learner, measured: Measurements, plan: SpeculationPlan, rounds: int, dice: Random, batch: int = 1
) -> float:
    """Rounds of a world that is as `measured` says; returns tokens per second."""
    tokens = seconds = 0.0
    for _ in range(rounds):
        if plan.lookahead == 0:
            time = measured.plain * dice.uniform(0.9, 1.1)
            learner.round(batch, batch, time, alone=True)
            tokens, seconds = tokens + batch, seconds + time
            continue
        time = measured.verify.at(batch * (1 + plan.lookahead)) * dice.uniform(0.9, 1.1)
        learner.round(batch, batch * (1 + plan.lookahead), time, alone=False)
        learner.steps(batch * sum(plan.fan_out), measured.step.at(batch * sum(plan.fan_out)) * dice.uniform(0.9, 1.1))
        brought = tokens
        for _ in range(batch):
            accepted = 0
            while accepted < plan.lookahead and dice.random() < measured.rate:
                accepted += 1
            learner.outcome(plan.lookahead, accepted)
            fan_out = plan.fan_out[accepted]
            c, r = measured.misses
            rank = next((f for f in range(1, fan_out + 1) if dice.random() * c * max(1, f - 1) ** -r > c * f**-r), None)
            if dice.random() < 1 - c:
                rank = 1
            learner.looked_up(fan_out, rank)
            tokens += accepted + 1
        learner.brought(batch, int(tokens - brought), time)
        seconds += time
    return tokens / seconds


@pytest.mark.parametrize("measured", [CPU, GPU], ids=["cpu", "gpu"])
def test_what_is_learned_leads_to_a_plan_near_the_best(measured: Measurements) -> None:
    """From a poor start, in a noisy world, within a few hundred rounds; the plan is judged in the true world."""
    learner, dice = Learner(), Random(1)
    plan = SpeculationPlan(1, (1, 1), 0.0)
    for _ in range(12):
        play(learner, measured, plan, 40, dice)
        learned = learner.measurements(1)
        assert learned is not None
        plan = best_plan(learned, 1, ANY, plan)
    best = best_plan(measured, 1, ANY)
    assert predicted(measured, 1, plan.lookahead, plan.fan_out) >= 0.95 * best.speed


def test_it_follows_a_draft_that_becomes_useless_and_back() -> None:
    learner, dice, plan = Learner(), Random(2), best_plan(CPU, 1, ANY)
    useless = replace(CPU, acceptance=(0.01,), rate=0.01)
    for world, expected in ((CPU, True), (useless, False), (CPU, True)):
        for _ in range(30):
            for probed in (
                plan,
                SpeculationPlan(4, (1,) * 5, 0.0),
                SpeculationPlan(0, (), 0.0),
            ):  # now and then, both ways of decoding
                play(learner, world, probed, 10, dice)
            learned = learner.measurements(1)
            assert learned is not None
            plan = best_plan(learned, 1, ANY, plan)
        assert (plan.lookahead > 0) is expected


def test_ranks_become_the_power_law() -> None:
    learner, dice = Learner(), Random(3)
    learner.round(1, 5, 0.05, alone=False)
    learner.steps(10, 0.01)
    for _ in range(4000):
        u = dice.random()
        learner.looked_up(8, next((f for f in range(1, 9) if u > 0.5 * f**-0.7), None))
    learned = learner.measurements(1)
    assert learned is not None
    assert learned.misses[0] == pytest.approx(0.5, abs=0.15)
    assert learned.misses[1] == pytest.approx(0.7, abs=0.3)
    assert hit_rate(0.5, (8, 8), learned.misses) == pytest.approx(hit_rate(0.5, (8, 8), (0.5, 0.7)), abs=0.06)


def test_without_a_time_nothing_is_known() -> None:
    assert Learner().measurements(1) is None


def test_where_a_bus_is_shared_fewer_chains_are_as_good() -> None:
    few, many = (best_plan(CPU, 1, ANY._replace(alike=alike)) for alike in (ALIKE_ON_ONE_BUS, ALIKE))
    assert sum(few.fan_out) < sum(many.fan_out)
    assert (1 - ALIKE_ON_ONE_BUS) * many.speed <= few.speed <= many.speed


def test_a_measured_speed_is_in_doubt_as_long_as_rounds_are_few_and_differ() -> None:
    plan = best_plan(CPU, 1, ANY)
    slower = replace(CPU, speed=0.95 / CPU.plain)
    assert best_plan(slower, 1, ANY, plan, plan).lookahead == 0
    assert best_plan(replace(slower, doubt=0.1), 1, ANY, plan, plan).lookahead > 0
    learner, alike = Learner(), Learner()
    doubts = []
    for index in range(200):
        learner.brought(1, 1 + index % 2, 0.05)
        alike.brought(1, 2, 0.05)
        if index + 1 in (20, 200):
            for one in (learner, alike):
                one.round(1, 2, 0.05, False)
                one.steps(3, 0.01)
                measured = one.measurements(1)
                assert measured is not None
                doubts.append(measured.doubt)
    assert doubts[0] == pytest.approx(0.5 / 1.5 / 20**0.5, rel=0.1) and doubts[0] > doubts[2] > doubts[1] == 0


@pytest.mark.parametrize(("spread", "each"), [(1.0, 0.001), (0.1, 0.02)])
def test_no_slope_is_read_from_sizes_that_hardly_differ(spread: float, each: float) -> None:
    """One chain more takes a hundredth more, until sizes have varied enough; then it takes what was seen."""
    fit = LinearFit(spread=spread)
    for size in (4, 5) * 50:
        fit.note(size, 0.1 + 0.02 * (size - 4.5))
    assert fit.cost().each == pytest.approx(each)
    assert fit.cost().at(4.5) == pytest.approx(0.1)


def test_in_turn_there_is_one_chain_whatever_the_budget() -> None:
    good = replace(GPU, acceptance=(0.95,), rate=0.95)
    assert best_plan(good, 1, Choices(tuple(range(9)), chains=3, ahead=False)).lookahead == 8
    assert best_plan(good, 1, Choices((6,), chains=3, ahead=False)).lookahead == 6
