"""Triton kernels that adjust logits (`ssd.execution.adjustments`) and note outcomes (`ssd.kernels.rounds`).

No product is fused with a sum and division rounds as on a CPU, so the bits are those of torch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssd.kernels.rounds import RowLayout

_BLOCK, _WARPS = 1024, 4


@triton.jit
def adjust_kernel(
    logits: tl.tensor,
    starts: tl.tensor,
    sequences: tl.tensor,
    ids: tl.tensor,
    words: tl.tensor,
    text: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    stride: int,
    rows: int,
    size: int,
    NUMBERS: tl.constexpr,
    RECENT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = at < size
    r = tl.arange(0, BLOCK_R)
    stops = tl.load(starts + 1 + r, mask=r < rows, other=2147483647)
    row = tl.sum((stops <= token).to(tl.int32), 0)
    begin = tl.load(starts + row).to(tl.int32)
    slot = tl.load(sequences + row).to(tl.int64)
    mine = words + slot * (NUMBERS + RECENT)
    value = tl.load(logits + token.to(tl.int64) * stride + at, mask=held, other=0.0).to(tl.float32)
    if tl.load(mine + 4) > 0:
        added = tl.load(bias + slot * size + at, mask=held, other=0.0)
        value = tl.where(added == float("-inf"), float("-inf"), value + added)
        told = tl.load(text + slot * size + at, mask=held, other=0)
        count, until = told >> 2, tl.load(mine + 3) - (token - begin)
        for index in range(0, RECENT):
            recent = tl.load(mine + NUMBERS + index)
            count += (at == recent).to(tl.int32)
            until -= (recent >= 0).to(tl.int32)
        for index in range(begin + 1, token + 1):
            count += (at == tl.load(ids + index)).to(tl.int32)
        value = tl.where(((told & 2) > 0) & (until > 0), float("-inf"), value)
        repetition = tl.load(mine).to(tl.float32, bitcast=True)
        presence = tl.load(mine + 1).to(tl.float32, bitcast=True)
        frequency = tl.load(mine + 2).to(tl.float32, bitcast=True)
        written = (count > 0).to(tl.float32)
        scaled = tl.where(value > 0, tl.div_rn(value, tl.zeros([BLOCK], tl.float32) + repetition), value * repetition)
        value = tl.where((count > 0) | ((told & 1) > 0), scaled, value)
        value = value - frequency * count.to(tl.float32)
        value = value - presence * written
    tl.store(out + token.to(tl.int64) * size + at, value, mask=held)


def adjust(
    logits: Tensor,
    starts: Tensor,
    sequences: Tensor,
    ids: Tensor,
    words: Tensor,
    text: Tensor,
    bias: Tensor,
    recent: int = 16,
) -> Tensor:
    count, size = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    out = torch.empty(count, size, dtype=torch.float32, device=logits.device)
    adjust_kernel[count, triton.cdiv(size, _BLOCK)](
        logits, starts, sequences, ids, words, text, bias, out, logits.stride(0), len(sequences), size,
        NUMBERS=words.shape[1] - recent, RECENT=recent, BLOCK_R=triton.next_power_of_2(len(sequences)), BLOCK=_BLOCK,
        num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit
def recent_kernel(
    rows: tl.tensor,
    decided: tl.tensor,
    words: tl.tensor,
    row_words: int,
    WORDS: tl.constexpr,
    AT: tl.constexpr,
    NUMBERS: tl.constexpr,
    IDS: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> None:
    mine = rows + tl.program_id(0) * row_words
    outcome = decided + tl.program_id(0) * (3 + MOST)
    m = tl.arange(0, BLOCK_M)
    accepted = tl.load(outcome)
    drafts = tl.load(mine + IDS + m, mask=m < MOST, other=-1)
    found = tl.where(m < accepted, drafts, tl.where(m == accepted, tl.load(outcome + 1), -1))
    slot, active = tl.load(mine + NUMBERS), tl.load(mine + NUMBERS + 6)
    tl.store(words + slot * WORDS + AT + m, found.to(tl.int32), mask=(m <= MOST) & (active > 0))


def note_outcomes(rows: Tensor, decided: Tensor, words: Tensor, at: int, row: RowLayout) -> None:
    recent_kernel[(len(rows),)](
        rows,
        decided,
        words,
        rows.stride(0),
        WORDS=words.shape[1],
        AT=at,
        NUMBERS=row.numbers,
        IDS=row.ids,
        MOST=row.most,
        BLOCK_M=triton.next_power_of_2(row.most + 1),
        num_warps=1,
    )
