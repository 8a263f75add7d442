"""Products with packed weights by the GPU's kernels, in Triton's interpreter, against double precision."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from ssd.kernels.groups import Groups, stacked
from ssd.layers import linear, quantized
from ssd.layers.linear import Linear, Table
from ssd.layers.quantized import FEW_ROWS, PackedProduct, _codes, _packed, _splits, packed_product
from ssd.layers.triton_quantized import _numbers
from tests.kernels.test_groups import drawn as groups_drawn
from tools.gpu_report.variants import Tuned

OUTPUTS = 70
# What a result may differ by: half a unit in the last place of its type, of bfloat16 a whole one, as the interpreter
# cuts digits off where it makes it.
TOLERANCE = {torch.float32: 2e-7, torch.float16: 2**-11, torch.bfloat16: 2**-7}
# (bits, inputs of a group, inputs): whole tiles and not, groups larger and smaller than what is summed at a time.
INTEGERS = (
    (4, 16, 192),
    (4, 32, 512),
    (4, 64, 192),
    (4, 96, 96),
    (4, 1024, 1024),
    (8, 16, 80),
    (8, 32, 256),
    (8, 576, 576),
)
FP8 = ((64, 192), (256, 256))


def drawn(bits: int, group: int, inputs: int, shifted: bool = False, wide: bool = False) -> Groups:
    """A weight whose products float16 holds, too."""
    return groups_drawn(bits, group, shifted, wide, OUTPUTS, inputs, largest=0)


def floats(group: int, inputs: int) -> Groups:
    """Every number that FP8 has, and steps that 16 bits do not hold."""
    generator = torch.Generator().manual_seed(group)
    codes = torch.randint(127, (OUTPUTS, inputs), generator=generator, dtype=torch.uint8)
    signs = torch.randint(2, (OUTPUTS, inputs), generator=generator, dtype=torch.uint8) << 7
    return Groups(codes | signs, torch.rand(OUTPUTS, inputs // group, generator=generator), None, e4m3=True)


def inputs_of(rows: int, inputs: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).to(dtype)


def check(weight: Groups, dtype: torch.dtype, rows: int = 5, processors: int = 1) -> None:
    x, bias = inputs_of(rows, weight.shape[1], dtype), torch.linspace(-1, 1, OUTPUTS).to(dtype)
    got, numbers = PackedProduct(weight, bias, processors)(x), weight.dequantized().double()
    exact = x.double() @ numbers.T + bias.double()
    # Codes begin at 0, so their sums are large; an offset subtracts most of that again.
    shifts = 0.0 if weight.offsets is None else 2 * weight.offsets.double().abs().repeat_interleave(weight.group, 1)
    sizes = x.double().abs() @ (numbers.abs() + shifts).T + bias.double().abs()
    assert got.dtype == dtype
    assert ((got.double() - exact).abs() <= TOLERANCE[dtype] * exact.abs() + 2e-7 * sizes).all()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shifted", [False, True], ids=["zero", "offsets"])
@pytest.mark.parametrize("kind", INTEGERS, ids=str)
def test_integers_in_groups(kind: tuple[int, int, int], shifted: bool, dtype: torch.dtype) -> None:
    check(drawn(*kind, shifted, wide=shifted), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", FP8, ids=str)
def test_fp8_in_groups(kind: tuple[int, int], dtype: torch.dtype) -> None:
    check(floats(*kind), dtype)


@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 70])
def test_any_number_of_rows(rows: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        check(drawn(4, 32, 1024), dtype, rows, processors=100)


@pytest.mark.usefixtures("products_of_rows")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_row_has_the_same_bits_in_any_batch_of_few(dtype: torch.dtype) -> None:
    """Also where programs share the inputs, whose sums are then added in one order."""
    x = inputs_of(FEW_ROWS, 1024, dtype)
    for weight in (drawn(4, 128, 1024, shifted=True), floats(128, 1024)):
        product = PackedProduct(weight, torch.ones(OUTPUTS, dtype=dtype), processors=100)
        together = product(x)
        for first, rows in ((0, 1), (63, 1), (3, 8), (16, 16), (10, 33), (1, 63)):
            assert torch.equal(product(x[first : first + rows]), together[first : first + rows]), rows


def test_rows_may_lie_between_other_numbers_and_none_may_be_there() -> None:
    product, x = PackedProduct(drawn(4, 32, 64)), inputs_of(9, 64)
    wide = torch.full((9, 200), torch.nan)
    wide[:, 8:72] = x
    assert torch.equal(product(wide[:, 8:72]), product(x))
    assert torch.equal(product(x.T.contiguous().T), product(x))
    assert product(x[:0]).shape == (0, OUTPUTS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_those_of_the_weight(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the layer that has the weight, and without one."""
    monkeypatch.setattr(linear, "fuses", lambda device: True)
    monkeypatch.setattr(linear.cpu, "multiply_floats", lambda weight: False)  # as on a GPU
    ids = torch.tensor([69, 0, 63, 64, 5, 5])
    for weight in (drawn(4, 32, 96, True), drawn(8, 96, 96), drawn(4, 16, 48, True, True), floats(32, 96)):
        weight = Groups(weight.codes, weight.steps, weight.offsets, weight.zero, (), weight.e4m3, dtype)
        layer, numbers = Linear(weight), weight.dequantized()
        assert isinstance(layer.product, PackedProduct)
        for table in (Table(weight, layer), Table(weight), Table(weight, dots=True)):
            assert table.product is None
            assert torch.equal(table(ids), numbers[ids])
            x = inputs_of(3, weight.shape[1], dtype)
            assert torch.equal(table.dots(x, ids), x @ numbers[ids].T)


def test_weights_of_several_kinds_are_one_layer() -> None:
    """As in a stack of projections whose types differ."""
    stack, x = stacked([drawn(4, 32, 96, True), drawn(8, 96, 96), floats(32, 96)]), inputs_of(5, 96)
    bias = torch.linspace(-1, 1, 3 * OUTPUTS)
    got = packed_product(stack, bias)(x)
    assert (got - (x @ stack.dequantized().T + bias)).abs().max() <= 1e-5 * got.abs().max()


@pytest.mark.parametrize(
    ("weight", "bits"),
    [
        (drawn(4, 32, 512), 4 + 16 / 32),
        (drawn(4, 128, 1024, shifted=True), 4 + 2 * 16 / 128),
        (drawn(4, 32, 512, True, True), 4 + 2 * 32 / 32),
        (drawn(8, 32, 512), 8 + 16 / 32),
        (floats(128, 512), 8 + 32 / 128),
    ],
    ids=["4 bits", "4 bits, offsets", "4 bits, wide", "8 bits", "fp8"],
)
def test_a_weight_takes_its_bits(weight: Groups, bits: float) -> None:
    whole_blocks = 128 * weight.shape[1]
    assert PackedProduct(weight).nbytes == whole_blocks * bits / 8


def test_what_cannot_stay_packed_becomes_the_type_of_the_model(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(linear, "fuses", lambda device: True)
    linear.tell_unpacked.cache_clear()
    weight = drawn(4, 24, 48)
    weight = Groups(weight.codes, weight.steps, None, weight.zero, dtype=torch.bfloat16)
    x = inputs_of(3, 48, torch.bfloat16)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(Linear(weight)(x), Linear(weight.dequantized())(x))
    assert [record.message for record in caplog.records] == [
        "weights with groups of other than a multiple of 16 inputs cannot stay packed on a GPU: they become bfloat16"
    ]


@triton.jit
def numbers_kernel(
    words: tl.tensor, out: tl.tensor, PLACE: tl.constexpr, ZERO: tl.constexpr, BITS: tl.constexpr, E4M3: tl.constexpr
) -> None:
    """Write the numbers at one place of words [16, 8]."""
    row = tl.arange(0, 16)[:, None]
    found = _numbers(tl.load(words + row * 8 + tl.arange(0, 8)), PLACE, ZERO, BITS, E4M3, out.dtype.element_ty)
    tl.store(out + row * 16 + tl.arange(0, 16), found)


class Ptx:
    """The instructions of `_pairs`, by the PTX manual: lop3 with the table 0xEA, then a fused multiply-add of two."""

    def __init__(self, data: Sequence[np.ndarray], kind: str) -> None:
        bits, mask, more, factor, shift = (part.astype(np.int64) & 0xFFFFFFFF for part in data)
        pairs, self.type = (bits & mask) | more, {"bf16x2": torch.bfloat16, "f16x2": torch.float16}[kind]
        low, high = (self.fused(*(part >> by & 0xFFFF for part in (pairs, factor, shift))) for by in (0, 16))
        self.handle = TensorHandle((low | high << 16).astype(np.uint32).view(np.int32), tl.int32)

    def fused(self, *bits: np.ndarray) -> np.ndarray:
        one, factor, more = (torch.from_numpy(part.astype(np.int16)).view(self.type).double() for part in bits)
        return (one * factor + more).to(self.type).view(torch.int16).numpy().astype(np.int64) & 0xFFFF

    def get_result(self, place: int) -> TensorHandle:
        return self.handle


@pytest.fixture
def ptx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter run the instructions."""

    def run(builder: object, asm: str, constraints: str, values: Sequence[TensorHandle], *_: object) -> Ptx:
        found = re.fullmatch(r"{.reg .b32 t; lop3.b32 t, \$1, \$2, \$3, 0xEA; fma.rn.(\w+) \$0, t, \$4, \$5;}", asm)
        assert found is not None, asm
        return Ptx([value.data for value in values], found[1])

    monkeypatch.setattr(InterpreterBuilder, "create_inline_asm", run, raising=False)


@pytest.mark.usefixtures("ptx")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("bits", "zero"), [(4, 0), (4, 8), (4, 12), (4, 15), (8, 0), (8, 128), (8, None)], ids=str)
def test_every_code_becomes_its_number(bits: int, zero: int | None, dtype: torch.dtype) -> None:
    """In float32 by arithmetic, in 16 bits by a GPU's instructions for two numbers. FP8's NaN become -480 and 480."""
    e4m3, places = zero is None, 16 // bits
    codes = torch.arange(256).remainder(1 << bits).byte().view(16, 16).repeat(1, places)
    codes = torch.stack([codes[:, at::places].flatten().roll(at) for at in range(places)], dim=1)
    laid = codes.view(16, 16, places).transpose(1, 2).flatten(1)  # a place after the other
    words = _packed(laid, 16, bits, e4m3)[0, 0, :16].contiguous()
    assert torch.equal(_codes(words[:, None], bits, e4m3), laid)
    for place in range(places):
        numbers_kernel[1,](words, got := torch.empty(16, 16, dtype=dtype), place, zero or 0, bits, e4m3)
        expected = laid.view(16, places, 16)[:, place].contiguous()
        if e4m3:
            numbers = expected.view(torch.float8_e4m3fn).float()
            numbers = torch.where(numbers.isnan(), torch.where(expected > 127, -480.0, 480.0), numbers)
        else:
            numbers = expected.float() - zero
        assert torch.equal(got.float(), numbers)
        assert torch.equal(got.signbit(), numbers.signbit())


@pytest.mark.usefixtures("ptx")
@pytest.mark.parametrize("kind", [(4, 16, 192), (4, 64, 512), (8, 32, 256), (8, 64, 192)], ids=str)
def test_products_with_a_gpus_instructions(kind: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """In float16, as the interpreter multiplies no bfloat16."""
    monkeypatch.setattr(quantized, "product_kernel", Tuned(quantized.product_kernel, {"WIDE": False}))
    for weight in (drawn(*kind), drawn(*kind, shifted=True), floats(*kind[1:])):
        check(weight, torch.float16)


@pytest.mark.parametrize(
    ("blocks", "tiles", "splits"),
    [(96, 32, 8), (64, 32, 8), (64, 112, 8), (2004, 32, 1)],
    ids=["qkv", "o", "down", "head"],
)
def test_multiprocessors_get_about_as_many_tiles(blocks: int, tiles: int, splits: int) -> None:
    """Of an 8B model in FP8, by 132 multiprocessors."""
    assert _splits(blocks, tiles, 132) == splits
    busiest = -(-blocks * splits // 132) * -(-tiles // splits)
    assert busiest <= 1.06 * blocks * tiles / 132


def test_two_splits_of_gate_up_cost_less_than_they_bring_in_fp8_but_not_in_4_bits() -> None:
    """Of 8B: without splits the busiest multiprocessor has 18 % more tiles than the mean; parts must be added up."""
    assert _splits(448, 32, 132) == 2
    assert _splits(448, 16, 132) == 1


def test_few_tiles_are_not_split() -> None:
    assert _splits(2, 3, 132) == 1
    assert _splits(1, 8, 132) == 4
