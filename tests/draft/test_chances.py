"""Scores become probabilities by what came true before."""

from __future__ import annotations

import math
import random

import pytest

from ssd.draft.chances import Calibration, Chances, Node
from ssd.speculation.ngram import Copied


def node(
    scores: list[float],
    in_flight: int | None = None,
    copied: Copied | None = None,
    temperature: float = 0.0,
    shares_noise: bool = True,
) -> Node:
    """Candidates 0, 1, ... with these scores."""
    return Node(range(len(scores)), scores, in_flight, copied, temperature, shares_noise)


def test_predictions_are_believed_at_first() -> None:
    calibration = Calibration()
    for predicted in (0.003, 0.02, 0.1, 0.5, 0.8, 0.99):
        assert calibration(predicted) == pytest.approx(predicted, rel=0.15)
    assert calibration(0.0) == 0.0 < calibration(1e-5) < calibration(1e-4)


def test_what_comes_true_less_often_than_predicted_is_believed_less() -> None:
    """Only near what was predicted."""
    calibration, dice = Calibration(), random.Random(1)
    for _ in range(3000):
        calibration.note(0.7, dice.random() < 0.4)
    assert calibration(0.7) == pytest.approx(0.4, abs=0.06)
    assert calibration(0.1) == pytest.approx(0.1, rel=0.1)


def test_chances_are_a_distribution_over_the_candidates() -> None:
    chances = Chances().of(node([3.0, 2.0, 2.0, -1.0]))
    assert 0.9 < sum(chances.values()) < 1.1
    assert chances[0] > chances[1] == chances[2] > chances[3] > 0


def test_a_repetition_is_raised_at_the_expense_of_the_others() -> None:
    """Whether it is a candidate or not; a chance that is higher already stays."""
    plain = Chances().of(node([3.0, 2.0, 2.0]))
    for token in (2, 77):
        raised = Chances().of(node([3.0, 2.0, 2.0], copied=Copied(token, 6)))
        assert raised[token] == pytest.approx(0.7)
        assert raised[0] / plain[0] == pytest.approx(raised[1] / plain[1])
        assert raised[0] < plain[0] and sum(raised.values()) <= 1.05
    assert Chances().of(node([9.0, 1.0], copied=Copied(0, 2)))[0] > 0.9


def test_a_repetition_that_is_never_right_is_no_longer_believed() -> None:
    chances, seen = Chances(), node([3.0, 2.0, 2.0], copied=Copied(77, 6))
    for _ in range(200):
        chances.learn(seen, 1)
    assert chances.of(seen)[77] < 0.1
    assert chances.of(node([3.0, 2.0], copied=Copied(0, 6)))[0] > 0.5  # the draft says so, too: another matter


def test_a_draft_that_is_right_more_often_than_it_believes() -> None:
    """Learned for greedy sampling alone."""
    chances, unsure = Chances(), [1.0, 0.5, 0.2]
    for _ in range(300):
        chances.learn(node(unsure), 0)
    assert chances.of(node(unsure))[0] > 0.9
    for law in ({"temperature": 1.0}, {"temperature": 1.0, "shares_noise": False, "in_flight": 0}):
        assert chances.of(node(unsure, **law))[0] < 0.6  # type: ignore[arg-type]


def test_under_the_ratio_rule_the_tested_token_decides_first() -> None:
    """It need not be the best candidate, or one at all. A bonus token after all of them was not tested."""
    chances, scores = Chances(), [2.0, 1.5, 1.0]
    for _ in range(400):
        chances.learn(node(scores, 1, None, 1.0, shares_noise=False), 1)
    found = chances.of(node(scores, 1, None, 1.0, shares_noise=False))
    assert found[1] > 0.85 and found[0] + found[2] < 0.2
    assert chances.of(node(scores, 50, None, 1.0, shares_noise=False)).keys() == {50, 0, 1, 2}
    bonus = chances.of(node(scores, None, None, 1.0, shares_noise=False))
    total = sum(math.exp(score) for score in scores)
    assert [bonus[token] for token in range(3)] == pytest.approx([math.exp(s) / total for s in scores], rel=0.15)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_scores_that_are_no_numbers_have_no_chance(value: float) -> None:
    chances = Chances()
    chances.learn(node([value, 1.0]), 1)
    assert all(0 <= chance < 0.1 for chance in chances.of(node([value, 1.0])).values())
