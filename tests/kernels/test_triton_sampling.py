"""Drawing tokens by Triton's interpreter: noise against double precision, and the choices of torch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from ssd.kernels import triton_sampling as kernels
from ssd.law import Law
from ssd.speculation.noise import halves, lanes_of
from ssd.speculation.sampling import Draws, filtered, lowest, numbers_of

PLACES = [(0, 0), (5, 7), (2**63 - 1, 100_000), (77, 3), (2**40, 12)]
SIZE = 5000


def keys() -> Tensor:
    return torch.tensor([halves(place) for place in PLACES], dtype=torch.int32)


def test_noise_is_that_of_the_hash_in_double_precision() -> None:
    found = kernels.gumbels_of(keys(), SIZE)
    lanes = lanes_of(keys(), torch.arange(SIZE, dtype=torch.int32))
    u = (lanes & 0x7FFFFFFF).float().add(0.5).mul(2.0**-31).clamp(max=1 - 2.0**-24).double()
    exact = -torch.log(-torch.log1p(-u))
    assert ((found.double() - exact).abs() <= 3e-7 * exact.abs() + 3e-7).all()
    assert float(found.min()) > -3.2 and 7.0 < float(found.max()) < 22.0


def test_noise_of_some_tokens_has_the_bits_of_all() -> None:
    whole, ids = kernels.gumbels_of(keys(), SIZE), torch.tensor([4999, 0, 17, 17, 2048])
    assert torch.equal(kernels.gumbels_of(keys(), len(ids), ids=ids), whole[:, ids])
    assert torch.equal(kernels.gumbels_of(keys()[2:3], 300, first=2000), whole[2:3, 2000:2300])


def test_the_largest_number_of_a_float_and_the_smallest_are_finite() -> None:
    """Those of u next to 1 and to 0, which no hash here hits."""
    lanes = torch.tensor([0x7FFFFFFF, 0])
    u = (lanes.double() + 0.5) * 2.0**-31
    assert torch.isfinite(-torch.log(-torch.log1p(-u.clamp(max=1 - 2.0**-24)))).all()


def laws_of(rows: Sequence[tuple[float, ...]]) -> Tensor:
    """The numbers of these laws, as `Draws` has them."""
    return torch.tensor([numbers_of(Law(*row)) for row in rows]).T


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [5000, 4096, 131])
def test_draws_are_the_largest_scores(size: int, dtype: torch.dtype) -> None:
    logits = (3 * torch.randn(5, size, generator=torch.Generator().manual_seed(size))).to(dtype)
    laws = laws_of([(0.7,), (0.0,), (1.3,), (1.0,), (0.0,)])
    inverse = laws[0]
    noise, wide = kernels.gumbels_of(keys(), size), logits.float()
    scores = torch.where(inverse[:, None] > 0, wide * inverse[:, None] + noise, wide)
    assert torch.equal(kernels.warmed(logits, Draws(keys(), laws)), scores)
    assert kernels.drawn(logits, Draws(keys(), laws)).tolist() == scores.argmax(-1).tolist()
    assert kernels.drawn(logits).tolist() == [int((row == row.max()).nonzero()[0]) for row in wide]
    for row in range(5):  # alone, and as a part of wider rows
        wider = torch.cat((logits, logits), dim=1)[row : row + 1, :size]
        own = Draws(keys()[row : row + 1], laws[:, row : row + 1])
        assert torch.equal(kernels.warmed(wider, own)[0], scores[row])
        assert kernels.drawn(wider, own).tolist() == [int(scores[row].argmax())]


# Temperature, top_k, top_p, min_p. Some are off, and some leave everything.
FILTERS = [
    *[(0.7, 0, 0.9, 0.0), (1.0, 5, 1.0, 0.0), (1.3, 0, 1.0, 0.1), (0.8, 20, 0.8, 0.02), (1.0, 0, 1.0, 0.0)],
    *[(0.0, 3, 0.5, 0.5), (1.0, 7000, 0.5, 0.0), (2.0, 0, 0.9999, 0.0), (1.0, 1, 1.0, 0.0), (0.5, 40, 0.95, 1.0)],
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("size", [5000, 512, 131])
def test_filters_leave_what_they_leave_in_double_precision(size: int, dtype: torch.dtype) -> None:
    logits = (4 * torch.randn(len(FILTERS), size, generator=torch.Generator().manual_seed(size))).to(dtype)
    logits[:, 7] = logits[:, 60]  # ties, at the top of a row for once
    logits[8, [3, 90]] = 40.0
    laws = laws_of(FILTERS)
    found, inverse = kernels.lowest(logits, laws), laws[0]
    scores = logits.float() * inverse[:, None]
    for row, (warmth, *law) in enumerate(FILTERS):
        left = scores[row] >= found[row]
        if warmth == 0.0:
            assert left.all()
            continue
        exact = filtered(scores[row : row + 1].double(), Law(1.0, *law))[0]
        assert torch.equal(left, exact > -torch.inf), FILTERS[row]
    for row in range(len(FILTERS)):  # alone, and as a part of wider rows
        wider = torch.cat((logits, logits), dim=1)[row : row + 1, :size]
        assert torch.equal(kernels.lowest(wider, laws[:, row : row + 1])[0], found[row])
    draws = Draws(keys()[:1].repeat(len(FILTERS), 1), laws, filtered=True)
    warm = torch.where(scores < found[:, None], -torch.inf, scores) + kernels.gumbels_of(draws.keys, size)
    expected = torch.where(inverse[:, None] > 0, warm, logits.float())
    assert torch.equal(kernels.warmed(logits, draws), expected)
    assert kernels.drawn(logits, draws).tolist() == expected.argmax(-1).tolist()


def test_filters_of_torch_are_those_of_the_kernel() -> None:
    logits = 4 * torch.randn(len(FILTERS), 700, generator=torch.Generator().manual_seed(2))
    laws = laws_of(FILTERS)
    scores = logits * laws[0][:, None]
    one, other = kernels.lowest(logits, laws), lowest.reference(logits, laws)
    assert torch.equal(scores >= one[:, None], scores >= other[:, None])


def test_rows_that_are_not_numbers_have_no_sample_with_filters_either() -> None:
    logits = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(1))
    logits[0, 10] = torch.nan
    logits[1, 10] = torch.inf
    logits[2] = -torch.inf
    logits[3, 1:] = -torch.inf
    draws = Draws(keys()[:4], laws_of([(1.0, 3, 0.5, 0.1)] * 4), filtered=True)
    assert kernels.drawn(logits, draws).tolist() == [-1, -1, -1, 0]


def test_tokens_of_a_short_vocabulary_have_their_own_noise() -> None:
    ids, logits = torch.tensor([40, 3, 4999, 128]), torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    expected = logits * 1.25 + kernels.gumbels_of(keys(), SIZE)[:, ids]
    assert torch.equal(kernels.warmed(logits, Draws(keys(), laws_of([(0.8,)] * 5)), ids), expected)


def test_ties_go_to_the_lowest_token_and_rows_without_a_largest_number_to_none() -> None:
    logits = torch.zeros(5, SIZE)
    logits[0, [4500, 2100, 4900]] = 1.0
    logits[1, 4000] = torch.nan
    logits[2, 10] = torch.inf
    logits[3] = -torch.inf
    logits[4, 2] = -torch.inf
    for drawn in (kernels.drawn(logits), kernels.drawn(logits, Draws(keys(), laws_of([(0.0,)] * 5)))):
        assert drawn.tolist() == [2100, -1, -1, -1, 0]
    assert kernels.drawn(logits, Draws(keys(), laws_of([(1.0,)] * 5))).tolist()[1:4] == [-1, -1, -1]
