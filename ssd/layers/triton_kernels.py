"""Triton kernels of paged attention: one attends to a split of the keys, one merges the splits.

Exponentials are powers of two, exp(x) = exp2(x log2 e), as the hardware computes those."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def follow(PDL: tl.constexpr) -> None:
    """Wait until the previous kernels have ended, and let the next one start up (programmatic dependent launch).

    Called before a kernel with `launch_pdl` touches anything but weights, and before it returns: the next kernel relies
    on this one having waited for the others."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def of_fp8(byte: tl.tensor) -> tl.tensor:
    """Convert FP8 (e4m3) in uint8 to float32: move its fields to those of float32, whose bias is 127, not 7."""
    word = byte.to(tl.int32)
    bits = ((word & 0x80) << 24) | ((word & 0x7F) << 20)
    number = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return tl.where((word & 0x7F) == 0x7F, float("nan"), number)


@triton.jit
def to_fp8(x: tl.tensor) -> tl.tensor:
    """Round float32 to the nearest FP8 (e4m3) in uint8, on a tie to even; magnitudes are cut to 448."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    held = tl.minimum(size, 0x43E00000)  # 448
    normal = ((held + 0x7FFFF + ((held >> 20) & 1)) >> 20) - 960  # 3 bits behind the point; the bias 127 becomes 7
    # Added to 2^14, a number below 2^-6 is rounded to whole 2^-9.
    small = (held.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(held < 0x3C800000, small, normal)
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


# Specialising on these would compile further variants while a request runs.
@triton.jit(
    do_not_specialize=["window", "queries", "table_stride", "blocks", "splits", "chunk"],
    do_not_specialize_on_alignment=["seen", "positions"],  # columns of a batch: their offsets depend on its size
)
def attend_kernel(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    out: tl.tensor,
    totals: tl.tensor,
    table: tl.tensor,
    sequences: tl.tensor,
    starts: tl.tensor,
    seen: tl.tensor,
    positions: tl.tensor,
    scale: float,
    softcap: float,
    window: int,
    queries: int,
    q_stride: int,
    q_head_stride: int,
    kv_stride: int,
    table_stride: int,
    blocks: int,
    splits: int,
    chunk: int,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDE: tl.constexpr,
    FP8: tl.constexpr,
    PDL: tl.constexpr = False,
) -> None:
    """Attend with a block of a row's queries, those that share a key head, to one split of the row's keys.

    Programs: (row x `blocks` of queries, key head, split of `splits`). `WHOLE`: there is one split, `out` [queries,
    HEADS, DIM] is the result and `totals` [queries, HEADS] the log-sum-exp. Else `out` [splits, queries, HEADS, DIM]
    are normalised float32 parts, and `totals` [splits, queries, HEADS] the log2 of their sums. A split has `chunk`
    times `BLOCK_N` keys, or, if that is 0, an equal part of the visible keys. `WIDE`: in float32, as the interpreter
    has no bfloat16."""
    LOG2E: tl.constexpr = 1.4426950408889634
    follow(PDL)
    row = tl.program_id(0) // blocks
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    first_token = tl.load(starts + row) + (tl.program_id(0) % blocks) * TOKENS
    stop_token = tl.load(starts + row + 1)
    if first_token >= stop_token:
        return

    m = tl.arange(0, BLOCK_M)
    token = first_token + m // GROUP
    head = kv_head * GROUP + m % GROUP
    used = (m < TOKENS * GROUP) & (token < stop_token)
    sees = tl.load(seen + token, mask=used, other=0).to(tl.int32)
    last = tl.max(sees, 0)
    behind = tl.zeros((BLOCK_M,), tl.int32)  # number of keys before the window of a query
    begin = last * 0
    if WINDOWED:
        behind = tl.load(positions + token, mask=used, other=0).to(tl.int32) + 1 - window
        begin = tl.maximum(tl.min(tl.where(used, behind, last), 0), 0) // BLOCK_N * BLOCK_N
    share = tl.cdiv(tl.cdiv(tl.maximum(last - begin, 0), splits), BLOCK_N)
    share = tl.where(chunk > 0, chunk, share) * BLOCK_N
    stop = tl.where(chunk > 0, 0, begin) + (split + 1) * share
    low = tl.maximum(stop - share, begin)
    high = tl.minimum(stop, last)

    token = token.to(tl.int64)
    result = (split * queries + token) * HEADS + head
    if not WHOLE:  # noqa: SIM102 - known to the compiler, while the inner condition is evaluated at run time
        if low >= high:
            tl.store(totals + result, tl.full((BLOCK_M,), float("-inf"), tl.float32), mask=used)
            return

    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    real = used[:, None] & (d < DIM)[None, :]
    query = tl.load(q + (token * q_stride + head * q_head_stride)[:, None] + d[None, :], mask=real, other=0.0)
    if WIDE:
        query = query.to(tl.float32)
    pages = table + tl.load(sequences + row).to(tl.int64) * table_stride
    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(low, high, BLOCK_N):
        key = start + n
        inside = key < high
        page = tl.load(pages + key // PAGE, mask=inside, other=0).to(tl.int64)
        place = (page * PAGE + key % PAGE) * kv_stride + kv_head * DIM
        held = inside[:, None] & (d < DIM)[None, :]
        k = tl.load(keys + place[:, None] + d[None, :], mask=held, other=0.0)
        v = tl.load(values + place[:, None] + d[None, :], mask=held, other=0.0)
        if FP8:
            k, v = of_fp8(k).to(q.dtype.element_ty), of_fp8(v).to(q.dtype.element_ty)
        if WIDE:
            k = k.to(tl.float32)
        scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
        if CAPPED:
            # tanh(x) = 1 - 2 / (1 + exp(2 x))
            scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 * LOG2E / softcap))))
        scores *= LOG2E
        visible = inside[None, :] & (key[None, :] < sees[:, None])
        if WINDOWED:
            visible = visible & (key[None, :] >= behind[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        origin = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: -inf - -inf is NaN
        fade = tl.exp2(highest - origin)
        p = tl.exp2(scores - origin[:, None])
        weight = weight * fade + tl.sum(p, 1)
        p = p.to(v.dtype)
        if WIDE:
            p = p.to(tl.float32)
            v = v.to(tl.float32)
        acc = tl.dot(p, v, acc * fade[:, None], input_precision="ieee")
        highest = higher

    some = weight > 0
    acc = acc / tl.where(some, weight, 1.0)[:, None]
    total = tl.where(some, highest + tl.log2(tl.where(some, weight, 1.0)), float("-inf"))
    if WHOLE:
        total = total / LOG2E
    tl.store(totals + result, total, mask=used)
    tl.store(out + result[:, None] * DIM + d[None, :], acc.to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["results", "splits"])
def merge_kernel(
    parts: tl.tensor,
    part_totals: tl.tensor,
    out: tl.tensor,
    totals: tl.tensor,
    results: int,
    splits: int,
    DIM: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr = False,
) -> None:
    """Merge the parts [splits, results, DIM] of `attend_kernel` by their totals, into one softmax.

    A program for each of the `results` (queries x heads) reads `BLOCK_S` of at most `MOST` parts at a time. Parts whose
    total is -inf were not written."""
    LOG2E: tl.constexpr = 1.4426950408889634
    follow(PDL)
    result = tl.program_id(0).to(tl.int64)
    every = tl.arange(0, MOST)
    each = tl.load(part_totals + every.to(tl.int64) * results + result, mask=every < splits, other=float("-inf"))
    highest = tl.max(each, 0)
    origin = tl.where(highest == float("-inf"), 0.0, highest)
    weight = tl.sum(tl.exp2(each - origin), 0)
    divisor = tl.where(weight > 0, weight, 1.0)
    d = tl.arange(0, BLOCK_D)
    merged = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
    for start in range(0, splits, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        where = s.to(tl.int64) * results + result
        own = tl.load(part_totals + where, mask=s < splits, other=float("-inf"))
        held = (own > float("-inf"))[:, None] & (d < DIM)[None, :]
        part = tl.load(parts + where[:, None] * DIM + d[None, :], mask=held, other=0.0)
        merged += part * tl.exp2(own - origin)[:, None]
    numbers = tl.sum(merged, 0) / divisor
    tl.store(out + result * DIM + d, numbers.to(out.dtype.element_ty), mask=d < DIM)
    total = tl.where(weight > 0, (origin + tl.log2(divisor)) / LOG2E, float("-inf"))
    tl.store(totals + result, total)
