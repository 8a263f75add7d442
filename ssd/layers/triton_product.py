"""Products with 16-bit weights and few rows by a Triton kernel: programs share the inputs of an output.

With TRITON_INTERPRET=1 the kernel runs on a CPU, slowly, for tests."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ssd.kernels.gpu import launch_options, processors_of
from ssd.layers.triton_kernels import ask, follow

FEW_ROWS = 64
"""Most rows of a batch in which a row has the same bits as in any other such batch."""
# Larger weights keep all processors busy without shares, as the library divides them.
_MOST_BYTES = 128 << 20
# Outputs of a program, and inputs that it reads at a time: the first that divides all.
_BLOCK_N, _BLOCKS_K = 64, (128, 64)
# Half of what a program asks for of an output's weights before its inputs are there.
_HALF_BYTES = tl.constexpr(512)
# Programs of a processor that fit at the same time, and fewest tiles of inputs of one.
_RESIDENT, _LEAST_TILES = 2, 2


# Specialising on these would compile further variants in the middle of somebody's answer.
@triton.jit(do_not_specialize=["rows", "tiles", "share"])
def split_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    parts: tl.tensor,
    arrived: tl.tensor,
    out: tl.tensor,
    rows: int,
    outputs: int,
    x_stride: int,
    weight_stride: int,
    tiles: int,
    share: int,
    BIASED: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr = False,
) -> None:
    """Multiply x [rows, inputs] by `share` of the `tiles` of the inputs of weight [outputs, inputs].

    Programs: (`BLOCK_M` rows, `BLOCK_N` outputs, split of the inputs). Each leaves its sums in `parts` float32 [blocks,
    SPLITS, BLOCK_M, BLOCK_N]. The last to arrive of a block's programs adds all of them up in the order of the splits,
    so the bits do not depend on which it is. `arrived` int32 [blocks] is 0 before and after. `WIDE`: multiply in
    float32, as the interpreter has no bfloat16."""
    split = tl.program_id(2)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    used = (m < rows)[:, None]
    first = split * share
    last = tl.minimum(first + share, tiles)
    if PDL:  # weights are there already: the beginning of each output's share, in two halves
        half = tl.minimum((last - first) * BLOCK_K, _HALF_BYTES)
        place = tl.arange(0, 2 * BLOCK_N)
        output = (tl.program_id(1) * BLOCK_N + place // 2) % outputs
        begin = output.to(tl.int64) * weight_stride + first * BLOCK_K + place % 2 * (half // 2)
        ask((weight + begin).to(tl.int64), half)
    follow(PDL)
    mine = x + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    # Outputs that are not there repeat others.
    stored = weight + (n % outputs).to(tl.int64)[:, None] * weight_stride + k[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for tile in range(first, last):
        row = tl.load(mine + tile * BLOCK_K, mask=used, other=0.0)
        if WIDE:
            row = row.to(tl.float32)
        numbers = tl.load(stored + tile * BLOCK_K).to(row.dtype)
        acc = tl.dot(row, tl.trans(numbers), acc, input_precision="ieee")
    if SPLITS > 1:
        block = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        place = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        own = parts + block.to(tl.int64) * (SPLITS * BLOCK_M * BLOCK_N) + place
        tl.store(own + split * (BLOCK_M * BLOCK_N), acc, mask=used)
        tl.debug_barrier()  # all threads have stored before one says so
        if tl.atomic_add(arrived + block, 1, sem="acq_rel") < SPLITS - 1:
            return
        tl.store(arrived + block, 0)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for each in tl.static_range(SPLITS):
            acc += tl.load(own + each * (BLOCK_M * BLOCK_N), mask=used, other=0.0, cache_modifier=".cg")
    if BIASED:
        acc += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    results = out + m.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(results, acc.to(out.dtype.element_ty), mask=used & (n < outputs)[None, :])


def takes(weight: Tensor) -> bool:
    """Return true if `SplitProduct` takes this weight [out, in] and may be faster than the library."""
    return (
        weight.element_size() == 2
        and weight.nbytes <= _MOST_BYTES
        and weight.stride(1) == 1
        and any(weight.shape[1] % block == 0 for block in _BLOCKS_K)
    )


class SplitProduct:
    """y = x W^T + b for x [n, in] -> y [n, out], with W in 16 bits. More than `FEW_ROWS` rows are the library's.

    Each number of y is the sum of fixed splits of the inputs, in float32. So a row has the same bits in any batch of up
    to `FEW_ROWS` rows. No two products of one object may run at the same time."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, processors: int | None = None) -> None:
        """`processors`: multiprocessors to keep busy, by default all of the weight's device."""
        self._weight, self._bias = weight, bias
        outputs, inputs = weight.shape
        self._block_k = next(block for block in _BLOCKS_K if inputs % block == 0)
        self._blocks, self._tiles = -(-outputs // _BLOCK_N), inputs // self._block_k
        programs = _RESIDENT * (processors or processors_of(weight.device))
        wanted = max(1, min(programs // self._blocks, self._tiles // _LEAST_TILES))
        self._share = -(-self._tiles // wanted)
        self._splits = -(-self._tiles // self._share)
        # Of a few rows there are at most two blocks.
        self._arrived = torch.zeros(2 * self._blocks, dtype=torch.int32, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        rows, outputs = x.shape[0], self._weight.shape[0]
        if not 0 < rows <= FEW_ROWS:
            return F.linear(x, self._weight, self._bias)
        x = x if x.stride(-1) == 1 else x.contiguous()
        out = x.new_empty(rows, outputs)
        block_m = 16 if rows <= 16 else 32
        blocks_m, several = -(-rows // block_m), self._splits > 1
        size = blocks_m * self._blocks, self._splits, block_m, _BLOCK_N
        parts = x.new_empty(size, dtype=torch.float32) if several else out
        split_kernel[blocks_m, self._blocks, self._splits](
            x,
            self._weight,
            self._weight if self._bias is None else self._bias,
            parts,
            self._arrived,
            out,
            rows,
            outputs,
            x.stride(0),
            self._weight.stride(0),
            self._tiles,
            self._share,
            BIASED=self._bias is not None,
            SPLITS=self._splits,
            BLOCK_M=block_m,
            BLOCK_N=_BLOCK_N,
            BLOCK_K=self._block_k,
            WIDE=x.device.type == "cpu" and x.dtype == torch.bfloat16,
            num_warps=4,
            num_stages=4,
            **launch_options(x.device),
        )
        return out
