"""The outcomes that are worth a chain: F_k for every k, without the token that is already in flight."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.speculation.acceptance import Outcome
from ssd.speculation.fan_out import MOST, fan_out_at, forks, most_candidates, single_chain


def test_one_fan_out_serves_every_length() -> None:
    assert [fan_out_at(k, 4, (3,)) for k in range(5)] == [3] * 5


def test_a_list_gives_each_length_its_own() -> None:
    assert [fan_out_at(k, 4, (5, 4, 3, 2, 9)) for k in range(5)] == [5, 4, 3, 2, 9]


@pytest.mark.parametrize("in_flight", range(5))
def test_with_fewer_tokens_in_flight_full_acceptance_gets_the_larger_number(in_flight: int) -> None:
    """Its own or that of its length; the chains of lengths that cannot be are saved."""
    for fan_out, last in (((3, 2, 2, 1, 5), [5] * 5), ((6, 4, 3, 2, 3), [6, 4, 3, 3, 3])):
        counts = [fan_out_at(k, in_flight, fan_out) for k in range(in_flight + 1)]
        assert counts == [*fan_out[:in_flight], last[in_flight]]
        assert max(counts) <= most_candidates(fan_out) == max(fan_out)


def test_a_list_serves_more_tokens_than_it_has_numbers() -> None:
    assert fan_out_at(5, 5, (4, 3, 2)) == 2  # K has become smaller while five were in flight
    assert fan_out_at(3, 5, (4, 3, 2)) == 3
    assert most_candidates((3,)) == 3 and most_candidates(()) == MOST


@pytest.mark.parametrize("in_flight", range(5))
def test_a_single_chain_is_for_full_acceptance_however_many_tokens_are_in_flight(in_flight: int) -> None:
    counts = [fan_out_at(k, in_flight, single_chain(4)) for k in range(in_flight + 1)]
    assert counts == [0] * in_flight + [1]
    assert forks(in_flight, [10, 11, 12, 13][:in_flight], [7, 8], single_chain(4)) == [Outcome(in_flight, 7)]


def test_the_token_in_flight_is_excluded_and_replaced_by_the_next() -> None:
    assert forks(1, [10, 11, 12], [11, 7, 8, 9], (2,)) == [Outcome(1, 7), Outcome(1, 8)]


def test_exclusion_goes_by_position() -> None:
    """Tokens in flight elsewhere may well be the bonus here."""
    assert forks(1, [10, 11, 12], [10, 12, 5], (2,)) == [Outcome(1, 10), Outcome(1, 12)]


def test_nothing_is_excluded_after_full_acceptance() -> None:
    assert forks(3, [10, 11, 12], [12, 11, 10], (3,)) == [Outcome(3, 12), Outcome(3, 11), Outcome(3, 10)]
    assert forks(0, [], [4, 5], (2,)) == [Outcome(0, 4), Outcome(0, 5)]


def test_too_few_candidates_give_what_there_is() -> None:
    assert forks(0, [3], [3, 4], (5,)) == [Outcome(0, 4)]


@given(st.data(), st.lists(st.integers(0, 9), max_size=6))
def test_the_best_candidates_that_are_possible(data: st.DataObject, speculation: list[int]) -> None:
    """With candidates enough: exactly F_k outcomes, no possible token of a better rank left out, in order of rank."""
    accepted = data.draw(st.integers(0, len(speculation)))
    fan_out = tuple(data.draw(st.lists(st.integers(1, 4), min_size=7, max_size=7)))
    candidates = data.draw(st.permutations(range(30)))
    found = forks(accepted, speculation, candidates, fan_out)
    impossible = speculation[accepted : accepted + 1]
    assert len(found) == fan_out_at(accepted, len(speculation), fan_out)
    assert {outcome.accepted for outcome in found} == {accepted}
    tokens = [outcome.token for outcome in found]
    ranks = [candidates.index(token) for token in tokens]
    assert ranks == sorted(ranks) and not set(tokens) & set(impossible)
    assert set(candidates[: ranks[-1] + 1]) - set(tokens) <= set(impossible)
