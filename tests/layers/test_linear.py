"""The packed linear layer: the right numbers, and for every row the same bits whatever its company."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ssd.layers.linear import INVARIANT_ROWS, Linear

pytestmark = pytest.mark.usefixtures("either_way")

ROWS = 300
COUNTS = (*range(1, 18), 64, ROWS)
# (out, in): of SmolLM2 and its draft, odd ones, and sums long enough for oneDNN to split them.
SHAPES = (
    (960, 576),
    (576, 1536),
    (1024, 192),
    (192, 512),
    (131, 32),
    (33, 17),
    (1, 7),
    (64, 1025),
    (1000, 1537),
    (64, 4096),
)
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def tensors(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(weight, bias, x [ROWS, in])."""
    generator = torch.Generator().manual_seed(0)
    out, width = shape
    sizes = ((out, width), (out,), (ROWS, width))
    weight, bias, x = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    return weight, bias, x


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
def test_float32_equals_the_plain_product(shape: tuple[int, int], biased: bool) -> None:
    weight, bias, x = tensors(shape, torch.float32)
    added = bias if biased else None
    expected = F.linear(x.double(), weight.double(), None if added is None else added.double())
    ours = Linear(weight.clone(), added)(x)
    assert ours.dtype == torch.float32
    assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
def test_bfloat16_rounds_once(shape: tuple[int, int], biased: bool) -> None:
    """Within half a unit of the last of bfloat16's 8 bits, beside what summing in float32 costs."""
    weight, bias, x = tensors(shape, torch.bfloat16)
    added = bias if biased else None
    expected = F.linear(x.double(), weight.double(), None if added is None else added.double())
    ours = Linear(weight.clone(), added)(x)
    assert ours.dtype == torch.bfloat16
    assert ((ours.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-5 * expected.abs().max()).all()


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(shape, torch.float32) for shape in SHAPES] + [(shape, torch.bfloat16) for shape in SHAPES if shape[1] >= 32],
    ids=str,
)
def test_a_row_does_not_depend_on_how_many_there_are(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, bias, x = tensors(shape, dtype)
    linear = Linear(weight, bias)
    most = ROWS if dtype == torch.float32 else INVARIANT_ROWS
    together = torch.cat([linear(rows) for rows in x.split(most)])
    for count in (count for count in COUNTS if count <= most):
        assert torch.equal(linear(x[:count]), together[:count]), count
        assert torch.equal(linear(x[-count:]), together[-count:]), count
    alone = torch.cat([linear(x[row : row + 1]) for row in range(ROWS)])
    assert torch.equal(alone, together)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bfloat16_on_a_processor_without_it(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear computes in float32 and rounds once; rows do not depend on each other."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    weight, bias, x = tensors(shape, torch.bfloat16)
    linear, exact = Linear(weight.clone(), bias), Linear(weight.float(), bias.float())
    together = linear(x)
    assert torch.equal(together, exact(x.float()).bfloat16())
    assert torch.equal(torch.cat([linear(x[row : row + 1]) for row in range(ROWS)]), together)


@pytest.fixture
def another_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("another_default")
def test_the_default_type_changes_nothing() -> None:
    """Results have the type of the input, and room for it."""
    weight, bias, x = tensors((576, 1536), torch.float32)
    found = Linear(weight.clone(), bias)(x)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, F.linear(x, weight, bias), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_are_not_contiguous(dtype: torch.dtype) -> None:
    weight, bias, x = tensors((64, 48), dtype)
    linear = Linear(weight.clone(), bias)
    wide = torch.cat((x, x), dim=1)
    assert torch.equal(linear(wide[:, :48]), linear(x))
    assert torch.equal(linear(wide[::2, 48:]), linear(x[::2].contiguous()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sizes_are_those_of_the_weight(dtype: torch.dtype) -> None:
    weight, _, x = tensors((33, 17), dtype)
    linear = Linear(weight)
    assert (linear.out_features, linear.in_features) == (33, 17)
    assert linear(x[:0]).shape == (0, 33)
