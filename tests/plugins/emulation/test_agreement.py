"""What can be stated of a draft, and what it asks of the guesses above the right one."""

from __future__ import annotations

import pytest

from ssd.config.emulation import StatedAgreement
from ssd.errors import UsageError
from ssd.plugins.emulation.agreement import MOST_DECOYS, acceptance_length, agreement_of, decoys


@pytest.mark.parametrize(
    "asked",
    [StatedAgreement(0.888, 0.85, 7, 3), StatedAgreement(0.6, 0.45, 7, 1), StatedAgreement(0.53, 0.3, 4, 16)],
    ids=str,
)
def test_the_guesses_hold_the_right_token_as_often_as_stated(asked: StatedAgreement) -> None:
    """Of rounds that verify K tokens, each right with probability a."""
    beyond = [*decoys(asked), decoys(asked)[-1]]  # more than d wrong ones stand above the right one
    assert beyond[0] == pytest.approx(1 - asked.acceptance) and sorted(beyond, reverse=True) == beyond
    refused = sum(
        asked.acceptance**k * beyond[asked.fan_out] for k in range(asked.lookahead)
    )  # k are accepted, and the one after them, which no guess repeats, is not
    full = asked.acceptance**asked.lookahead * beyond[asked.fan_out - 1]
    assert 1 - refused - full == pytest.approx(asked.hit_rate, abs=1e-6)


def test_misses_fall_with_the_fan_out_as_in_the_paper() -> None:
    beyond = decoys(StatedAgreement(0.7, 0.8, 4, 3))
    assert beyond[8] / beyond[2] == pytest.approx(4**-0.6)


def test_a_length_is_that_of_a_round_and_hits_are_the_papers_where_nothing_is_said() -> None:
    asked = agreement_of(3.0, None, 4, 3)
    assert acceptance_length(asked) == pytest.approx(3.0)
    assert asked.hit_rate == pytest.approx(1 - 0.23 * 3**-0.6)
    always = agreement_of(5.0, None, 4, 1)  # right, and a hit
    assert always == StatedAgreement(pytest.approx(1.0), pytest.approx(1.0), 4, 1)
    assert agreement_of(1.0, 0.0, 4, 1).acceptance == pytest.approx(0.0, abs=1e-9)
    assert min(decoys(agreement_of(1.0, 0.0, 4, 16))) == pytest.approx(1.0) and len(decoys(asked)) == MOST_DECOYS


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((5.5, None, 4, 3), "an acceptance length of 5.5 cannot be: with K = 4 it is from 1 to 5"),
        ((0.5, None, 4, 3), "an acceptance length of 0.5"),
        ((4.5, 0.3, 4, 3), "a hit rate of 0.3 cannot be: .* K = 4 and fan-out 3 it is from 0.7"),
        ((2.0, 1.0, 4, 1), "a hit rate of 1 cannot be"),  # one guess, which is wrong where all were right but the last
    ],
)
def test_what_cannot_be_is_refused(given: tuple[float, float | None, int, int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        agreement_of(*given)
