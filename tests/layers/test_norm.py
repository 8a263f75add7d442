"""Root-mean-square normalisation against its definition, and its rows against each other."""

from __future__ import annotations

import pytest
import torch

from ssd.layers.norm import OffsetRMSNorm, RMSNorm
from tests.pairs import pairwise

pytestmark = pytest.mark.usefixtures("either_way")

SIZES = (7, 64, 100, 576, 1536)


def definition(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    exact = x.double()
    return exact / (exact.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


ERRORS = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-8}


@pytest.mark.parametrize(("size", "dtype", "magnitude"), pairwise(SIZES, list(ERRORS), [1e-4, 1.0, 1e4]), ids=str)
def test_it_is_the_definition_rounded_once(size: int, dtype: torch.dtype, magnitude: float) -> None:
    generator = torch.Generator().manual_seed(size)
    x = (torch.randn(5, size, generator=generator) * magnitude).to(dtype)
    weight = torch.rand(size, generator=generator).add(0.5).to(dtype)
    for norm, factor in ((RMSNorm(weight, 1e-5), weight), (OffsetRMSNorm(weight, 1e-5), 1 + weight.double())):
        expected = definition(x, factor, 1e-5)
        assert norm(x).dtype == dtype
        assert ((norm(x).double() - expected).abs() <= ERRORS[dtype] * expected.abs()).all()


def test_a_row_of_zeros_stays_zero() -> None:
    assert torch.equal(RMSNorm(torch.ones(8), 1e-5)(torch.zeros(2, 8)), torch.zeros(2, 8))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_how_many_there_are(size: int, dtype: torch.dtype) -> None:
    """Nor on whether it lies in one piece with the others, as heads in a projection do not."""
    norm = RMSNorm(torch.rand(size).to(dtype), 1e-5)
    heads = torch.randn(40, 5, size).to(dtype)[:, :3]
    together = norm(heads)
    for count in (1, 2, 7, 16):
        for start in range(0, 40 - count, count):
            part = slice(start, start + count)
            assert torch.equal(norm(heads[part]), together[part])
            assert torch.equal(norm(heads[part].contiguous()), together[part])
    assert torch.equal(torch.cat([norm(row) for row in heads.reshape(-1, size)]), together.flatten())


def test_the_argument_is_left_alone() -> None:
    x = torch.randn(3, 16)
    before = x.clone()
    RMSNorm(torch.rand(16), 1e-5)(x)
    assert torch.equal(x, before)
