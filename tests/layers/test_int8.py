"""The layer in 8-bit integers: as near as its weights allow, and for every row the same bits whatever its company."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ssd.layers import int8
from ssd.layers.int8 import LEVELS, Int8Linear, round_to_int8

either_way = pytest.mark.usefixtures("either_way")

ROWS = 300
COUNTS = (*range(1, 18), 64, ROWS)
SHAPES = ((960, 576), (576, 1536), (131, 32), (33, 17), (1, 7), (64, 4096))


def tensors(shape: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """(weight, bias, x [ROWS, in]); channels and rows of many sizes, and in every row one number that is far larger."""
    generator = torch.Generator().manual_seed(0)
    out, width = shape
    weight, bias, x = (torch.randn(size, generator=generator) for size in ((out, width), (out,), (ROWS, width)))
    x[:, 0] *= 30
    return weight * torch.logspace(-2, 1, out)[:, None], bias, x * torch.logspace(-3, 3, ROWS)[:, None]


@either_way
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
def test_only_the_weights_are_rounded_noticeably(shape: tuple[int, int], biased: bool) -> None:
    weight, bias, x = tensors(shape)
    added = bias if biased else None
    layer = Int8Linear(weight, added)
    levels = int8._weight_levels() if isinstance(layer.product, int8._OneDnnProduct) else LEVELS
    scales = weight.abs().amax(1, keepdim=True) / levels
    rounded = ((weight / scales).round() * scales).double()
    ours = layer(x)
    expected = F.linear(x.double(), rounded, None if added is None else added.double())
    assert ours.dtype == torch.float32
    # Half a level of each of `in` numbers, and of float32's last bit.
    bound = x.abs().amax(1, keepdim=True) / 65000 * rounded.abs().sum(1) + 1e-6 * expected.abs().amax(1, keepdim=True)
    assert ((ours - expected).abs() <= bound).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rounding_what_was_rounded_changes_no_integer(shape: tuple[int, int]) -> None:
    """So weights that a file has in 8 bits are those that the layer multiplies."""
    integers, scales = round_to_int8(tensors(shape)[0], LEVELS)
    again, close = round_to_int8(integers * scales[:, None], LEVELS)
    assert torch.equal(again, integers)
    assert ((close - scales).abs() <= 2e-7 * scales).all()


@either_way
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_does_not_depend_on_how_many_there_are(shape: tuple[int, int]) -> None:
    weight, bias, x = tensors(shape)
    linear = Int8Linear(weight, bias)
    together = linear(x)
    for count in COUNTS:
        assert torch.equal(linear(x[:count]), together[:count]), count
        assert torch.equal(linear(x[-count:]), together[-count:]), count
    alone = torch.cat([linear(x[row : row + 1]) for row in range(ROWS)])
    assert torch.equal(alone, together)


@either_way
def test_what_is_not_a_number_or_nothing_stays_in_its_row() -> None:
    weight, bias, x = tensors((131, 32))
    linear = Int8Linear(weight, bias)
    plain = linear(x[3:])
    x[0], x[1, 5], x[2] = torch.nan, torch.inf, 0
    y = linear(x)
    assert y[0].isnan().all() and not y[1].isfinite().any()
    assert torch.equal(y[2], bias) and torch.equal(y[3:], plain)


@either_way
def test_channels_of_zeros() -> None:
    assert torch.equal(Int8Linear(torch.zeros(4, 8))(torch.randn(3, 8)), torch.zeros(3, 4))


@either_way
def test_rows_that_are_not_contiguous() -> None:
    weight, _, x = tensors((64, 48))
    linear = Int8Linear(weight)
    wide = torch.cat((x, x), dim=1)
    assert torch.equal(linear(wide[::2, 48:]), linear(x[::2].contiguous()))
    assert torch.equal(linear(x.t().contiguous().t()), linear(x))


@pytest.mark.parametrize("instructions", ["AVX2", "AVX512_CORE", "AVX2_VNNI"])
def test_processors_without_vnni_are_as_exact(instructions: str) -> None:
    """Their sums of products saturate where weights have 8 bits. What the processor lacks anyway changes nothing.

    oneDNN reads the variable when torch is imported, and is used where our kernels are not."""
    program = (
        "import torch\n"
        "from ssd.kernels import library\n"
        "library.functions = lambda: None\n"
        "from ssd.layers.int8 import Int8Linear\n"
        "x = torch.full((3, 64), 2.0)\n"
        "y = Int8Linear(torch.full((32, 64), 0.5))(x)\n"
        "assert (y - 64).abs().max() < 1e-3, y\n"
        "assert torch.equal(Int8Linear(torch.full((32, 64), -0.5))(x), -y)\n"
    )
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": instructions}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
