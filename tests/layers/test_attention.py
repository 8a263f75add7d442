"""Attention in one piece against torch's own, and in two pieces against one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ssd.layers import attention
from ssd.layers.attention import Scores, attend, attend_own, attend_part, group, merge, ungroup
from tests.pairs import pairwise

HEADS = ((4, 4), (4, 2), (9, 3), (3, 1))  # queries, keys
DIM = 16
SCALE = DIM**-0.5


def normal(*size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed + sum(size)), dtype=dtype)


def reference(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """torch's attention of q [n, heads, dim] over [length, kv_heads, dim] with visible [n, length]; [n, heads, dim]."""
    repeat = q.shape[1] // keys.shape[1]
    keys, values = (t.repeat_interleave(repeat, dim=1).transpose(0, 1) for t in (keys, values))
    return F.scaled_dot_product_attention(q.transpose(0, 1), keys, values, visible, scale=SCALE).transpose(0, 1)


def minus_infinity(visible: Tensor) -> Tensor:
    return torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(("queries", "length"), [(1, 1), (1, 40), (5, 5), (5, 40), (40, 40)])
def test_causal_attention_is_that_of_torch(heads: tuple[int, int], queries: int, length: int) -> None:
    q, keys, values = (
        normal(queries, heads[0], DIM),
        normal(length, heads[1], DIM),
        normal(length, heads[1], DIM, seed=1),
    )
    visible = torch.arange(length) <= torch.arange(length - queries, length)[:, None]
    expected = reference(q, keys, values, visible).flatten(1)
    assert (attend(q, keys, values, SCALE) - expected).abs().max() <= 1e-6


@pytest.mark.parametrize(
    ("heads", "counts", "window"),
    pairwise(HEADS, [(1, 1), (1, 40), (5, 5), (5, 40), (40, 40)], [1, 4, 37, 100]),
    ids=str,
)
def test_a_window_hides_what_lies_before_it(heads: tuple[int, int], counts: tuple[int, int], window: int) -> None:
    queries, length = counts
    q, keys, values = (
        normal(queries, heads[0], DIM),
        normal(length, heads[1], DIM),
        normal(length, heads[1], DIM, seed=1),
    )
    at, key = torch.arange(length - queries, length)[:, None], torch.arange(length)
    expected = reference(q, keys, values, (key <= at) & (key > at - window)).flatten(1)
    assert (attend(q, keys, values, SCALE, Scores(window=window)) - expected).abs().max() <= 1e-6


def test_a_soft_cap_bounds_scores_by_its_definition() -> None:
    """Of one head over two keys, by hand: the shares are a sigmoid of the capped difference."""
    q, keys, values = torch.full((1, 1, 1), 3.0), torch.tensor([5.0, -1.0]).view(2, 1, 1), torch.eye(2)[:, None]
    scores = 2.0 * torch.tanh(torch.tensor([15.0, -3.0]) / 2.0)
    expected = torch.stack([torch.sigmoid(scores[0] - scores[1]), torch.sigmoid(scores[1] - scores[0])])
    assert (attend(q, keys, values, 1.0, Scores(softcap=2.0)) - expected).abs().max() <= 1e-6


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("heads", "queries"), [((4, 2), 1), ((4, 2), 7), ((3, 1), 12)], ids=str)
def test_sinks_are_a_key_without_value(heads: tuple[int, int], queries: int, window: int | None) -> None:
    """One key more, whose score is the same for all queries of a head and whose value is 0."""
    q, keys, values = (normal(n, h, DIM, seed=n) for n, h in ((queries, heads[0]), (12, heads[1]), (12, heads[1])))
    sinks = torch.linspace(-1, 3, heads[0])
    scores = torch.einsum("nhd,lhd->nhl", q, keys.repeat_interleave(heads[0] // heads[1], 1)) * SCALE
    at, key = torch.arange(12 - queries, 12)[:, None], torch.arange(12)
    scores += minus_infinity((key <= at) & (key > at - (window or 12)))[:, None]
    weights = torch.cat((scores, sinks.expand(queries, -1)[..., None]), -1).softmax(-1)[..., :-1]
    expected = torch.einsum("nhl,lhd->nhd", weights, values.repeat_interleave(heads[0] // heads[1], 1))
    found = attend(q, keys, values, SCALE, Scores(window=window, sinks=sinks))
    assert (found - expected.flatten(1)).abs().max() <= 1e-6


@pytest.mark.parametrize("window", [None, 4])
def test_queries_in_parts_attend_as_all_together(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    q, keys, values = normal(20, 4, DIM), normal(40, 2, DIM), normal(40, 2, DIM, seed=1)
    mask = minus_infinity(torch.arange(30, 40) < torch.arange(20)[:, None] + 11)[:, None]
    rule = Scores(window=window, sinks=normal(4))
    whole = attend(q, keys, values, SCALE, rule), *attend_part(q, keys, values, SCALE, mask)
    for most in (1, 3 * 4 * 40, 19 * 4 * 40):
        monkeypatch.setattr(attention, "MOST_SCORES", most)
        monkeypatch.setattr(attention, "_FEW_QUERIES", 1)
        parts = attend(q, keys, values, SCALE, rule), *attend_part(q, keys, values, SCALE, mask)
        for one, other in zip(parts, whole, strict=True):
            assert (one - other).abs().max() <= 1e-6


def test_arguments_are_left_alone() -> None:
    q, keys, values = normal(5, 4, DIM), normal(9, 2, DIM), normal(9, 2, DIM, seed=1)
    before = [t.clone() for t in (q, keys, values)]
    attend(q, keys, values, SCALE)
    attend_part(q, keys, values, SCALE, minus_infinity(torch.ones(5, 1, 3, dtype=torch.bool)))
    assert all(torch.equal(a, b) for a, b in zip(before, (q, keys, values), strict=True))


def test_a_strided_cache_gives_the_same_bits() -> None:
    """Keys are read in place from a larger cache, where they may start anywhere."""
    q, cache = normal(3, 4, DIM), normal(64, 2, DIM)
    view, copy = cache[7:30], cache[7:30].clone()
    assert torch.equal(attend(q, view, view, SCALE), attend(q, copy, copy, SCALE))


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_group_and_ungroup_are_inverses(heads: tuple[int, int]) -> None:
    q = normal(5, heads[0], DIM)
    assert torch.equal(ungroup(group(q, heads[1]), 5), q.flatten(1))


@pytest.mark.parametrize(
    ("heads", "path", "depth"), pairwise(HEADS, [(1, 0), (40, 0), (40, 6), (6, 6)], [1, 4]), ids=str
)
def test_two_parts_merged_are_one_attention_over_the_union(
    heads: tuple[int, int], path: tuple[int, int], depth: int
) -> None:
    """As chains attend: to a shared path, of whose last `trunk` tokens each sees a part, and to keys of their own, of
    which each has a number of its own."""
    shared, trunk = path
    chains, kv = 7, heads[1]
    q = normal(chains, heads[0], DIM)
    keys, values = normal(shared, kv, DIM), normal(shared, kv, DIM, seed=1)
    own_keys, own_values = normal(chains, depth, kv, DIM, seed=2), normal(chains, depth, kv, DIM, seed=3)
    first = torch.arange(chains) % max(1, min(trunk + 1, shared))  # how much of the trunk each sees
    if trunk == shared:
        first = first.clamp(min=1)
    sees_trunk = torch.arange(trunk) < first[:, None]
    sees_own = torch.arange(depth) <= (torch.arange(chains) % depth)[:, None]

    part = attend_part(q, keys, values, SCALE, minus_infinity(sees_trunk)[:, None] if trunk else None)
    own = attend_own(q, own_keys, own_values, SCALE, minus_infinity(sees_own)[:, None, None])
    merged = merge(part, own)

    sees = torch.cat((torch.ones(chains, shared - trunk, dtype=torch.bool), sees_trunk, sees_own), dim=1)
    for chain in range(chains):
        union = torch.cat((keys, own_keys[chain])), torch.cat((values, own_values[chain]))
        expected = reference(q[chain : chain + 1], *union, sees[chain : chain + 1])
        assert (merged[chain] - expected[0]).abs().max() <= 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sinks_count_once_beside_two_parts(dtype: torch.dtype) -> None:
    q, keys, values = (
        normal(3, 4, DIM, dtype=dtype),
        normal(9, 2, DIM, dtype=dtype),
        normal(9, 2, DIM, seed=1, dtype=dtype),
    )
    rule = Scores(sinks=torch.tensor([-2.0, 0.0, 3.0, 90.0]))
    own = (part[5:].expand(3, -1, -1, -1) for part in (keys, values))
    parts = attend_part(q, keys[:5], values[:5], SCALE, None), attend_own(q, *own, SCALE, torch.zeros(3, 1, 1, 4))
    expected = [attend(one[None].double(), keys.double(), values.double(), SCALE, rule) for one in q]
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    assert (merge(*parts, rule).flatten(1) - torch.cat(expected)).abs().max() <= tolerance


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_the_log_sum_exp_of_a_part_is_that_of_its_scores(heads: tuple[int, int]) -> None:
    q, keys = normal(3, heads[0], DIM), normal(20, heads[1], DIM)
    _, total = attend_part(q, keys, keys, SCALE, None)
    scores = torch.einsum("nhd,lhd->nhl", q, keys.repeat_interleave(heads[0] // heads[1], dim=1)) * SCALE
    assert (total - scores.logsumexp(-1)).abs().max() <= 1e-5
    _, own = attend_own(q, keys.expand(3, -1, -1, -1), keys.expand(3, -1, -1, -1), SCALE, torch.zeros(3, 1, 1, 20))
    assert (own - total).abs().max() <= 1e-5


def test_a_part_that_dominates_by_far_does_not_overflow() -> None:
    """Scores of thousands: the weights are 0 and 1, not NaN."""
    q, keys, values = normal(2, 4, DIM), normal(9, 2, DIM), normal(9, 2, DIM, seed=1)
    own_keys, own_values = normal(2, 3, 2, DIM, seed=2), normal(2, 3, 2, DIM, seed=3)
    part = attend_part(q, 1000 * keys, values, SCALE, None)
    own = attend_own(q, own_keys, own_values, SCALE, torch.zeros(2, 1, 1, 3))
    assert torch.equal(merge(part, own), part[0])
    assert torch.equal(merge(own, part), part[0])
