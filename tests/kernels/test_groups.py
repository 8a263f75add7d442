"""Weights of few bits, as GGUF leaves them: the bits of the products of the same weights in float32."""

from __future__ import annotations

import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quantize
from torch import Tensor

from ssd.kernels import cpu

pytestmark = pytest.mark.skipif(
    not cpu.multiply_floats(torch.empty(0)), reason="a processor without AVX-512: there is no such product"
)
BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}


def made(kind: str, outputs: int, inputs: int) -> Tensor:
    """A weight that has been through a format of GGUF, with channels of all sizes and groups of one number."""
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs + inputs))
    weight *= torch.logspace(-4, 2, outputs)[:, None]
    weight[1], weight[2], weight[3, :32] = 0.0, -0.25, weight[3, :32].abs()
    blocks = quantize(weight.numpy(), GGMLQuantizationType[kind])
    return torch.from_numpy(dequantize(blocks, GGMLQuantizationType[kind]))


def plain(weight: Tensor) -> cpu.Product:
    """Its product in float32: a channel behind the others, with more digits than any format keeps."""
    return cpu.float_product(torch.cat((weight, torch.full((1, weight.shape[1]), 1 / 3).cumsum(1))), None)


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize(("outputs", "inputs"), [(70, 64), (32, 32), (5, 96), (200, 1536)])
def test_the_bits_of_float32(kind: str, outputs: int, inputs: int) -> None:
    weight, bias = made(kind, outputs, inputs), torch.linspace(-1, 1, outputs)
    product, wide = cpu.float_product(weight, bias), plain(weight)
    assert product.struct.bits == BITS[kind] and wide.struct.bits == 0
    x = torch.randn(40, inputs, generator=torch.Generator().manual_seed(1))
    expected = wide(x)[:, :outputs] + bias
    for rows in (1, 2, 5, 6, 7, 18, 19, 40):
        assert torch.equal(product(x[:rows]), expected[:rows]), rows
    assert torch.equal(product(torch.cat((x, x), dim=1)[:, inputs:]), expected)


@pytest.mark.parametrize("kind", BITS)
def test_a_single_number_that_is_otherwise_keeps_all_in_float32(kind: str) -> None:
    weight = made(kind, 70, 64)
    for value in (torch.nextafter(weight[69, 63], torch.tensor(9.0)), torch.tensor(torch.nan), torch.tensor(torch.inf)):
        weight[69, 63] = value
        product = cpu.float_product(weight, None)
        assert product.struct.bits == 0 and product.struct.bytes == 4


def test_groups_that_do_not_end_with_the_row_are_none() -> None:
    assert cpu.float_product(made("Q4_0", 70, 64)[:, :33], None).struct.bits == 0
