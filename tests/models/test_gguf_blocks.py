"""GGUF's blocks as groups: the numbers of gguf's own `dequantize`, and their products."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from ssd.kernels import cpu
from ssd.kernels.groups import grouped_product, takes
from ssd.models.gguf.blocks import BLOCKS, groups_of
from ssd.models.gguf.header import FLOATS, GGUF_FORMS, SUPPORTED

# Where the halves of a block are: its step, and its offset if it has one.
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
}


def drawn(kind: str, outputs: int, inputs: int) -> np.ndarray:
    """Random bytes as blocks with finite steps: uint8 [outputs, bytes of a row]."""
    generator, block = np.random.default_rng(outputs), BLOCKS[kind]
    blocks = generator.integers(0, 256, (outputs * inputs // block.weights, block.bytes), dtype=np.uint8)
    for at in HALVES[kind]:
        halves = generator.standard_normal((len(blocks), 1)).astype(np.float16)
        blocks[:, at : at + 2] = halves.view(np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = generator.integers(100, 140, len(blocks))
    return blocks.reshape(outputs, -1)


def test_files_may_have_every_type() -> None:
    assert (*FLOATS, *BLOCKS) == SUPPORTED


@pytest.mark.parametrize("kind", BLOCKS)
def test_the_bits_of_every_type_are_those_of_gguf(kind: str) -> None:
    known, rows = gguf.GGMLQuantizationType[kind], drawn(kind, 70, 768)
    assert gguf.GGML_QUANT_SIZES[known] == (BLOCKS[kind].weights, BLOCKS[kind].bytes)
    expected, groups = gguf.dequantize(rows, known), groups_of(kind, rows)
    assert np.isfinite(expected).all()
    assert groups.shape == (70, 768) and groups.group in (16, 32)
    # Codes of 2 and 3 bits take 4 in a packed weight.
    coarse = kind in ("Q2_K", "Q3_K")
    assert GGUF_FORMS[kind].nbytes(70, 768) <= (2.0 if coarse else 1.25) * 96 * rows.shape[1]
    assert (groups.dequantized().numpy().view(np.int32) == expected.view(np.int32)).all()


@pytest.mark.skipif(not cpu.multiply_floats(torch.empty(1, 1)), reason="no products on this processor")
@pytest.mark.parametrize("kind", BLOCKS)
def test_products_of_every_type_are_those_of_float32_in_the_bytes_that_are_counted(kind: str) -> None:
    groups = groups_of(kind, drawn(kind, 70, 768))
    weight, x = groups.dequantized(), torch.randn(5, 768, generator=torch.Generator().manual_seed(1))
    # A last channel with more digits than bfloat16 keeps the reference in float32.
    plain = cpu.float_product(torch.cat((weight, torch.full((1, 768), 1 / 3).cumsum(1))), None)
    assert takes(groups)
    product = grouped_product(groups, None)
    assert torch.equal(product(x), plain(x)[:, :70])
    assert product.bytes == GGUF_FORMS[kind].nbytes(70, 768)
    sizes = x.abs().amax() * weight.abs().sum(1)
    assert ((grouped_product(groups, None, 2)(x) - x @ weight.T).abs() <= 1e-4 * sizes).all()
