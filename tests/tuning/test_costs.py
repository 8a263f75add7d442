"""Tables of forwards' times, and what is believed of plans."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.tuning.choice import Chooser, MemoryShare
from ssd.tuning.costs import NEAR, ROW, Costs, CostTable
from ssd.tuning.plan import Plan

STAIRCASE = {1: 0.0137, 5: 0.0190, 6: 0.0219, 7: 0.0308, 12: 0.0400}


def test_a_staircase_stays_one() -> None:
    table = CostTable(STAIRCASE)
    assert [table.at(size) for size in STAIRCASE] == list(STAIRCASE.values())
    assert table.at(3) == pytest.approx((0.0137 + 0.0190) / 2)
    assert table.at(22) == pytest.approx(0.0400 + 10 * (0.0400 - 0.0219) / 6)  # as from half of the largest on
    assert CostTable({4: 0.01}).at(1) == CostTable({4: 0.01}).at(9) == 0.01


@given(st.dictionaries(st.integers(1, 300), st.floats(1e-4, 1), min_size=1, max_size=20))
def test_more_rows_take_no_less_time(seconds: dict[int, float]) -> None:
    table = CostTable(seconds)
    table.smooth()
    costs = [table.at(size) for size in range(1, 400)]
    assert all(after >= before - 1e-12 for before, after in pairwise(costs))
    assert all(table.at(size) <= taken + 1e-12 for size, taken in seconds.items())


def test_a_machine_that_slows_down_does_so_for_all_sizes() -> None:
    costs = Costs({"verify": STAIRCASE, "step": {1: 0.004}})
    for _ in range(300):
        costs.note("verify", 1, 2 * STAIRCASE[1])
    verify, step = costs.of("verify"), costs.of("step")
    assert verify is not None and step is not None
    assert verify.at(1) == pytest.approx(2 * STAIRCASE[1], rel=0.02)
    assert 1.5 < verify.at(7) / STAIRCASE[7] <= 2.0
    assert step.at(1) == 0.004


def test_each_row_reads_its_text() -> None:
    costs = Costs({"verify": STAIRCASE, "verify_beside": STAIRCASE, "step": {1: 0.004}}, {"verify": 0.001})
    costs.situate(2, 1000)
    verify, beside, step = costs.of("verify"), costs.of("verify_beside"), costs.of("step")
    assert verify is not None and beside is not None and step is not None
    at_most = CostTable(STAIRCASE).at(ROW)
    expected = STAIRCASE[12] + 0.001 * (2 * 1000 * STAIRCASE[6] - NEAR * 12 / ROW * at_most)
    assert verify.at(12) == beside.at(12) == pytest.approx(expected)
    assert step.at(1) == 0.004, "what reading costs the draft was not measured"
    costs.situate(1, NEAR)
    near = costs.of("verify")
    assert near is not None and near.at(7) == STAIRCASE[7]


@pytest.mark.parametrize("share", [0.0, 1e-3, 8e-3, 1.0])
@pytest.mark.parametrize("rows", [1, 8])
def test_no_forward_takes_no_time(share: float, rows: int) -> None:
    """Shares come from files, and from measurements that other work disturbed."""
    costs = Costs({"verify": STAIRCASE, "step": {1: 0.004}}, {"verify": share, "step": share})
    costs.learn_text("step", share)
    costs.situate(rows, 1)
    costs.note("verify", 8, 0.01), costs.note("step", 4, 0.01)
    for situation in ("verify", "step"):
        cost = costs.of(situation)  # type: ignore[arg-type]
        assert cost is not None and min(cost.at(size) for size in range(1, 40)) > 0


def test_a_machine_behind_a_long_text_is_not_slow() -> None:
    costs = Costs({"verify": STAIRCASE}, {"verify": 0.001})
    costs.situate(1, NEAR + 1000)
    for _ in range(300):
        costs.note("verify", 1, 2 * STAIRCASE[1])
    costs.situate(1, NEAR)
    verify = costs.of("verify")
    assert verify is not None and verify.at(7) == pytest.approx(STAIRCASE[7])


def test_two_looks_disagree_if_all_sizes_of_a_table_differ() -> None:
    once = Costs({"verify": STAIRCASE, "step": {1: 0.004}})
    noisy = {size: seconds * (1.5 if size == 6 else 0.97) for size, seconds in STAIRCASE.items()}
    assert once.agrees(Costs({"verify": noisy, "step": {1: 0.0045, 2: 0.005}}))
    slowed = {size: 1.4 * seconds for size, seconds in STAIRCASE.items()}
    assert not once.agrees(Costs({"verify": slowed, "step": {1: 0.004}}))
    assert not Costs({"verify": slowed}).agrees(once)
    assert not once.agrees(Costs({"verify": STAIRCASE, "step": {1: 0.006}}))
    assert once.agrees(Costs())


@pytest.mark.parametrize(("took", "kept"), [(0.7, False), (0.9, True), (1.0, True), (2.0, True)])
def test_tables_that_were_measured_beside_other_work_are_thrown_away(took: float, kept: bool) -> None:
    costs = Costs({"verify": STAIRCASE, "step": {1: 0.004}})
    for _ in range(100):
        costs.note("verify", 1, took * STAIRCASE[1])
    costs.judge()
    assert bool(costs.written()) is kept
    verify = costs.of("verify")
    assert verify is not None and verify.at(1) == pytest.approx(took * STAIRCASE[1], rel=0.03), "this process goes on"


def test_one_size_that_takes_longer_than_its_table_says() -> None:
    costs = Costs({"verify": STAIRCASE})
    for _ in range(600):
        costs.note("verify", 1, STAIRCASE[1])
        costs.note("verify", 5, 1.5 * STAIRCASE[5])
    verify = costs.of("verify")
    assert verify is not None
    assert verify.at(5) / verify.at(1) == pytest.approx(1.5 * STAIRCASE[5] / STAIRCASE[1], rel=0.03)


def test_a_larger_size_that_takes_less_is_believed() -> None:
    """Neighbouring sizes may differ by little more than noise: what is noted must not drive them apart."""
    costs = Costs({"verify": {1: 0.010, 2: 0.0105, 4: 0.012}})
    for _ in range(5000):
        costs.note("verify", 1, 0.0100)
        costs.note("verify", 2, 0.0095)
    verify = costs.of("verify")
    assert verify is not None
    assert [verify.at(size) for size in (1, 2)] == pytest.approx([0.0100, 0.0095], rel=0.01)
    assert 0.0110 < verify.at(4) < 0.0125


def test_a_process_that_was_not_running_says_little_of_a_forward() -> None:
    costs = Costs({"verify": STAIRCASE})
    costs.note("verify", 1, 5.0)
    verify = costs.of("verify")
    assert verify is not None and verify.at(1) < 1.1 * STAIRCASE[1]


def test_what_was_never_measured_is_not_known() -> None:
    costs = Costs()
    assert costs.of("verify") is None
    costs.note("verify", 3, 0.02)
    verify = costs.of("verify")
    assert verify is not None and verify.at(3) == pytest.approx(0.02)


# -- choosing ---------------------------------------------------------------------------------------------------------

PLAIN = Plan("ngram", speed=100.0)
AHEAD = Plan("ssd", 4, 10, (2,) * 5, 120.0)


def test_a_plan_that_brings_less_than_predicted_is_left() -> None:
    chooser = Chooser()
    assert chooser.choose([AHEAD, PLAIN], None) == AHEAD
    windows = 0
    while chooser.choose([AHEAD, PLAIN], AHEAD) == AHEAD:
        chooser.note(AHEAD, 80.0, 32)
        windows += 1
    assert 2 <= windows <= 30  # one slow window is noise
    assert chooser.expected(AHEAD) < 100 < AHEAD.speed


def test_other_plans_of_a_mode_err_alike_if_they_have_as_many_chains() -> None:
    """A plan that has fewer of them may be as fast as predicted, until it is seen to be slow, too."""
    chooser, few = Chooser(), replace(AHEAD, chains=5, fan_out=(1,) * 5)
    other = replace(AHEAD, lookahead=1, fan_out=(5, 5))
    for _ in range(40):
        chooser.note(AHEAD, 90.0, 32)
    assert chooser.expected(other) == pytest.approx(90.0, rel=0.1)
    assert chooser.expected(PLAIN) == 100.0
    assert chooser.expected(other) < chooser.expected(few) < few.speed
    for _ in range(40):
        chooser.note(AHEAD, 90.0, 32)
        chooser.note(few, 90.0, 32)
    assert chooser.expected(few) == pytest.approx(90.0, rel=0.1)
    assert chooser.expected(replace(few, lookahead=3, fan_out=(2, 1, 1, 1))) == pytest.approx(90.0, rel=0.1)


def test_of_plans_that_are_nearly_alike_the_one_with_the_fewest_chains_is_best() -> None:
    """Until it is seen that chains cost less than was thought."""
    chooser, few = Chooser(), replace(AHEAD, chains=5, fan_out=(1,) * 5, speed=119.8)
    assert chooser.choose([AHEAD, few], None) == few
    for _ in range(20):
        chooser.note(AHEAD, 125.0, 256)
        chooser.note(few, 119.8, 256)
    assert chooser.choose([AHEAD, few], None) == AHEAD


def test_a_batch_size_begins_with_the_errors_of_another() -> None:
    chooser = Chooser()
    for _ in range(40):
        chooser.note(AHEAD, 90.0, 32)
    begun = Chooser(None, chooser)
    assert begun.errors() == chooser.errors() and begun.expected(AHEAD) == pytest.approx(90.0, rel=0.1)
    for _ in range(10):
        begun.note(AHEAD, 120.0, 32)
    assert begun.expected(AHEAD) > 105 and chooser.expected(AHEAD) == pytest.approx(90.0, rel=0.1), "it learns more"


def test_plans_in_doubt_are_tried_and_hopeless_ones_are_not() -> None:
    near, far = Plan("sd", 1, 2, (1, 1), 97.0), replace(AHEAD, speed=60.0)
    chooser = Chooser(Random(0))
    chosen = [chooser.choose([PLAIN, near, far], PLAIN) for _ in range(1000)]
    assert 50 < chosen.count(near) < 500 and far not in chosen
    certain = Chooser()
    assert {certain.choose([PLAIN, near, far], PLAIN) for _ in range(50)} == {PLAIN}


def test_with_much_of_the_time_spent_on_remembered_text_a_small_gain_is_none() -> None:
    """The gain counts for the rest of the time alone, and the use of a draft must bring 2 %."""
    draft = Plan("sd", 1, 2, (1, 1), 105.0)
    chooser = Chooser()
    assert chooser.choose([PLAIN, draft], None) == draft
    assert chooser.choose([PLAIN, draft], None, MemoryShare(0.004, 1.0)) == draft
    assert chooser.choose([PLAIN, draft], None, MemoryShare(0.04, 1.0)) == PLAIN


def test_candidates_are_the_first_ones_the_modes_and_the_present_one() -> None:
    chooser, slow = Chooser(), replace(AHEAD, lookahead=9, speed=50.0)
    plans = [*(replace(AHEAD, lookahead=k, speed=100.0 - k) for k in range(1, 9)), replace(PLAIN, speed=80.0), slow]
    assert chooser.candidates(plans, plans[7]) == [*plans[:6], plans[7], plans[8]]
    assert chooser.candidates([PLAIN, slow], None) == [PLAIN]
    assert chooser.candidates([PLAIN, slow], slow) == [PLAIN, slow]
