"""Products of few rows with 16-bit weights by our kernel, in Triton's interpreter, against double precision."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ssd.layers import linear
from ssd.layers.linear import Linear
from ssd.layers.triton_product import FEW_ROWS, SplitProduct

# What a result may differ by: half a unit in the last place of its type, of bfloat16 a whole one, as the interpreter
# cuts digits off where it makes it.
TOLERANCE = {torch.float16: 2**-11, torch.bfloat16: 2**-7}
PROCESSORS = (1, 5, 40)
"""One split of the inputs, some, and as many as there are pairs of tiles."""


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(70, 64), (200, 576), (64, 1024), (130, 640)], ids=str)
@pytest.mark.parametrize("rows", [1, 16, 17, FEW_ROWS, FEW_ROWS + 1])
def test_products(rows: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, x = drawn(*shape, dtype=dtype), drawn(rows, shape[1], dtype=dtype, seed=1)
    for processors in PROCESSORS:
        for bias in (None, drawn(shape[0], dtype=dtype, seed=2)):
            exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
            sizes = x.double().abs() @ weight.double().abs().T
            product = SplitProduct(weight, bias, processors)
            for _ in range(2):  # the second time with the counters that the first one left
                got = product(x)
                assert got.dtype == dtype
                assert ((got.double() - exact).abs() <= TOLERANCE[dtype] * exact.abs() + 5e-7 * sizes).all()


@pytest.mark.usefixtures("products_of_rows")
@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_row_has_the_same_bits_in_any_batch_of_few(dtype: torch.dtype, processors: int) -> None:
    x, product = drawn(FEW_ROWS, 1024, dtype=dtype), SplitProduct(drawn(130, 1024, dtype=dtype), None, processors)
    together = product(x)
    for first, rows in ((0, 1), (63, 1), (3, 8), (16, 16), (10, 33), (1, 63)):
        assert torch.equal(product(x[first : first + rows]), together[first : first + rows]), rows


def test_rows_may_lie_between_other_numbers_and_none_may_be_there() -> None:
    product, x = SplitProduct(drawn(70, 128, dtype=torch.float16), None, 5), drawn(9, 128, dtype=torch.float16)
    wide = torch.full((9, 200), torch.nan, dtype=torch.float16)
    wide[:, 8:136] = x
    assert torch.equal(product(wide[:, 8:136]), product(x))
    assert torch.equal(product(x.T.contiguous().T), product(x))
    assert product(x[:0]).shape == (0, 70)


def test_it_serves_where_it_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "fuses", lambda device: True)
    monkeypatch.setattr(linear.cpu, "multiply_floats", lambda weight: False)  # as on a GPU
    monkeypatch.setattr(linear, "_can_pack", lambda weight: False)
    small = torch.zeros(64, 128, dtype=torch.bfloat16)
    assert not isinstance(Linear(small).product, SplitProduct)
    monkeypatch.setenv("SSD_GPU_TRIALS", " splitk,")
    assert isinstance(Linear(small).product, SplitProduct)
    large = torch.empty(1 << 15, 1 << 12, dtype=torch.bfloat16)
    for other in (small.float(), torch.zeros(64, 100, dtype=torch.bfloat16), small.T, large):
        assert not isinstance(Linear(other).product, SplitProduct)
