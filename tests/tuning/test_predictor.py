"""The tuner against worlds whose best setting is known: times and rates in, the setting out."""

from __future__ import annotations

from dataclasses import astuple, replace
from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.speculation.fan_out import hit_rate, single_chain
from ssd.speculation.theory import LinearCost, expected_tokens_by_position, speedup_sd, speedup_ssd
from ssd.tuning.costs import CostTable
from ssd.tuning.estimates import AfterMiss, Learner, LinearFit, LookupGain, Measurements
from ssd.tuning.plan import Choices, Plan
from ssd.tuning.predictor import predicted, predicted_plain, predicted_sd, ranked_plans, speed_of

MS = 1e-3
K = tuple(range(1, 9))
ANY = Choices(("ngram", "ssd"), K)
# Two cores: a verification of 55 ms and a little more for each token, tree steps of 17 ms however many chains.
CPU = Measurements(LinearCost(55 * MS, 1 * MS), LinearCost(17 * MS, 0.05 * MS), (0.55,), (0.5, 0.7))
# The paper's pair: 18 ms, a step 2 ms.
GPU = Measurements(LinearCost(18 * MS, 0.02 * MS), LinearCost(2 * MS, 0.002 * MS), (0.85,), (0.25, 0.6))


def best_plan(measured: Measurements, batch: int, choices: Choices = ANY) -> Plan:
    return ranked_plans(measured, batch, choices)[0]


def test_speed_by_hand() -> None:
    """K = 1, F = 1, 1; a token takes no time of its own, a step little of a verification: depth 1. a = .5, c = .5."""
    measured = Measurements(LinearCost(0.1, 0.0), LinearCost(0.02, 0.0), (0.5,), (0.5, 1.0))
    # hit: 1.5 tokens in .1 s, half of the rounds; a miss goes at once: 1 token in .1, or waits: 1.5 in .15.
    with_misses = replace(measured, missed=AfterMiss(1.2, 0.01, 0.0))
    assert predicted(with_misses, 1, 1, (1, 1)) == pytest.approx((0.5 * 1.5 + 0.5 * 1.2) / (0.1 + 0.5 * 0.01))
    going, waiting = (0.5 * 1.5 + 0.5 * 1) / 0.1, 1.5 / (0.1 + 0.5 * 0.02)
    assert predicted(measured, 1, 1, (1, 1)) == pytest.approx(max(going, waiting))


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("lookahead", [1, 4, 7])
def test_all_hits_and_free_drafts_are_theorem_7(batch: int, lookahead: int) -> None:
    free = replace(GPU, acceptance=(0.8, 0.9), step=LinearCost(0.0, 0.0), misses=(0.0, 1.0), overhead=1 * MS)
    round_s = free.verify.at(batch * (lookahead + 1)) + free.overhead
    tokens = expected_tokens_by_position(free.acceptance, lookahead)
    ssd = batch * speedup_ssd(1.0, tokens, 1.0, 0.0, 0.0) / round_s
    assert predicted(free, batch, lookahead, (2,)) == pytest.approx(ssd)
    assert predicted_sd(free, batch, lookahead) == pytest.approx(batch * speedup_sd(tokens, 0.0) / round_s)


def test_a_staircase_is_taken_as_it_is() -> None:
    """Kernels take four rows at once: the fifth token of a verification costs as much as the first."""
    stairs = CostTable({1: 10 * MS, 4: 10 * MS, 5: 20 * MS, 8: 20 * MS, 9: 30 * MS})
    measured = Measurements(stairs, CostTable({1: 1 * MS, 16: 1 * MS}), (0.7,), (0.2, 0.6))
    line = replace(measured, verify=LinearCost(8 * MS, 2 * MS))
    assert predicted_plain(measured, 1) == pytest.approx(100)
    for mode in ("sd", "ssd"):
        best = [best_plan(each, 1, Choices((mode,), (2, 3, 4, 5, 6), (), 8)).lookahead for each in (measured, line)]
        assert best[0] == 3 and (mode == "ssd" or best[1] == 2)


def test_draft_tokens_of_missed_rows_take_time_too() -> None:
    """As above, but each token takes 10 ms: a hit verifies 2, a miss 4 of which it keeps as many."""
    measured = Measurements(
        LinearCost(0.1, 0.01), LinearCost(0.02, 0.0), (0.5,), (0.5, 1.0), missed=AfterMiss(1.5, 0.0, 3.0)
    )
    assert predicted(measured, 1, 1, (1, 1)) == pytest.approx(1.5 / (0.1 + 0.01 * (0.5 * 2 + 0.5 * 4)))


def test_where_misses_cost_little_no_budget_is_chosen_that_leaves_time_for_no_step() -> None:
    """Seen on two cores at batch 4: with all chains at once nothing would be hit, and every row be like the missed ones
    of other plans, which had chains to take from."""
    verify, step = LinearCost(0.0586, 0.00242), LinearCost(0.0185, 0.000635)
    measured = Measurements(verify, step, (0.6, 0.67, 0.87), (0.51, 0.83), missed=AfterMiss(1.73, 0.0028, 1.4))
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
    assert best_plan(replace(CPU, acceptance=(0.02,), verify_alone=LinearCost(54 * MS, 1 * MS)), 1, ANY).lookahead == 0


def test_a_draft_as_slow_as_the_target_is_left_alone() -> None:
    assert best_plan(replace(CPU, step=LinearCost(80 * MS, 0)), 1, ANY).lookahead == 0


def test_where_tokens_cost_what_they_bring_nothing_is_drafted() -> None:
    """A large batch on a processor that computes at its limit."""
    assert best_plan(replace(CPU, verify=LinearCost(1 * MS, 20 * MS)), 16, ANY).lookahead == 0


def test_a_better_draft_looks_further_ahead() -> None:
    depths = [best_plan(replace(GPU, acceptance=(a,)), 1, ANY).lookahead for a in (0.3, 0.6, 0.9)]
    assert depths == sorted(depths) and depths[0] < depths[-1]


@pytest.mark.parametrize(("batch", "each"), [(1, 0.002), (32, 0.002), (1, 2.0), (32, 0.05)])
def test_a_single_chain_is_chosen_where_chains_cost_more_than_they_hit(batch: int, each: float) -> None:
    """A step that takes longer for every row leaves a tree few depths, or none; the prediction decides, not a rule."""
    measured = replace(GPU, step=LinearCost(2 * MS, each * MS))
    plan = best_plan(measured, batch, Choices(("ssd",), K))
    alone = max(predicted(measured, batch, k, single_chain(k)) for k in K)
    assert plan.speed >= alone
    assert (0 in plan.fan_out) == (each >= 0.05)


def test_a_single_chain_by_hand() -> None:
    """K = 1, a = .5, c = .5. After a hit the draft token is right, and the next is the draft's own, with .25. After a
    miss nothing is in flight, and the next is the draft's own with .5. So .5 / (1 + .5 - .25) of all rounds hit."""
    measured = Measurements(LinearCost(0.1, 0.0), LinearCost(0.02, 0.0), (0.5,), (0.5, 1.0), missed=AfterMiss(1, 0, 0))
    assert predicted(measured, 1, 1, single_chain(1)) == pytest.approx((0.4 * 1.5 + 0.6 * 1) / 0.1)
    only = ranked_plans(measured, 1, Choices(("ssd",), (1, 2), (), 1))
    assert {plan.fan_out for plan in only} == {single_chain(1), single_chain(2)}


def test_only_what_may_be_chosen_is() -> None:
    ahead = ("ssd",)
    for choices in (
        Choices(ahead, (4,)),
        Choices(("sd", "ssd"), (1, 2), (3,)),
        Choices(ahead, (3,), (4, 3, 2, 1)),
        Choices(ahead, (2, 5), (), 7),
    ):
        for plan in ranked_plans(GPU, 1, choices):
            assert plan.mode in choices.modes and plan.lookahead in choices.lookaheads
            assert len(plan.fan_out) == (len(choices.fan_out) or plan.lookahead + 1)
            assert not choices.fan_out or set(plan.fan_out) == set(choices.fan_out)
            assert choices.fan_out or sum(plan.fan_out) <= choices.chains
    useless = replace(GPU, acceptance=(0.0,))
    assert best_plan(useless, 1, Choices(ahead, (4,))).lookahead == 4


def test_plans_come_fastest_first_and_each_number_of_chains_once() -> None:
    plans = ranked_plans(CPU, 1, Choices(("ngram", "sd", "ssd"), K))
    assert [plan.speed for plan in plans] == sorted((speed_of(CPU, 1, plan) for plan in plans), reverse=True)
    assert len({plan for plan in plans}) == len(plans)
    assert {(plan.mode, plan.lookahead) for plan in plans} == {("ngram", 0), *product(("sd", "ssd"), K)}
    for k in K:
        chains = [sum(plan.fan_out) for plan in plans if (plan.mode, plan.lookahead) == ("ssd", k)]
        assert {1, k + 1} <= {*chains} and max(chains) > 16


def test_plain_decoding_by_hand() -> None:
    """Prompt lookup brings .5 tokens a row for .8 verified ones, which take 1 ms each; two rows."""
    measured = replace(CPU, lookup=LookupGain(0.5, 0.8))
    assert predicted_plain(CPU, 2) == pytest.approx(2 / (57 * MS))
    assert predicted_plain(measured, 2) == pytest.approx(2 * 1.5 / (57 * MS + 2 * 0.8 * MS))
    alone = replace(measured, verify_alone=LinearCost(30 * MS, 0.5 * MS))
    assert predicted_plain(alone, 2) == pytest.approx(2 * 1.5 / (31 * MS + 2 * 0.8 * 0.5 * MS))


def test_in_turn_by_hand() -> None:
    """K = 2, a = .5: 1.75 tokens in 20 ms of verification and two steps of 2 ms."""
    measured = replace(GPU, verify=LinearCost(20 * MS, 0.0), step=LinearCost(2 * MS, 0.0), acceptance=(0.5,))
    assert predicted_sd(measured, 1, 2) == pytest.approx(1.75 / 0.024)
    found = best_plan(measured, 1, Choices(("sd",), K))
    assert found.speed == pytest.approx(max(predicted_sd(measured, 1, k) for k in K))
    in_turn = replace(measured, verify_alone=LinearCost(10 * MS, 0.0), step_alone=LinearCost(1 * MS, 0.0))
    assert predicted_sd(in_turn, 1, 2) == pytest.approx(1.75 / 0.012)


def test_a_draft_that_ends_has_one_plan_in_turn_which_is_worth_the_best_k() -> None:
    """A verification of more than eight tokens takes two passes over the weights."""
    ends = replace(CPU, ends=True)
    fixed = [predicted_sd(CPU, 1, k) for k in K[:7]]
    (plan,) = ranked_plans(ends, 1, Choices(("sd",), K))
    assert (plan.lookahead, plan.speed) == (7, max(fixed)) == (7, speed_of(ends, 1, plan))
    (asked,) = ranked_plans(ends, 1, Choices(("sd",), (8,)))
    assert asked.lookahead == 8, "a number that was asked for stays"
    assert {plan.lookahead for plan in ranked_plans(ends, 1, Choices(("ssd",), K))} == set(K)
    batch, fixed_batch = (ranked_plans(measured, 2, Choices(("sd",), K)) for measured in (ends, CPU))
    assert [*map(astuple, batch)] == [*map(astuple, fixed_batch)], "not in a batch"


# -- learning ---------------------------------------------------------------------------------------------------------


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


def test_ranks_become_the_power_law() -> None:
    learner, dice = Learner(), Random(3)
    for _ in range(4000):
        u = dice.random()
        learner.looked_up(8, next((f for f in range(1, 9) if u > 0.5 * f**-0.7), None))
    misses = learner.misses()
    assert misses[0] == pytest.approx(0.5, abs=0.15)
    assert misses[1] == pytest.approx(0.7, abs=0.3)
    assert hit_rate(0.5, (8, 8), misses) == pytest.approx(hit_rate(0.5, (8, 8), (0.5, 0.7)), abs=0.06)


def test_a_few_lucky_rounds_are_no_acceptance_rate() -> None:
    """Seen in the first rounds of an engine: after one right token every plan with a long K promised wonders."""
    learner = Learner()
    for _ in range(7):
        learner.outcome(4, 4)
    assert learner.acceptance == (0.5,)
    learner.outcome(4, 4)
    assert learner.acceptance == (1.0,) * 4


def test_what_was_learned_is_recalled_and_gives_way_to_another_text() -> None:
    learner, later = Learner(), Learner()
    for _ in range(500):
        learner.outcome(3, 2)
        learner.looked_up(2, 1)
    later.recall(learner.agreement())
    assert later.acceptance[:3] == pytest.approx((1.0, 1.0, 0.0))
    for _ in range(60):
        learner.outcome(1, 0)
        later.outcome(1, 0)
    assert later.acceptance[0] < learner.acceptance[0] < 1


@pytest.mark.parametrize(("spread", "each"), [(1.0, 0.001), (0.1, 0.02)])
def test_no_slope_is_read_from_sizes_that_hardly_differ(spread: float, each: float) -> None:
    """One chain more takes a hundredth more, until sizes have varied enough; then it takes what was seen."""
    fit = LinearFit(spread=spread)
    for size in (4, 5) * 50:
        fit.note(size, 0.1 + 0.02 * (size - 4.5))
    assert fit.cost().each == pytest.approx(each)
    assert fit.cost().at(4.5) == pytest.approx(0.1)


def test_in_turn_there_is_one_chain_whatever_the_budget() -> None:
    good = replace(GPU, acceptance=(0.95,))
    assert best_plan(good, 1, Choices(("sd",), K, chains=3)).lookahead == 8
    assert best_plan(good, 1, Choices(("sd",), (6,), chains=3)).lookahead == 6
