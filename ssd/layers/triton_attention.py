"""Attention over pages by Triton kernels, on any GPU (on a CPU with TRITON_INTERPRET=1, slowly, for tests)."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ssd.errors import UsageError
from ssd.kernels.gpu import launch_options, processors_of
from ssd.layers.attention import PLAIN, Scores
from ssd.layers.paged import PagedAttention, PagedKeys, PagedRows
from ssd.layers.triton_kernels import attend_kernel, merge_kernel

# Most queries (tokens times heads) of a program, and keys that it reads at a time; fewer for heads wider than 128.
_MOST_QUERIES, _KEYS, _FEWER_KEYS = 64, 64, 32
# Queries and keys of a tile of 32-bit numbers. Tensor cores do not multiply these, and larger tiles spill registers.
_TILE_32 = 16
# Fewest keys of a split in deterministic mode, where splits must not depend on the batch; most splits, and how many of
# them a program merges at a time.
_CHUNK, _MOST_SPLITS, _MERGED = 256, 64, 32
# Programs that keep a multiprocessor busy.
_OCCUPANCY = 2


@dataclass(frozen=True)
class Tiling:
    """Sizes of tiles: `blocks` of queries a row, and `splits` of its keys, of `chunk` tiles each (0: equal)."""

    block_m: int
    block_n: int
    block_d: int
    blocks: int
    splits: int
    chunk: int


class TritonAttention(PagedAttention):
    """A backend by Triton. `processors`: multiprocessors to keep busy, by default all."""

    def __init__(self, device: torch.device, deterministic: bool = False, processors: int | None = None) -> None:
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise UsageError(f"--attention triton works on a GPU, not on {device}")
        self._processors, self._deterministic = processors or processors_of(device), deterministic

    def tiling(self, rows: PagedRows, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> Tiling:
        """Return the tiling, which depends on shapes alone; `block_m` and `splits` > 1 choose the compiled variant."""
        group = heads // kv_heads
        most, block_n = _MOST_QUERIES, _FEWER_KEYS if dim > 128 else _KEYS
        if dtype.itemsize > 2:
            most, block_n = _TILE_32, _TILE_32
        queries = most if self._deterministic else min(rows.longest * group, most)
        block_m = max(16, _power_of_two(max(queries, group)))
        blocks = -(-rows.longest // (block_m // group))
        if self._deterministic:
            chunk = max(_CHUNK, _power_of_two(-(-rows.reach // _MOST_SPLITS)))
            splits, chunk = -(-rows.reach // chunk), chunk // block_n
        else:
            programs = rows.sequences.shape[0] * blocks * kv_heads
            wanted = -(-_OCCUPANCY * self._processors // programs)
            splits, chunk = min(_power_of_two(wanted), _MOST_SPLITS, _power_of_two(-(-rows.reach // block_n))), 0
        return Tiling(block_m, block_n, max(16, _power_of_two(dim)), blocks, splits, chunk)

    def part(
        self, q: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, scale: float, rule: Scores = PLAIN
    ) -> tuple[Tensor, Tensor]:
        tilings = self._variants(q, keys, rows) if self.warms_up else []
        for tiling in (*tilings, self._tiling_of(q, keys, rows)):
            out, totals = torch.empty_like(q, memory_format=torch.contiguous_format), _totals(q)
            whole = tiling.splits == 1
            parts = (out, totals) if whole else _parts(q, tiling.splits)
            _launch(q, keys, values, rows, scale, rule, tiling, parts, whole)
            if not whole:
                _merge(parts, out, totals)
        return out, totals

    def attend_both(self, q: Tensor, first: PagedKeys, second: PagedKeys, scale: float, rule: Scores) -> Tensor:
        tilings = [self._tiling_of(q, keys, rows) for keys, _, rows in (first, second)]
        sizes = [tiling.splits for tiling in tilings]
        parts = _parts(q, sum(sizes))
        each = zip(*(part.split(sizes) for part in parts), strict=True)
        for (keys, values, rows), tiling, own in zip((first, second), tilings, each, strict=True):
            _launch(q, keys, values, rows, scale, rule, tiling, own, whole=False)
        out, totals = torch.empty_like(q, memory_format=torch.contiguous_format), _totals(q)
        _merge(parts, out, totals)
        return rule.sunk(out, totals).flatten(1)

    def _variants(self, q: Tensor, keys: Tensor, rows: PagedRows) -> list[Tiling]:
        lengths = [1 << power for power in range(_MOST_QUERIES.bit_length())]
        tilings = [self._tiling_of(q, keys, replace(rows, longest=longest)) for longest in lengths]
        sizes = {tiling.block_m: tiling for tiling in tilings}
        return [replace(tiling, splits=splits) for tiling in sizes.values() for splits in (1, 2)]

    def _tiling_of(self, q: Tensor, keys: Tensor, rows: PagedRows) -> Tiling:
        return self.tiling(rows, q.shape[1], keys.shape[1], q.shape[2], q.dtype)


def _totals(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[:2], dtype=torch.float32)


def _parts(q: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    return q.new_empty(splits, *q.shape, dtype=torch.float32), q.new_empty(splits, *q.shape[:2], dtype=torch.float32)


def _launch(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: PagedRows,
    scale: float,
    rule: Scores,
    tiling: Tiling,
    results: tuple[Tensor, Tensor],
    whole: bool,
) -> None:
    q = q if q.stride(-1) == 1 else q.contiguous()
    queries, heads, dim = q.shape
    kv_heads = keys.shape[1]
    attend_kernel[rows.sequences.shape[0] * tiling.blocks, kv_heads, tiling.splits](
        q, keys, values, *results, rows.table, rows.sequences, rows.starts, rows.seen, rows.positions,
        scale, rule.softcap or 0.0, rule.window or 0,
        queries, q.stride(0), q.stride(1), keys.stride(0), rows.table.stride(0),
        tiling.blocks, tiling.splits, tiling.chunk,
        PAGE=rows.page_size, HEADS=heads, GROUP=heads // kv_heads, DIM=dim,
        WINDOWED=rule.window is not None, CAPPED=rule.softcap is not None, WHOLE=whole,
        BLOCK_M=tiling.block_m, BLOCK_N=tiling.block_n, BLOCK_D=tiling.block_d,
        WIDE=q.device.type == "cpu" and q.dtype == torch.bfloat16, FP8=keys.dtype == torch.uint8,
        num_warps=4, num_stages=2, **launch_options(q.device),
    )  # fmt: skip


def _merge(parts: tuple[Tensor, Tensor], out: Tensor, totals: Tensor) -> None:
    merge_kernel[(totals.numel(),)](
        *parts, out, totals, totals.numel(), len(parts[0]),
        DIM=out.shape[-1], MOST=2 * _MOST_SPLITS, BLOCK_S=_MERGED, BLOCK_D=max(16, _power_of_two(out.shape[-1])),
        num_warps=4, **launch_options(out.device),
    )  # fmt: skip


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
