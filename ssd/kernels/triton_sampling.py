"""Triton kernels that draw tokens: the noise of `ssd.speculation.noise`, filters, and the largest score.

A score is a logit over temperature plus noise. Scores have the same bits in all of these kernels and for any shape: the
kernels use no logarithm of a library and fuse no product with a sum."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssd.kernels.gpu import Draws
from ssd.law import DRAWN

_BLOCK, _WARPS = 2048, 4
_DIGIT, _TILE = 4, 512  # bits of a score that one pass finds, and scores of a pass at a time
_OFFSETS = {name.upper(): place for place, name in enumerate(DRAWN)}
_EXACT = {"num_warps": _WARPS, "enable_fp_fusion": False}


@triton.jit
def _mixed(x: tl.tensor) -> tl.tensor:
    """Apply MurmurHash3's 32-bit finaliser (Appleby, public domain) to uint32."""
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _logarithm(x: tl.tensor) -> tl.tensor:
    """Return ln x within two units in the last place, for normal positive float32 (Cephes' logf)."""
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
    """Return Gumbel noise -ln E, E = -ln(1 - u), from 31 bits u for each of the token `ids` int32.

    E keeps its resolution near 0: for y = 1 - u as it is rounded, ln y / (1 - y) hardly differs from E / u (Kahan)."""
    lanes = _mixed(ids.to(tl.uint32) * 0x9E3779B1 + low.to(tl.uint32)) ^ high.to(tl.uint32)
    drawn = ((_mixed(lanes) & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10
    u = tl.minimum(drawn, 0.99999994)
    y = 1.0 - u
    e = tl.where(y == 1.0, u, -_logarithm(y) * (u / tl.where(y == 1.0, 1.0, 1.0 - y)))
    return -_logarithm(e)


@triton.jit(do_not_specialize=["first", "size"])  # a text's own ids are of any number
def noise_kernel(
    keys: tl.tensor, ids: tl.tensor, out: tl.tensor, first: int, size: int, LISTED: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = at < size
    token = first + at
    if LISTED:
        token = tl.load(ids + at, mask=held, other=0).to(tl.int32)
    noise = _gumbel(token, tl.load(keys + 2 * row), tl.load(keys + 2 * row + 1))
    tl.store(out + row * size + at, noise, mask=held)


def gumbels_of(keys: Tensor, size: int, first: int = 0, ids: Tensor | None = None) -> Tensor:
    """Return noise float32 [n, size] for keys int32 [n, 2], of token ids from `first` on or `ids` int64 [size]."""
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
    lowest: tl.tensor,
    ids: tl.tensor,
    row: tl.tensor,
    at: tl.tensor,
    held: tl.tensor,
    stride: int,
    LISTED: tl.constexpr,
    WARM: tl.constexpr,
    FILTERED: tl.constexpr,
) -> tl.tensor:
    """Return logits of a row, times `inverse` plus noise where `inverse` is above 0.

    They are -inf where none are held, or where the product is below the row's `lowest`."""
    scores = tl.load(logits + row * stride + at, mask=held, other=float("-inf")).to(tl.float32)
    if WARM:
        token = at
        if LISTED:
            token = tl.load(ids + at, mask=held, other=0).to(tl.int32)
        warmth = tl.load(inverse + row)
        noise = _gumbel(token, tl.load(keys + 2 * row), tl.load(keys + 2 * row + 1))
        scaled = scores * warmth
        warm = scaled + noise
        if FILTERED:
            warm = tl.where(scaled < tl.load(lowest + row), float("-inf"), warm)  # a NaN stays
        scores = tl.where(warmth > 0.0, warm, scores)
    return scores


@triton.jit
def best_kernel(
    logits: tl.tensor,
    keys: tl.tensor,
    inverse: tl.tensor,
    lowest: tl.tensor,
    values: tl.tensor,
    places: tl.tensor,
    stride: int,
    size: int,
    blocks: int,
    WARM: tl.constexpr,
    FILTERED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Find the largest score of a block of a row, and the lowest token that has it; NaN if the block holds one."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = at < size
    scores = _scores(logits, keys, inverse, lowest, keys, row, at, held, stride, False, WARM, FILTERED)
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
    """Write the token of a row from the results of `best_kernel`; -1 if a score is NaN or the largest not finite."""
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


def drawn(logits: Tensor, draws: Draws | None = None) -> Tensor:
    (rows, size), blocks = logits.shape, triton.cdiv(logits.shape[1], _BLOCK)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    values = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    places = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    least = _lowest_of(logits, draws)
    own = (places, values) if draws is None else (draws.keys.contiguous(), draws.inverse)
    best_kernel[rows, blocks](
        logits,
        *own,
        values if least is None else least,
        values,
        places,
        logits.stride(0),
        size,
        blocks,
        WARM=draws is not None,
        FILTERED=least is not None,
        BLOCK=_BLOCK,
        **_EXACT,
    )
    last_kernel[(rows,)](values, places, tokens, blocks, size, BLOCK=triton.next_power_of_2(blocks), num_warps=_WARPS)
    return tokens


@triton.jit
def warm_kernel(
    logits: tl.tensor,
    keys: tl.tensor,
    inverse: tl.tensor,
    lowest: tl.tensor,
    ids: tl.tensor,
    out: tl.tensor,
    stride: int,
    size: int,
    LISTED: tl.constexpr,
    FILTERED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = at < size
    scores = _scores(logits, keys, inverse, lowest, ids, row, at, held, stride, LISTED, True, FILTERED)
    tl.store(out + row * size + at, scores, mask=held)


def warmed(logits: Tensor, draws: Draws | None, ids: Tensor | None = None) -> Tensor:
    if draws is None:
        return logits.float()
    (rows, size), keys = logits.shape, draws.keys.contiguous()
    logits, least = logits if logits.stride(1) == 1 else logits.contiguous(), _lowest_of(logits, draws)
    out = torch.empty(rows, size, dtype=torch.float32, device=logits.device)
    warm_kernel[rows, triton.cdiv(size, _BLOCK)](
        logits,
        keys,
        draws.inverse,
        out if least is None else least,
        keys if ids is None else ids,
        out,
        logits.stride(0),
        size,
        LISTED=ids is not None,
        FILTERED=least is not None,
        BLOCK=_BLOCK,
        **_EXACT,
    )
    return out


@triton.jit
def _ordered(x: tl.tensor) -> tl.tensor:
    """Map float32 to int64 from 0 to 2^32 - 1 in the same order; both zeros are equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _largest(
    logits: tl.tensor,
    warmth: tl.tensor,
    base: tl.tensor,
    most: tl.tensor,
    goal: tl.tensor,
    size: int,
    WEIGHTS: tl.constexpr,
    DIGIT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Find the largest score, `_ordered`, that at least `goal` scores of a row reach.

    `WEIGHTS`: that scores with the share `goal` of all weights exp(score - `most`) reach. Scores below `base` do not
    count; `base` is the answer if all scores are too few. A pass finds one digit by trying all its values. Sums have
    one order, so a higher score never has a larger sum."""
    COUNT: tl.constexpr = 1 << DIGIT
    digit = tl.arange(0, COUNT).to(tl.int64)
    found = base * 0
    for step in range(0, 32 // DIGIT):
        shift = 32 - DIGIT * (step + 1)
        tried = found + (digit << shift)
        sums = tl.zeros([BLOCK, COUNT], dtype=tl.float32)
        for begin in range(0, size, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            score = tl.load(logits + at, mask=at < size, other=float("-inf")).to(tl.float32) * warmth
            place = _ordered(score)
            weight = tl.exp(score - most) if WEIGHTS else score * 0.0 + 1.0
            weight = tl.where((at < size) & (place >= base), weight, 0.0)
            sums += tl.where(place[:, None] >= tried[None, :], weight[:, None], 0.0)
        reached = tl.sum(sums, 0)
        if WEIGHTS:
            goal = tl.where(step == 0, goal * tl.max(tl.where(digit == 0, reached, 0.0), 0), goal)
        enough = (reached >= goal) | (digit == 0)
        found += (tl.sum(enough.to(tl.int64), 0) - 1) << shift
    return tl.maximum(found, base)


@triton.jit(do_not_specialize=["rows"])  # of any number outside of graphs
def lowest_kernel(
    logits: tl.tensor,
    laws: tl.tensor,
    out: tl.tensor,
    stride: int,
    size: int,
    rows: int,
    TEMPERATURE: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    DIGIT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the lowest score of a row that its filters keep; -inf without filters."""
    row = tl.program_id(0).to(tl.int64)
    mine = logits + row * stride
    law = laws + row
    warmth, count = tl.load(law + TEMPERATURE * rows), tl.load(law + TOP_K * rows)
    share, ratio = tl.load(law + TOP_P * rows), tl.load(law + MIN_P * rows)
    base = _ordered(warmth * 0.0 + float("-inf"))
    if (warmth > 0.0) & ((count > 0) | (share < 1.0) | (ratio > 0.0)):
        best = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
        for begin in range(0, size, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            score = tl.load(mine + at, mask=at < size, other=float("-inf")).to(tl.float32) * warmth
            best = tl.maximum(best, score)
        most = tl.max(best, 0)
        if ratio > 0.0:
            base = _ordered(most + _logarithm(ratio))
        if (count > 0) & (count < size):
            base = _largest(mine, warmth, base, most, count, size, False, DIGIT, BLOCK)
        if share < 1.0:
            base = _largest(mine, warmth, base, most, share, size, True, DIGIT, BLOCK)
    bits = (base - 2147483648).to(tl.int32)
    tl.store(out + row, (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True))


def lowest(logits: Tensor, laws: Tensor) -> Tensor:
    rows, size = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    lowest_kernel[(rows,)](
        logits,
        laws.contiguous(),
        out,
        logits.stride(0),
        size,
        rows,
        **_OFFSETS,
        DIGIT=_DIGIT,
        BLOCK=_TILE,
        **_EXACT | {"num_warps": 8},
    )
    return out


def _lowest_of(logits: Tensor, draws: Draws | None) -> Tensor | None:
    return lowest(logits, draws.laws) if draws is not None and draws.filtered else None
