"""Triton kernels for the work between two products. Each replaces three to six launches of torch.

A row, or a head of a row, has a program of its own, so its result has the same bits in any batch. Sums are in float32;
what torch rounds between two operations is rounded here, too."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssd.kernels.gpu import launch_options
from ssd.layers.triton_kernels import follow, to_fp8

_BLOCK = 1024


@triton.jit
def norm_kernel(
    x: tl.tensor,
    added: tl.tensor,
    behind: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    behind_least: float,
    least: float,
    x_stride: int,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDED: tl.constexpr,
    BEHIND: tl.constexpr,
    PDL: tl.constexpr = False,
) -> None:
    """Compute out = t / sqrt(sum(t^2) + least) * weight for each row t of x, or of x + added.

    The sum x + added goes to `total`. With `BEHIND`, `added` is first normed by weight `behind`."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    held = at < SIZE
    scale = tl.load(weight + at, mask=held, other=0.0)
    follow(PDL)
    numbers = tl.load(x + row * x_stride + at, mask=held, other=0.0)
    if ADDED:
        more = tl.load(added + row * SIZE + at, mask=held, other=0.0)
        if BEHIND:
            wide = more.to(tl.float32)
            length = tl.sqrt(tl.sum(wide * wide, 0) + behind_least)
            more = (wide / length * tl.load(behind + at, mask=held, other=0.0)).to(numbers.dtype)
        numbers = (numbers.to(tl.float32) + more.to(tl.float32)).to(numbers.dtype)
        tl.store(total + row * SIZE + at, numbers, mask=held)
    wide = numbers.to(tl.float32)
    length = tl.sqrt(tl.sum(wide * wide, 0) + least)
    scaled = wide / length * scale
    tl.store(out + row * SIZE + at, scaled.to(out.dtype.element_ty), mask=held)


Norm = tuple[Tensor, float]
"""(weight float32 [size], least) of t / sqrt(sum(t^2) + least) * weight."""


def rms_norm(x: Tensor, norm: Norm, added: Tensor | None = None, behind: Norm | None = None) -> tuple[Tensor, Tensor]:
    """Return the rows t = x [..., size], or x + added, or x + the norm `behind` of added; and the norm of t."""
    weight, least = norm
    size = weight.shape[0]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.contiguous().view(-1, size)
    total = out if added is None else torch.empty_like(out)
    norm_kernel[(rows.shape[0],)](
        rows,
        rows if added is None else added.contiguous(),
        weight if behind is None else behind[0],
        weight,
        total,
        out,
        0.0 if behind is None else behind[1],
        least,
        rows.stride(0),
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        ADDED=added is not None,
        BEHIND=behind is not None,
        num_warps=4 if size <= 4096 else 8,
        **launch_options(x.device),
    )
    return x if added is None else total, out


@triton.jit
def gate_kernel(
    gate_up: tl.tensor,
    out: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
    PDL: tl.constexpr = False,
) -> None:
    """Compute out = act(gate) * up for a block of a row of (gate, up) [2 * SIZE]; act is SiLU, or GELU by tanh."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = at < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + at, mask=held, other=0.0)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + at, mask=held, other=0.0)
    wide = gate.to(tl.float32)
    if GELU:
        # 0.5 (1 + tanh(z)) = 1 / (1 + exp(-2 z)), z = sqrt(2 / pi) (x + 0.044715 x^3)
        acted = wide / (1.0 + tl.exp(-1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)))
    else:
        acted = wide / (1.0 + tl.exp(-wide))
    acted = acted.to(gate.dtype).to(tl.float32)
    tl.store(out + row * SIZE + at, (acted * up.to(tl.float32)).to(out.dtype.element_ty), mask=held)


def gated(gate_up: Tensor, gelu: bool = False) -> Tensor:
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    grid, options = (rows, triton.cdiv(size, _BLOCK)), launch_options(out.device)
    gate_kernel[grid](gate_up.contiguous(), out, SIZE=size, BLOCK=_BLOCK, GELU=gelu, num_warps=4, **options)
    return out


@triton.jit(do_not_specialize_on_alignment=["slots"])  # a column of a batch
def turn_kernel(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    least: float,
    x_stride: int,
    kv_stride: int,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TURNED: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
    FP8: tl.constexpr,
    PDL: tl.constexpr = False,
) -> None:
    follow(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    held = at < DIM
    from_ = x + token * x_stride + head * DIM
    numbers = tl.load(from_ + at, mask=held, other=0.0)
    slot = tl.load(slots + token).to(tl.int64)
    if head >= HEADS + KV_HEADS:
        value = numbers
        if FP8:
            value = to_fp8(numbers.to(tl.float32))
        tl.store(values + slot * kv_stride + (head - HEADS - KV_HEADS) * DIM + at, value, mask=held)
        return
    # Number i is paired with number i + TURNED / 2.
    turns = at < TURNED
    pair = tl.where(turns, (at + TURNED // 2) % TURNED, at)
    others = tl.load(from_ + pair, mask=held, other=0.0)
    if NORMED:
        wide = numbers.to(tl.float32)
        length = tl.sqrt(tl.sum(wide * wide, 0) + least)
        weight = k_weight
        if head < HEADS:
            weight = q_weight
        own = tl.load(weight + at, mask=held, other=0.0)
        theirs = tl.load(weight + pair, mask=held, other=0.0)
        others = (others.to(tl.float32) / length * theirs).to(numbers.dtype)
        numbers = (wide / length * own).to(numbers.dtype)
    c = tl.load(cos + token * TURNED + at, mask=turns, other=1.0).to(tl.float32)
    s = tl.load(sin + token * TURNED + at, mask=turns, other=0.0).to(tl.float32)
    turned = (numbers.to(tl.float32) * c + others.to(tl.float32) * s).to(numbers.dtype)
    if head < HEADS:
        tl.store(q + (token * HEADS + head) * DIM + at, turned, mask=held)
    else:
        key = turned
        if FP8:
            key = to_fp8(turned.to(tl.float32))
        tl.store(keys + slot * kv_stride + (head - HEADS) * DIM + at, key, mask=held)


def turn(
    projected: Tensor,
    kv_heads: int,
    table: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor] | None,
    least: float,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
) -> Tensor:
    """Return the rotated queries [n, heads, dim] of `projected` [n, heads + 2 * kv_heads, dim].

    Rotated keys and values go to `slots` int64 [n] of `keys` and `values` [slots, kv_heads, dim], maybe in FP8.
    `table`: cosines and signed sines [n, 1, turned]. `norms`, weights float32 [dim] for queries and keys, norm heads
    first."""
    n, every, dim = projected.shape
    heads = every - 2 * kv_heads
    q = torch.empty(n, heads, dim, dtype=projected.dtype, device=projected.device)
    q_weight, k_weight = norms or (q, q)
    turn_kernel[(n, every)](
        projected,
        *table,
        q_weight,
        k_weight,
        q,
        keys,
        values,
        slots,
        least,
        projected.stride(0),
        keys.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        TURNED=table[0].shape[-1],
        BLOCK=triton.next_power_of_2(dim),
        NORMED=norms is not None,
        FP8=keys.dtype == torch.uint8,
        num_warps=1,
        **launch_options(q.device),
    )
    return q
