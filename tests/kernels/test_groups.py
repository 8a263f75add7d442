"""Weights of few bits: in float32 the bits of the dequantised weight's product; with rounded inputs close to them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quantize
from torch import Tensor

from ssd.kernels import cpu
from ssd.kernels.groups import (
    Groups,
    Parts,
    Stack,
    find_groups,
    grouped_product,
    multiples_of,
    rounded_to_4_bits,
    rows_apart,
    stacked,
)
from tests.pairs import pairwise

pytestmark = pytest.mark.skipif(not cpu.multiply_floats(torch.empty(1, 1)), reason="no products on this processor")
BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
SHAPES = ((70, 64), (32, 32), (5, 96), (200, 1536))
COUNTS = (1, 2, 5, 6, 7, 18, 19, 40)


def made(kind: str, outputs: int, inputs: int) -> Tensor:
    """A weight that has been through a format of GGUF, with channels of all sizes and groups of one number."""
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs + inputs))
    weight *= torch.logspace(-4, 2, outputs)[:, None]
    weight[1], weight[2], weight[3, :32] = 0.0, -0.25, weight[3, :32].abs()
    blocks = quantize(weight.numpy(), GGMLQuantizationType[kind])
    return torch.from_numpy(dequantize(blocks, GGMLQuantizationType[kind]))


def found(weight: Tensor) -> Groups:
    groups = find_groups(weight)
    assert groups is not None
    return groups


def drawn(
    bits: int, group: int, shifted: bool, wide: bool, outputs: int = 70, inputs: int = 192, largest: int = 1
) -> Groups:
    """A weight with every code, steps of all sizes up to some 10^`largest`, and offsets if it is `shifted`. Steps have
    11 bits, or if `wide` those of float32."""
    generator = torch.Generator().manual_seed(bits + group)
    codes = torch.randint(2**bits, (outputs, inputs), generator=generator, dtype=torch.uint8)
    heads = (
        torch.randn(2, outputs, inputs // group, generator=generator) * torch.logspace(-2, largest, outputs)[:, None]
    )
    steps, offsets = heads if wide else heads.half().float()
    return Groups(codes, steps, offsets if shifted else None, 0 if shifted else 2 ** (bits - 1))


def counted(weight: Groups, span: int) -> Groups:
    """The same, but its steps and offsets are multiples of units, one for `span` inputs."""
    generator, spans = torch.Generator().manual_seed(3), weight.shape[1] // span
    units = [torch.randn(weight.shape[0], spans, generator=generator).half().float() for _ in weight.heads]
    heads = []
    for unit in units:
        counts = torch.randint(-128, 128, weight.steps.shape, generator=generator).float()
        heads.append(counts * unit.repeat_interleave(counts.shape[1] // spans, 1))
    return Groups(weight.codes, heads[0], heads[1] if len(heads) == 2 else None, weight.zero, tuple(units))


def plain(weight: Tensor) -> cpu.Product:
    """Its product in float32: a channel behind the others has more digits than bfloat16."""
    return cpu.float_product(torch.cat((weight, torch.full((1, weight.shape[1]), 1 / 3).cumsum(1))), None)


def inputs_of(count: int, width: int) -> Tensor:
    """Rows of all sizes, with a chunk of zeros and a number that is far larger than the others."""
    x = torch.randn(count, width, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, count)[:, None]
    x[:, 0] *= 30
    x[1, :32] = 0.0
    return x


def check_all_rows(product: cpu.Product, x: Tensor, expected: Tensor) -> None:
    for rows in COUNTS:
        assert torch.equal(product(x[:rows]), expected[:rows]), rows
    assert torch.equal(product(torch.cat((x, x), dim=1)[:, x.shape[1] :]), expected)


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_the_bits_of_float32(kind: str, outputs: int, inputs: int) -> None:
    weight, bias = made(kind, outputs, inputs), torch.linspace(-1, 1, outputs)
    groups, x = found(weight), inputs_of(40, inputs)
    product = grouped_product(groups, bias)
    assert product.struct.bits == BITS[kind] and not product.struct.wide
    assert torch.equal(groups.dequantized(), weight)
    check_all_rows(product, x, plain(weight)(x)[:, :outputs] + bias)


@pytest.mark.parametrize(
    ("bits", "group", "shifted", "head"),
    pairwise([3, 4, 6, 8], [4, 16, 32, 64, 192], [False, True], ["half", "float", "multiple"]),
)
def test_groups_of_every_kind(bits: int, group: int, shifted: bool, head: str) -> None:
    groups, wide = drawn(bits, group, shifted, head == "float"), head == "float"
    if head == "multiple":
        groups = counted(groups, max(64, group))
    x, weight = inputs_of(40, 192), groups.dequantized()
    exact = x.double() @ weight.double().T
    products = {parts: grouped_product(groups, None, parts) for parts in (0, 1, 2)}
    kept = 4 if bits <= 4 else 6 if bits <= 6 and group % 8 == 0 else 8
    assert products[0].struct.wide == wide and products[0].struct.bits == kept
    assert bool(products[0].struct.span) == (head == "multiple")
    assert torch.equal(products[0].rows(torch.arange(70)), weight)
    assert torch.equal(products[0](x), plain(weight)(x)[:, :70])
    check_all_rows(products[0], x, products[0](x))
    # Half a level of the largest of 32 inputs, times the sizes of their weights; and float32's own rounding.
    chunk = min(group, 32) & -min(group, 32)
    largest = x.abs().view(40, -1, chunk).amax(2).repeat_interleave(chunk, 1).double()
    sizes = ((groups.codes.double() - groups.zero).abs() * groups.steps.repeat_interleave(group, 1).abs()).T
    shifts = 0.0 if groups.offsets is None else groups.offsets.double().repeat_interleave(group, 1).abs().T
    floats = 2e-6 * (x.double().abs() @ (sizes + shifts))
    for parts, levels in ((0, 1e12), (1, 127), (2, 32639)):
        assert ((products[parts](x) - exact).abs() <= largest / levels / 2 @ (sizes + shifts) + floats).all(), parts


@pytest.mark.parametrize("parts", [0, 1, 2])
@pytest.mark.parametrize(
    ("group", "steps", "used"),
    [(4, "half", 16), (16, "powers", 16), (32, "powers", 15), (32, "float", 9), (64, "half", 2)],
)
def test_few_codes_that_are_large_take_four_bits(group: int, steps: str, used: int, parts: Parts) -> None:
    """With the bits of the same weight in codes of 8 bits."""
    plainly = drawn(8, group, False, steps == "float")
    generator = torch.Generator().manual_seed(7)
    known = torch.randperm(256, generator=generator)[:used].to(torch.uint8)
    codes = known[torch.randint(used, plainly.codes.shape, generator=generator)]
    heads = 2.0 ** torch.randint(-126, 90, plainly.steps.shape, generator=generator)
    weight = Groups(codes, heads if steps == "powers" else plainly.steps, None, plainly.zero)
    short, whole = grouped_product(weight, None, parts), replace(weight)
    vars(whole)["table"] = None  # as if there were too many
    long, x = grouped_product(whole, None, parts), inputs_of(40, 192)
    assert (short.struct.bits, short.struct.named, long.struct.named) == (
        4,
        1,
        0,
    ) and 2 * short.bytes < long.bytes * 1.4
    assert short.struct.wide == {"half": 0, "float": 1, "powers": 2}[steps]
    check_all_rows(short, x, long(x))
    assert torch.equal(short.rows(torch.arange(70)), weight.dequantized())


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("kind", BITS)
def test_a_row_does_not_depend_on_its_company(kind: str, parts: Parts) -> None:
    bias = torch.linspace(-1, 1, 200)
    product, x = grouped_product(found(made(kind, 200, 1536)), bias, parts), inputs_of(40, 1536)
    check_all_rows(product, x, torch.cat([product(row[None]) for row in x]))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_an_input_that_is_no_number_gives_none(value: float) -> None:
    product, x = grouped_product(drawn(4, 32, True, False), None, 2), inputs_of(3, 192)
    x[1, 70] = value
    y = product(x)
    assert not y[1].isfinite().any() and y[[0, 2]].isfinite().all()


@pytest.mark.parametrize("kind", BITS)
def test_a_single_number_that_is_otherwise_has_no_groups(kind: str) -> None:
    weight = made(kind, 70, 64)
    for value in (torch.nextafter(weight[69, 63], torch.tensor(9.0)), torch.tensor(torch.nan), torch.tensor(torch.inf)):
        weight[69, 63] = value
        assert find_groups(weight) is None


def test_a_weight_is_rounded_to_the_nearest_line_of_sixteen_codes() -> None:
    weight = torch.randn(70, 192, generator=torch.Generator().manual_seed(6)) * torch.logspace(-2, 1, 70)[:, None]
    weight[1], weight[2] = 0.0, -0.25
    groups = rounded_to_4_bits(weight)
    assert groups is not None and groups.bits == 4 and multiples_of(groups) is not None
    parts = weight.view(70, -1, 32)
    steps = (parts.amax(2) - parts.amin(2)) / 15
    away = (groups.dequantized() - weight).view(parts.shape)
    assert away[1].count_nonzero() == 0 and away[2].abs().max() < 2e-3
    # A line through the extremes alone has an error of step^2 / 12.
    assert away.square().mean() < 0.95 * steps.square().mean() / 12
    assert away.abs().amax(2).div(steps.clamp(min=1e-9))[3:].max() < 2.5, "a unit's rounding is little of a step"
    x = inputs_of(max(COUNTS), 192)
    check_all_rows(grouped_product(groups, None), x, plain(groups.dequantized())(x)[:, :-1])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_a_number_that_no_code_can_hold_does_not_break_the_rounding(value: float) -> None:
    weight = torch.ones(40, 64)
    weight[3, 5] = value
    groups = rounded_to_4_bits(weight)
    assert groups is not None and torch.allclose(groups.dequantized()[4:], weight[4:], atol=2e-2)


def test_groups_that_do_not_end_with_the_row_are_none() -> None:
    assert find_groups(made("Q4_0", 70, 64)[:, :33]) is None


def test_neighbours_of_one_kind_lie_in_one_weight() -> None:
    first, second = drawn(4, 32, True, False), counted(drawn(6, 16, False, True, 33), 64)
    both = stacked([first, first, second])
    assert isinstance(both, Stack) and [len(part.codes) for part in both.parts] == [140, 33] and both.parts[1].units
    assert torch.equal(both.dequantized(), torch.cat([part.dequantized() for part in (first, first, second)]))
    alike = stacked([second, second])
    assert isinstance(alike, Groups) and alike.units[0].shape == (66, 3)
    assert torch.equal(alike.dequantized(), torch.cat([second.dequantized()] * 2))


@pytest.mark.parametrize("parts", [0, 1, 2])
def test_a_stack_has_the_products_of_its_parts(parts: Parts) -> None:
    weights = [drawn(4, 32, True, False), drawn(6, 16, False, True, 33), drawn(8, 4, False, True, 5)]
    both, x, bias = stacked(weights), inputs_of(40, 192), torch.linspace(-1, 1, 108)
    products = [
        grouped_product(weight, own, parts) for weight, own in zip(weights, bias.split([70, 33, 5]), strict=True)
    ]
    check_all_rows(grouped_product(both, bias, parts), x, torch.cat([product(x) for product in products], dim=1))


@pytest.mark.parametrize("span", [None, 64])
def test_a_part_of_a_weight_ends_with_its_groups(span: int | None) -> None:
    weight = drawn(4, 32, True, False)
    weight = weight if span is None else counted(weight, span)
    for piece in ((), (slice(3, 7),), (slice(None), slice(64, 128)), (slice(3, 7), slice(0, 192))):
        part = weight[piece]
        assert part is not None and torch.equal(part.dequantized(), weight.dequantized()[piece])
        assert bool(part.units) == bool(span)
    cut = weight[slice(None), slice(32, 96)]
    assert cut is not None and not cut.units and torch.equal(cut.dequantized(), weight.dequantized()[:, 32:96])
    assert weight[slice(None), slice(0, 48)] is None


@pytest.mark.parametrize("wide", [False, True], ids=["half", "wide"])
@pytest.mark.parametrize("shifted", [False, True], ids=["zero", "offsets"])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 32), (4, 4), (8, 16)])
def test_rows_are_those_of_the_weight(bits: int, group: int, shifted: bool, wide: bool) -> None:
    groups, ids = drawn(bits, group, shifted, wide), torch.tensor([69, 0, 31, 32, 15, 16, 0])
    product, weight = grouped_product(groups, None, 2), groups.dequantized()
    for one in (product, rows_apart(groups)):
        assert torch.equal(one.rows(ids), weight[ids])
        with pytest.raises(IndexError, match="places from 70 to 70 in a table of 70 rows"):
            one.rows(torch.tensor([70]))


@pytest.mark.parametrize("apart", [False, True], ids=["packed", "rows apart"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "Q8_0"])
def test_dots_have_the_bits_of_any_batch(kind: str, apart: bool) -> None:
    weight = torch.randn(70, 96, generator=torch.Generator().manual_seed(2))
    weight = weight if kind == "Q8_0" else weight.to(getattr(torch, kind)).float()
    stored = found(made(kind, 70, 96)) if kind == "Q8_0" else weight
    packed = grouped_product(stored, None) if isinstance(stored, Groups) else cpu.float_product(stored, None)
    product = rows_apart(stored) if apart else packed
    ids, x = torch.arange(69, 0, -2), inputs_of(5, 96)
    rows, scores = product.rows(ids), product.dots(x, ids)
    assert kind == "Q8_0" or torch.equal(rows, weight[ids])
    assert torch.allclose(scores, x @ rows.T, rtol=1e-4, atol=1e-3 * float(scores.abs().max()))
    for place, one in enumerate(ids):
        assert torch.equal(product.dots(x[2:3], one[None])[0], scores[2, place : place + 1])


@pytest.mark.parametrize("bits", [4, 6])
def test_threads_pack_what_one_thread_packs(bits: int) -> None:
    """Channels of a block share bytes, which threads that took turns in it would spoil; so packing is repeated."""
    weight, threads = drawn(bits, 16, False, False, outputs=64, inputs=1536), torch.get_num_threads()
    numbers = torch.arange(64)
    try:
        torch.set_num_threads(1)
        expected = grouped_product(weight, None).rows(numbers)
        torch.set_num_threads(4)  # a block is no multiple of their shares
        for _ in range(300):
            assert torch.equal(grouped_product(weight, None).rows(numbers), expected)
    finally:
        torch.set_num_threads(threads)
