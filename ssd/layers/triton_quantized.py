"""Triton kernels of products with packed weights: one multiplies by a share of the inputs, one adds the shares up.

A weight stays in integers, or FP8, up to the registers. There it becomes the type of x, which holds every code exactly.
Steps and offsets multiply sums in float32, so no number of a weight is rounded."""

from __future__ import annotations

import triton
import triton.language as tl

from ssd.layers.triton_kernels import follow


@triton.jit
def _numbers(
    words: tl.tensor, place: tl.constexpr, ZERO: tl.constexpr, BITS: tl.constexpr, E4M3: tl.constexpr
) -> tl.tensor:
    """Return the float32 number at one place of each word, less `ZERO`: two instructions for an integer."""
    if E4M3:
        # Move the fields of e4m3 to those of float32, where the exponent's bias is 127, not 7.
        byte = words << (24 - 8 * place)
        bits = (byte & -0x80000000) | ((byte >> 4) & 0x07F00000)
        number = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    else:
        # In the last of 2^23's 23 fraction bits a code is already a float: five codes of 4 bits fit there, two of 8.
        FIT: tl.constexpr = 20 // BITS
        SHIFT: tl.constexpr = place % FIT * BITS
        MASK: tl.constexpr = ((1 << BITS) - 1) << SHIFT
        DOWN: tl.constexpr = 1.0 / (1 << SHIFT)
        bits = ((words >> (place // FIT * FIT * BITS)) & MASK) | 0x4B000000
        number = bits.to(tl.float32, bitcast=True) * DOWN - (8388608.0 * DOWN + ZERO)
    return number


# Specialising on sizes would compile further variants while a request runs.
@triton.jit(do_not_specialize=["rows", "outputs", "inputs", "tiles", "share", "groups", "sums_a_group"])
def product_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    steps: tl.tensor,
    offsets: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    rows: int,
    outputs: int,
    inputs: int,
    x_stride: int,
    tiles: int,
    share: int,
    groups: int,
    sums_a_group: int,
    ZERO: tl.constexpr,
    BITS: tl.constexpr,
    E4M3: tl.constexpr,
    SHIFTED: tl.constexpr,
    BIASED: tl.constexpr,
    WHOLE: tl.constexpr,
    UNIT: tl.constexpr,
    SUMMED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr = False,
) -> None:
    """Multiply x [rows, inputs] by `share` of the `tiles` of a weight's inputs.

    Programs: (`BLOCK_M` rows, `BLOCK_N` outputs, split of the inputs). A tile has `UNIT` words of each output. Place p
    of its words has the codes of the tile's unit p, which is `UNIT` inputs. `SUMMED` units are added up before a step
    multiplies them; a group has `sums_a_group` such sums. `codes` int32 [blocks of outputs, tiles, BLOCK_N, UNIT],
    `steps` and `offsets` [blocks, groups, BLOCK_N]. `WHOLE`: there is one split, and `out` [rows, outputs] is the
    result; else `out` [splits, rows, outputs] are float32 parts. `WIDE`: multiply in float32, as the interpreter has no
    bfloat16."""
    UNITS: tl.constexpr = 32 // BITS
    follow(PDL)
    block = tl.program_id(1)
    split = tl.program_id(2)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, UNIT)
    used = (m < rows)[:, None]
    mine = x + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    stored = codes + (block.to(tl.int64) * tiles * BLOCK_N + n[:, None]) * UNIT + k[None, :]
    heads = block * groups * BLOCK_N + n
    first = split * share
    last = tl.minimum(first + share, tiles)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for tile in range(first, last):
        words = tl.load(stored + tile * (BLOCK_N * UNIT))
        for sum in tl.static_range(UNITS // SUMMED):
            part = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for place in tl.static_range(sum * SUMMED, sum * SUMMED + SUMMED):
                begin = (tile * UNITS + place) * UNIT
                row = tl.load(mine + begin, mask=used & (begin < inputs), other=0.0)
                if WIDE:
                    row = row.to(tl.float32)
                weight = _numbers(words, place, ZERO, BITS, E4M3).to(row.dtype)
                part = tl.dot(row, tl.trans(weight), part, input_precision="ieee")
                if SHIFTED:  # the row's sum by a product, whose additions have the same order in tiles of every size
                    ones = tl.full((UNIT, BLOCK_N), 1.0, row.dtype)
                    total = tl.dot(row, ones, total, input_precision="ieee")
            head = heads + (tile * (UNITS // SUMMED) + sum) // sums_a_group * BLOCK_N
            acc += part * tl.load(steps + head).to(tl.float32)[None, :]
            if SHIFTED:
                acc += total * tl.load(offsets + head).to(tl.float32)[None, :]
    output = block * BLOCK_N + n
    if WHOLE and BIASED:
        acc += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    results = out + (split.to(tl.int64) * rows + m)[:, None] * outputs + output[None, :]
    tl.store(results, acc.to(out.dtype.element_ty), mask=used & (output < outputs)[None, :])


@triton.jit(do_not_specialize=["rows", "outputs"])
def sum_kernel(
    parts: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    rows: int,
    outputs: int,
    BIASED: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
) -> None:
    """Add up the parts [SPLITS, rows, outputs] of `product_kernel`, in their order, and the bias.

    Programs: (row, `BLOCK` outputs)."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = output < outputs
    total = tl.load(parts + row * outputs + output, mask=inside, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(parts + (split * rows + row) * outputs + output, mask=inside, other=0.0)
    if BIASED:
        total += tl.load(bias + output, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + output, total.to(out.dtype.element_ty), mask=inside)
