"""From logits to tokens: filters against plain references, ties, and rows that are not numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ssd.errors import SsdError
from ssd.law import Law
from ssd.speculation.noise import NoiseCache
from ssd.speculation.sampling import UNKNOWN, argmax, filtered, perturbed, ranked, read_ids
from tests.pairs import pairwise

INF, NAN = math.inf, math.nan
FILTERS = Law(0.8, top_k=5, top_p=0.9, min_p=0.05, seed=3)

# Halves make ties common; 40 and -40 make tokens that are certain and tokens that are all but impossible.
logits = st.lists(st.one_of(st.integers(-8, 8).map(lambda n: n / 2), st.sampled_from([-INF, 40.0, -40.0])), min_size=1)
rows = logits.filter(lambda row: max(row) > -INF)
top_ps = st.one_of(st.floats(0.01, 1), st.sampled_from([1e-9, 0.5, 0.999999, 1 - 1e-7, 1.0]))
top_ks = st.integers(0, 12)
min_ps = st.one_of(st.just(0.0), st.floats(1e-4, 1), st.just(1.0))


def random_scores(count: int, vocab_size: int, seed: int) -> Tensor:
    return torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(seed))


# -- filters ----------------------------------------------------------------------------------------------------------


def reference(row: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """The tokens that are left, in double precision by the definitions: min-p, of the rest top-k, of the rest top-p.
    Whatever ties with the last token that a filter keeps is kept."""
    best = max(row)
    weights = {token: math.exp(logit - best) for token, logit in enumerate(row) if logit > -INF}
    kept = {token: weight for token, weight in weights.items() if weight >= min_p}
    if top_k:
        kth = sorted(kept.values())[-min(top_k, len(kept))]
        kept = {token: weight for token, weight in kept.items() if weight >= kth}
    total, mass, last = sum(kept.values()), 0.0, 0.0
    for weight in sorted(kept.values(), reverse=True):
        if mass >= top_p * total:
            break
        mass, last = mass + weight, weight
    return {token for token, weight in kept.items() if weight >= last}


def left(row: list[float], top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
    """What the engine's filters leave; what they leave is unchanged."""
    scaled = torch.tensor([row])
    result = filtered(scaled.clone(), Law(1.0, top_k, top_p, min_p))[0]
    kept = result > -INF
    assert torch.equal(result[kept], scaled[0][kept])
    return set(kept.nonzero()[:, 0].tolist())


def between(row: list[float], top_k: int, top_p: float, min_p: float) -> None:
    """Single precision may put a border elsewhere by 2e-6, in favour of either side."""
    least, most = 1 - 2e-6, 1 + 2e-6
    found = left(row, top_k, top_p, min_p)
    assert reference(row, top_k, top_p * least, min(1.0, min_p * most)) <= found
    assert found <= reference(row, top_k, top_p * most, min_p * least)


@settings(max_examples=300)
@given(rows, top_ks)
def test_top_k(row: list[float], top_k: int) -> None:
    assert left(row, top_k=top_k) == reference(row, top_k, top_p=2.0, min_p=0.0)


@settings(max_examples=500)
@given(rows, top_ps)
def test_top_p(row: list[float], top_p: float) -> None:
    between(row, 0, top_p, 0.0)


@settings(max_examples=300)
@given(rows, min_ps)
def test_min_p(row: list[float], min_p: float) -> None:
    between(row, 0, 1.0, min_p)


@settings(max_examples=500)
@given(rows, top_ks, top_ps, min_ps)
def test_all_filters_together(row: list[float], top_k: int, top_p: float, min_p: float) -> None:
    between(row, top_k, top_p, min_p)
    assert row.index(max(row)) in left(row, top_k, top_p, min_p)


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.9999, 0.999999])
@pytest.mark.parametrize("scale", [0.1, 1.0, 6.0])
def test_top_p_of_a_whole_vocabulary(top_p: float, scale: float) -> None:
    """Flat laws need more tokens than the few that are looked at first."""
    row: list[float] = (random_scores(1, 3001, seed=1)[0] * scale).tolist()
    found = left(row, top_p=top_p)
    error = 2e-5 * top_p  # of a running sum over thousands of numbers in single precision
    assert reference(row, 0, top_p - error, 0.0) <= found <= reference(row, 0, top_p + error, 0.0)


def test_ties_at_the_border_stay_together() -> None:
    assert left([1.0, 2.0, 1.0, 0.0, 1.0], top_k=2) == {0, 1, 2, 4}
    assert left([1.0, 2.0, 1.0, 0.0, 1.0], top_p=0.6) == {0, 1, 2, 4}
    assert left([1.0, 1.0, 1.0, 1.0], top_p=0.25) == {0, 1, 2, 3}


def test_filters_that_are_off_change_nothing() -> None:
    row = random_scores(2, 50, seed=0)
    assert torch.equal(filtered(row.clone(), Law(1.0, top_k=50)), row)
    assert torch.equal(filtered(row.clone(), Law(1.0, top_k=2**31 - 1, top_p=1.0, min_p=0.0)), row)


def test_no_rows() -> None:
    """A prefill chunk wants no samples; its law may filter all the same."""
    assert perturbed(torch.empty(0, 64), FILTERS, [], NoiseCache(64)).shape == (0, 64)
    assert argmax(torch.empty(0, 64)) == argmax(torch.empty(0, 256)) == []


# -- samples ----------------------------------------------------------------------------------------------------------


def test_greedy_takes_the_logits_as_they_are() -> None:
    scores = random_scores(3, 50, seed=2)
    assert torch.equal(perturbed(scores, Law(0.0, top_k=1, top_p=0.1, seed=9), [0, 1, 2], NoiseCache(50)), scores)


def test_scores_are_filtered_logits_at_the_temperature_plus_the_noise_of_the_position() -> None:
    scores, noise = random_scores(3, 50, seed=2), NoiseCache(50)
    expected = filtered(scores / FILTERS.temperature, FILTERS) + torch.stack([noise(3, p) for p in (7, 9, 8)])
    assert torch.equal(perturbed(scores, FILTERS, [7, 9, 8], noise), expected)


def test_a_row_does_not_see_its_neighbours() -> None:
    """Its sample is that of the row alone, whatever stands beside it (contract C2)."""
    scores, noise = random_scores(8, 300, seed=4) * 2, NoiseCache(300)
    scores[5] = NAN
    together = perturbed(scores, FILTERS, range(20, 28), noise)
    for i in range(8):
        alone = perturbed(scores[i : i + 1], FILTERS, [20 + i], noise)
        assert torch.equal(together[i].nan_to_num(), alone[0].nan_to_num())


def test_the_logits_are_not_written_to() -> None:
    scores = random_scores(2, 50, seed=5)
    before = scores.clone()
    perturbed(scores, Law(1.0), [0, 1], NoiseCache(50))
    perturbed(scores, FILTERS, [0, 1], NoiseCache(50))
    assert torch.equal(scores, before)


def test_every_row_has_a_position() -> None:
    with pytest.raises(ValueError):
        perturbed(random_scores(2, 50, seed=0), Law(1.0), [1], NoiseCache(50))


@settings(max_examples=300)
@given(rows, top_ks, top_ps, min_ps)
def test_what_has_no_probability_is_never_the_sample(row: list[float], top_k: int, top_p: float, min_p: float) -> None:
    """Not even with the largest noise there is on every such token and the least on all others."""
    law = Law(1.0, top_k, top_p, min_p)
    kept = left(row, top_k, top_p, min_p)
    worst = torch.tensor([-2.9 if token in kept else 22.2 for token in range(len(row))])
    assert argmax(perturbed(torch.tensor([row]), law, [0], lambda seed, position: worst))[0] in kept


# -- argmax -----------------------------------------------------------------------------------------------------------

VOCABULARIES = [1, 2, 127, 128, 131, 256, 384, 1000, 1024]


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_argmax_is_torchs_where_nothing_ties(vocab_size: int) -> None:
    scores = torch.stack([torch.randperm(vocab_size) for _ in range(20)]).float() - vocab_size / 2
    assert argmax(scores) == scores.argmax(-1).tolist()


@settings(max_examples=200)
@given(st.sampled_from(VOCABULARIES), st.integers(0, 2**31), st.integers(1, 40))
def test_the_lowest_id_wins_a_tie(vocab_size: int, seed: int, levels: int) -> None:
    """Inside a block, between blocks, and between plus and minus zero."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-levels, 1, (4, vocab_size), generator=generator).float()
    scores[2:] *= -0.0
    expected = [row.index(max(row)) for row in scores.tolist()]
    assert argmax(scores) == expected


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize(("vocab_size", "bad", "where"), pairwise(VOCABULARIES, [NAN, INF], [0.0, 0.5, 1.0]))
def test_one_value_that_is_not_a_number_fails_its_row_alone(vocab_size: int, bad: float, where: float) -> None:
    scores = random_scores(3, vocab_size, seed=6)
    healthy = argmax(scores)
    scores[1, int(where * (vocab_size - 1))] = bad
    assert argmax(scores) == [healthy[0], -1, healthy[2]]


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize(
    ("vocab_size", "bad", "law"), pairwise(VOCABULARIES, [NAN, INF, -INF], [Law(), Law(1.0), FILTERS]), ids=str
)
def test_a_row_without_a_finite_maximum_has_no_sample(vocab_size: int, bad: float, law: Law) -> None:
    scores, noise = random_scores(3, vocab_size, seed=6), NoiseCache(vocab_size)
    healthy = argmax(perturbed(scores, law, range(3), noise))
    scores[1] = bad
    assert argmax(perturbed(scores, law, range(3), noise)) == [healthy[0], -1, healthy[2]]


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_the_only_possible_token_is_the_sample(vocab_size: int) -> None:
    scores = torch.full((vocab_size, vocab_size), -INF).fill_diagonal_(-1e30)
    assert argmax(scores) == list(range(vocab_size))


# -- ranked -----------------------------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(st.one_of(st.sampled_from(VOCABULARIES), st.integers(1, 700)), st.integers(1, 40), st.integers(0, 2**31))
def test_ranked_is_topk(vocab_size: int, count: int, seed: int) -> None:
    scores = random_scores(3, vocab_size, seed)
    found, expected = ranked(scores, count), torch.topk(scores, min(count, vocab_size))
    assert found.ids == expected.indices.tolist() and found.scores == expected.values.tolist()


@settings(max_examples=300)
@given(st.sampled_from([256, 384, 1000, 1280]), st.integers(1, 12), st.integers(0, 2**31), st.integers(1, 30))
def test_ranked_with_ties(vocab_size: int, count: int, seed: int, levels: int) -> None:
    """Distinct ids with the values that the best have, best first; impossible tokens come last."""
    scores = torch.randint(levels, (3, vocab_size), generator=torch.Generator().manual_seed(seed)).float()
    scores[1, count // 2 :] = -INF
    for row, ids, best in zip(scores, *ranked(scores, count), strict=True):
        assert len(set(ids)) == count
        assert row[ids].tolist() == best == torch.topk(row, count).values.tolist()


@pytest.mark.parametrize("vocab_size", [131, 512])
def test_the_best_rank_is_the_sample(vocab_size: int) -> None:
    scores = random_scores(50, vocab_size, seed=8)
    assert [ids[0] for ids in ranked(scores, 3).ids] == argmax(scores)


def test_ids_of_a_device_are_those_of_the_vocabulary_or_said_to_be_none() -> None:
    ids = torch.tensor([[3, -1, 0], [9, 2**40, -(2**63)]])
    assert read_ids(ids, 10) == [[3, -1, 0], [9, UNKNOWN, UNKNOWN]] and read_ids(ids[:0], 10) == []
    assert read_ids(ids[0, ::2], 4, refuse=True) == [3, 0]
    for wrong in (ids[0], ids[1, :1], ids[1, 1:]):
        with pytest.raises(SsdError, match="vocabulary of 9"):
            read_ids(wrong, 9, refuse=True)
