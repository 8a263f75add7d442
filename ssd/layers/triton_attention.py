"""Attention over pages by Triton kernels, on any GPU that Triton supports.

With TRITON_INTERPRET=1 they run on a CPU, slowly, for tests."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from ssd.errors import UsageError
from ssd.layers.attention import PLAIN, Scores
from ssd.layers.paged import PagedRows
from ssd.layers.triton_kernels import attend_kernel, merge_kernel

# Most queries (tokens times heads) of a program, and keys that it reads at a time; fewer for heads wider than 128.
_MOST_QUERIES, _KEYS, _FEWER_KEYS = 64, 64, 32
# Queries and keys of a tile in 32 bits, which tensor cores do not multiply: larger tiles spill registers.
_TILE_32 = 16
# Fewest keys of a split in deterministic mode, where splits must not depend on the batch; most splits.
_CHUNK, _MOST_SPLITS = 256, 64
# Programs that keep a multiprocessor busy.
_OCCUPANCY = 2


@dataclass(frozen=True)
class Tiling:
    """How work is divided: `blocks` of queries a row, and `splits` of its keys, of `chunk` keys each (0: equal)."""

    block_m: int
    block_n: int
    block_d: int
    blocks: int
    splits: int
    chunk: int


class TritonAttention:
    """A `ssd.layers.paged.PagedAttention`. `processors`: multiprocessors to keep busy, by default all."""

    def __init__(self, device: torch.device, deterministic: bool = False, processors: int | None = None) -> None:
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise UsageError(f"--attention triton works on a GPU, not on {device}")
        if processors is None:
            processors = 1
            if device.type == "cuda":
                processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._processors, self._deterministic = processors, deterministic

    def tiling(self, rows: PagedRows, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> Tiling:
        """The tiling, by shapes alone. In deterministic mode a query's sums are divided the same way in all shapes."""
        group = heads // kv_heads
        most, block_n = _MOST_QUERIES, _FEWER_KEYS if dim > 128 else _KEYS
        if dtype.itemsize > 2:
            most, block_n = _TILE_32, _TILE_32
        queries = most if self._deterministic else min(rows.longest * group, most)
        block_m = max(16, _power_of_two(max(queries, group)))
        blocks = -(-rows.longest // (block_m // group))
        if self._deterministic:
            chunk = max(_CHUNK, _power_of_two(-(-rows.reach // _MOST_SPLITS)))
            splits = -(-rows.reach // chunk)
        else:
            programs = rows.sequences.shape[0] * blocks * kv_heads
            wanted = -(-_OCCUPANCY * self._processors // programs)
            # Powers of two, so that there are few kernels to compile.
            splits, chunk = min(_power_of_two(wanted), _MOST_SPLITS, _power_of_two(-(-rows.reach // block_n))), 0
        return Tiling(block_m, block_n, max(16, _power_of_two(dim)), blocks, splits, chunk)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, scale: float, rule: Scores) -> Tensor:
        return self.part(q, keys, values, rows, scale, rule)[0].flatten(1)

    def part(
        self, q: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, scale: float, rule: Scores = PLAIN
    ) -> tuple[Tensor, Tensor]:
        q = q if q.stride(-1) == 1 else q.contiguous()
        queries, heads, dim = q.shape
        kv_heads = keys.shape[1]
        tiling = self.tiling(rows, heads, kv_heads, dim, q.dtype)
        out, totals = q.new_empty(queries, heads, dim), q.new_empty(queries, heads, dtype=torch.float32)
        several = tiling.splits > 1
        shape = tiling.splits, queries, heads
        parts = q.new_empty(*shape, dim, dtype=torch.float32) if several else out
        part_totals = q.new_empty(shape, dtype=torch.float32) if several else totals
        attend_kernel[rows.sequences.shape[0] * tiling.blocks, kv_heads, tiling.splits](
            q,
            keys,
            values,
            parts,
            part_totals,
            rows.table,
            rows.sequences,
            rows.starts,
            rows.seen,
            rows.positions,
            scale,
            rule.softcap or 0.0,
            rule.window or 0,
            queries,
            q.stride(0),
            q.stride(1),
            keys.stride(0),
            rows.table.stride(0),
            tiling.blocks,
            PAGE=rows.page_size,
            HEADS=heads,
            GROUP=heads // kv_heads,
            DIM=dim,
            WINDOWED=rule.window is not None,
            CAPPED=rule.softcap is not None,
            SPLITS=tiling.splits,
            CHUNK=tiling.chunk,
            BLOCK_M=tiling.block_m,
            BLOCK_N=tiling.block_n,
            BLOCK_D=tiling.block_d,
            WIDE=q.device.type == "cpu" and q.dtype == torch.bfloat16,
            FP8=keys.dtype == torch.uint8,
            num_warps=4,
            num_stages=2,
        )
        if several:
            merge_kernel[(queries * heads,)](
                parts,
                part_totals,
                out,
                totals,
                queries * heads,
                DIM=dim,
                SPLITS=tiling.splits,
                BLOCK_S=_power_of_two(tiling.splits),
                BLOCK_D=tiling.block_d,
                num_warps=4,
            )
        return out, totals


def _power_of_two(number: int) -> int:
    """The smallest power of two >= a positive number."""
    return 1 << (number - 1).bit_length()
