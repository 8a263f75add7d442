"""Triton kernels that draw tokens: the noise of `ssd.speculation.noise`, and the largest of logits over temperature
plus noise, in one pass over the logits.

They use no logarithm of a library, and no product is fused with a sum: the bits of noise and scores are the same in all
of these kernels, whatever the shape, and so is what they draw."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _WARPS = 2048, 4
_EXACT = {"num_warps": _WARPS, "enable_fp_fusion": False}


@triton.jit
def _mixed(x: tl.tensor) -> tl.tensor:
    """MurmurHash3's 32-bit finaliser (Appleby, public domain) on uint32."""
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _logarithm(x: tl.tensor) -> tl.tensor:
    """ln x within two units in the last place, of positive float32 that are not denormal.

    The exponent times ln 2, and a polynomial on sqrt 1/2 to sqrt 2 (Cephes' logf)."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    n = exponent.to(tl.float32)
    m = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    y = m * 7.0376836292e-2 - 1.1514610310e-1
    y = y * m + 1.1676998740e-1
    y = y * m - 1.2420140846e-1
    y = y * m + 1.4249322787e-1
    y = y * m - 1.6668057665e-1
    y = y * m + 2.0000714765e-1
    y = y * m - 2.4999993993e-1
    y = y * m + 3.3333331174e-1
    square = m * m
    y = y * m * square + n * -2.12194440e-4 - 0.5 * square
    return m + y + n * 0.693359375


@triton.jit
def _gumbel(ids: tl.tensor, low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """Gumbel noise -ln E, E = -ln(1 - u), of 31 bits u for each of the token `ids` int32.

    E keeps its resolution near 0: for y = 1 - u as it is rounded, ln y / (1 - y) hardly differs from E / u (Kahan)."""
    lanes = _mixed(ids.to(tl.uint32) * 0x9E3779B1 + low.to(tl.uint32)) ^ high.to(tl.uint32)
    drawn = ((_mixed(lanes) & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10
    u = tl.minimum(drawn, 0.99999994)
    y = 1.0 - u
    e = tl.where(y == 1.0, u, -_logarithm(y) * (u / tl.where(y == 1.0, 1.0, 1.0 - y)))
    return -_logarithm(e)


@triton.jit
def noise_kernel(
    keys: tl.tensor, ids: tl.tensor, out: tl.tensor, first: int, size: int, LISTED: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """The noise of a block of a row's tokens: those of `ids`, or from `first` on."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = at < size
    token = first + at
    if LISTED:
        token = tl.load(ids + at, mask=held, other=0).to(tl.int32)
    noise = _gumbel(token, tl.load(keys + 2 * row), tl.load(keys + 2 * row + 1))
    tl.store(out + row * size + at, noise, mask=held)


def gumbels(keys: Tensor, size: int, first: int = 0, ids: Tensor | None = None) -> Tensor:
    """Noise float32 [n, size] for keys int32 [n, 2]: of the token ids from `first` on, or of `ids` int64 [size]."""
    keys = keys.contiguous()
    out = torch.empty(len(keys), size, dtype=torch.float32, device=keys.device)
    noise_kernel[len(keys), triton.cdiv(size, _BLOCK)](
        keys, keys if ids is None else ids, out, first, size, LISTED=ids is not None, BLOCK=_BLOCK, **_EXACT
    )
    return out


@triton.jit
def _scores(
    logits: tl.tensor,
    keys: tl.tensor,
    inverse: tl.tensor,
    ids: tl.tensor,
    row: tl.tensor,
    at: tl.tensor,
    held: tl.tensor,
    stride: int,
    LISTED: tl.constexpr,
    WARM: tl.constexpr,
) -> tl.tensor:
    """Logits of a row, times `inverse` plus noise where that is above 0; -inf where none are held."""
    scores = tl.load(logits + row * stride + at, mask=held, other=float("-inf")).to(tl.float32)
    if WARM:
        token = at
        if LISTED:
            token = tl.load(ids + at, mask=held, other=0).to(tl.int32)
        warmth = tl.load(inverse + row)
        noise = _gumbel(token, tl.load(keys + 2 * row), tl.load(keys + 2 * row + 1))
        scores = tl.where(warmth > 0.0, scores * warmth + noise, scores)
    return scores


@triton.jit
def best_kernel(
    logits: tl.tensor,
    keys: tl.tensor,
    inverse: tl.tensor,
    values: tl.tensor,
    places: tl.tensor,
    stride: int,
    size: int,
    blocks: int,
    WARM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The largest score of a block of a row, and the lowest token that has it; NaN if the block holds one."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = at < size
    scores = _scores(logits, keys, inverse, keys, row, at, held, stride, False, WARM)
    bad = tl.max((scores != scores).to(tl.int32), 0)
    largest = tl.max(tl.where(scores != scores, float("-inf"), scores), 0)
    place = tl.min(tl.where(held & (scores == largest), at, size), 0)
    out = row * blocks + tl.program_id(1)
    tl.store(values + out, tl.where(bad > 0, float("nan"), largest))
    tl.store(places + out, place)


@triton.jit
def last_kernel(
    values: tl.tensor, places: tl.tensor, out: tl.tensor, blocks: int, size: int, BLOCK: tl.constexpr
) -> None:
    """The token of a row by what `best_kernel` found; -1 if its largest score is no finite number, or one is a NaN."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    held = at < blocks
    found = tl.load(values + row * blocks + at, mask=held, other=float("-inf"))
    token = tl.load(places + row * blocks + at, mask=held, other=0)
    bad = tl.max((found != found).to(tl.int32), 0)
    largest = tl.max(tl.where(found != found, float("-inf"), found), 0)
    first = tl.min(tl.where(held & (found == largest), token, size), 0)
    sound = (bad == 0) & (largest > float("-inf")) & (largest < float("inf"))
    tl.store(out + row, tl.where(sound, first, -1).to(tl.int64))


def draw(logits: Tensor, keys: Tensor | None = None, inverse: Tensor | None = None) -> Tensor:
    """The token int64 [n] with the largest score of each row of logits [n, V], the lowest one on a tie; -1 for a row
    with a NaN or without a finite largest score.

    Scores are the logits, or where `inverse` temperatures float32 [n] are above 0 their product plus the noise of
    `keys` int32 [n, 2]."""
    (rows, size), blocks = logits.shape, triton.cdiv(logits.shape[1], _BLOCK)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    values = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    places = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    warm = keys is not None and inverse is not None
    own = (keys.contiguous(), inverse) if keys is not None and inverse is not None else (places, values)
    best_kernel[rows, blocks](
        logits, *own, values, places, logits.stride(0), size, blocks, WARM=warm, BLOCK=_BLOCK, **_EXACT
    )
    last_kernel[(rows,)](values, places, tokens, blocks, size, BLOCK=triton.next_power_of_2(blocks), num_warps=_WARPS)
    return tokens


@triton.jit
def warm_kernel(
    logits: tl.tensor,
    keys: tl.tensor,
    inverse: tl.tensor,
    ids: tl.tensor,
    out: tl.tensor,
    stride: int,
    size: int,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The scores of a block of a row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = at < size
    scores = _scores(logits, keys, inverse, ids, row, at, held, stride, LISTED, True)
    tl.store(out + row * size + at, scores, mask=held)


def warmed(logits: Tensor, keys: Tensor, inverse: Tensor, ids: Tensor | None = None) -> Tensor:
    """The scores float32 [n, V] of `draw`, of logits whose tokens are `ids` int64 [V], or 0 to V - 1."""
    rows, size = logits.shape
    logits, keys = logits if logits.stride(1) == 1 else logits.contiguous(), keys.contiguous()
    out = torch.empty(rows, size, dtype=torch.float32, device=logits.device)
    warm_kernel[rows, triton.cdiv(size, _BLOCK)](
        logits,
        keys,
        inverse,
        keys if ids is None else ids,
        out,
        logits.stride(0),
        size,
        LISTED=ids is not None,
        BLOCK=_BLOCK,
        **_EXACT,
    )
    return out
