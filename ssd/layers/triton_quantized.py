"""Triton kernels of products with packed weights: one multiplies by a share of the inputs, one adds the shares up.

Integers, or FP8, become the type of x in registers, which holds every code exactly. Steps and offsets multiply sums in
float32, so no number of a weight is rounded."""

from __future__ import annotations

import triton
import triton.language as tl

from ssd.layers.triton_kernels import follow


@triton.jit
def _pairs(bits: tl.tensor, mask: int, more: tl.tensor, factor: int, shift: tl.tensor, HALF: tl.constexpr) -> tl.tensor:
    """Return ((bits & mask) | more) * factor + shift, rounded once, for the two floats of 16 bits in each int32."""
    KIND: tl.constexpr = "f16x2" if HALF else "bf16x2"
    ASM: tl.constexpr = "{.reg .b32 t; lop3.b32 t, $1, $2, $3, 0xEA; fma.rn." + KIND + " $0, t, $4, $5;}"
    return tl.inline_asm_elementwise(ASM, "=r,r,r,r,r,r", [bits, mask, more, factor, shift], tl.int32, True, 1)


@triton.jit
def _numbers(
    words: tl.tensor, place: tl.constexpr, ZERO: tl.constexpr, BITS: tl.constexpr, E4M3: tl.constexpr, to: tl.constexpr
) -> tl.tensor:
    """Return the numbers less `ZERO` at one place of words [n, w], laid by `_packed`: [n, 2 w], exact in type `to`."""
    HALF: tl.constexpr = to == tl.float16
    if E4M3:
        # The exponent's bias is 7; it is 127 in bfloat16 and float32, 15 in float16.
        MASK: tl.constexpr = -0x7F0F7F10 if place else -0x780F7810
        more = ((words >> 4) & 0x07000700) if place else 0
        words = words << 4 * place
        bits = (words & MASK) | more
        if to == tl.bfloat16:
            pairs = _pairs(words, MASK, more, 0x7B807B80, -0x7FFF8000, HALF)  # times 2^120, plus -0
        elif HALF:
            pairs = _pairs((bits & 0x07F007F0) << 3, -1, bits & -0x7FFF8000, 0x5C005C00, -0x7FFF8000, HALF)  # 2^8
        else:
            low = (bits << 16).to(tl.float32, bitcast=True) * 1.329227995784916e36
            high = (bits & -0x10000).to(tl.float32, bitcast=True) * 1.329227995784916e36
    else:
        # In the last fraction bits of 1024 (float16) or 128 (bfloat16) a code is a float already.
        CODE: tl.constexpr = ((1 << BITS) - 1) * 0x10001
        bits = words >> place * BITS
        if HALF:
            pairs = _pairs(bits, CODE, 0x64006400, 0x3C003C00, (0xE400 + ZERO) * 0x10001 - 0x100000000, HALF)
        elif to == tl.bfloat16 and BITS == 4:
            pairs = _pairs(bits, CODE, 0x43004300, 0x3F803F80, (0xC300 + ZERO) * 0x10001 - 0x100000000, HALF)
        elif to == tl.bfloat16:  # an eighth bit falls into the exponent: 128 becomes 256
            shift = (0xC380 + ZERO // 2) * 0x10001 - 0x100000000  # -256 - ZERO
            top = _pairs(bits, 0x00800080, 0x43004300, 0x3F803F80, shift, HALF)
            pairs = _pairs(bits, 0x007F007F, 0x43004300, 0x3F803F80, top, HALF)
        else:
            low = (bits & CODE & 0xFFFF).to(tl.float32) - ZERO
            high = ((bits & CODE) >> 16).to(tl.float32) - ZERO
    if to != tl.float32:
        low = pairs.to(tl.int16).to(to, bitcast=True)
        high = (pairs >> 16).to(tl.int16).to(to, bitcast=True)
    return tl.reshape(tl.join(low, high), (words.shape[0], 2 * words.shape[1]))


# Specialising on sizes would compile further variants while a request runs.
@triton.jit(do_not_specialize=["rows", "outputs", "inputs", "tiles", "share", "groups"])
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
    ZERO: tl.constexpr,
    BITS: tl.constexpr,
    E4M3: tl.constexpr,
    SHIFTED: tl.constexpr,
    BIASED: tl.constexpr,
    WHOLE: tl.constexpr,
    UNIT: tl.constexpr,
    SUMMED: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr = False,
) -> None:
    """Multiply x [rows, inputs] by `share` of the `tiles` of a weight's inputs.

    Programs: (`BLOCK_M` rows, `BLOCK_N` outputs, split of the inputs). A tile has `UNIT` / 2 words of each output;
    place p in their halves has the codes of the tile's unit p: `UNIT` inputs. `SUMMED` units are added up before a step
    multiplies them; a group has `SUMS` such sums. `codes` int32 [blocks of outputs, tiles, BLOCK_N, UNIT / 2], `steps`
    and `offsets` [blocks, groups, BLOCK_N]. `WHOLE`: `out` [rows, outputs] is the result; else `out` [splits, rows,
    outputs] are float32 parts. `WIDE`: in float32, as the interpreter knows no PTX.

    The weight is the left operand: tensor cores take 16 of its outputs at a time, and 8 rows of the right one."""
    UNITS: tl.constexpr = 16 // BITS
    follow(PDL)
    block = tl.program_id(1)
    split = tl.program_id(2)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, UNIT)
    used = (m < rows)[:, None]
    mine = x + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    word = tl.arange(0, UNIT // 2)
    stored = codes + (block.to(tl.int64) * tiles * BLOCK_N + n[:, None]) * (UNIT // 2) + word[None, :]
    heads = block * groups * BLOCK_N + n
    first = split * share
    last = tl.minimum(first + share, tiles)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for tile in range(first, last):
        words = tl.load(stored + tile * (BLOCK_N * UNIT // 2))
        for sum in tl.static_range(UNITS // SUMMED):
            part = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for place in tl.static_range(sum * SUMMED, sum * SUMMED + SUMMED):
                begin = (tile * UNITS + place) * UNIT
                row = tl.load(mine + begin, mask=used & (begin < inputs), other=0.0)
                if WIDE:
                    row = row.to(tl.float32)
                weight = _numbers(words, place, ZERO, BITS, E4M3, row.dtype)
                part = tl.dot(weight, tl.trans(row), part, input_precision="ieee")
                if SHIFTED:  # the row's sum by a product, whose additions have the same order in tiles of every size
                    ones = tl.full((BLOCK_N, UNIT // 2), 1.0, row.dtype)
                    ones = tl.reshape(tl.join(ones, ones), (BLOCK_N, UNIT))  # joined, it shares x's layout
                    total = tl.dot(ones, tl.trans(row), total, input_precision="ieee")
            head = heads + (tile * (UNITS // SUMMED) + sum) // SUMS * BLOCK_N
            acc += part * tl.load(steps + head).to(tl.float32)[:, None]
            if SHIFTED:
                acc += total * tl.load(offsets + head).to(tl.float32)[:, None]
    output = block * BLOCK_N + n
    if WHOLE and BIASED:
        acc += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[:, None]
    results = out + (split.to(tl.int64) * rows + m)[None, :] * outputs + output[:, None]
    tl.store(results, acc.to(out.dtype.element_ty), mask=(m < rows)[None, :] & (output < outputs)[:, None])


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
    """Add up the parts [SPLITS, rows, outputs] of `product_kernel`, in their order, and the bias."""
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
