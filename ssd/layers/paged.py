"""Attention over pages where all that it is told lies in tensors of fixed shapes: the interface, and torch's backend.

A backend is made by name (`attention_backend`). That of torch runs anywhere and says what is right; the others are in
files of their own, imported only when they are asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ssd.errors import UsageError
from ssd.layers.attention import PLAIN, Scores, attend_own, very_low


@dataclass(frozen=True)
class PagedRows:
    """Queries of a batch, row by row: each row reads the keys of one sequence, each query some of these.

    `table` int32 [sequences, pages], `sequences` int32 [rows] says whose pages a row reads, `starts` int32 [rows + 1]
    where its queries begin in the batch (a row may have none). Query i sees the keys 0 .. `seen[i]` - 1 of its row, but
    with a window only those within it up to `positions[i]`, where it stands itself; both [queries]. `causal`: the
    queries of a row follow each other and each sees all keys up to itself. No row has more than `longest` queries.
    """

    table: Tensor
    sequences: Tensor
    starts: Tensor
    seen: Tensor
    positions: Tensor
    page_size: int
    longest: int
    causal: bool = True

    @property
    def reach(self) -> int:
        """More keys than this no row can have."""
        return self.table.shape[1] * self.page_size

    @cached_property
    def tables(self) -> Tensor:
        """int32 [rows, pages]: the pages of every row."""
        return self.table[self.sequences]

    @cached_property
    def key_starts(self) -> Tensor:
        """int32 [rows + 1]: how many keys the rows before a row see; one without queries sees none."""
        last = self.seen[(self.starts[1:] - 1).clamp(min=0)]
        counts = torch.where(self.starts.diff() > 0, last, 0)
        return F.pad(counts.cumsum(0), (1, 0)).int()


class PagedAttention(Protocol):
    """How q [queries, heads, dim] attends to keys and values [slots, kv_heads, dim] as `rows` say, token p of a
    sequence lying in slot `pages[p // page_size] * page_size + p % page_size`. Nothing in it waits for the device, and
    its launches depend on shapes alone, so that a CUDA graph may hold it."""

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, scale: float, rule: Scores) -> Tensor:
        """[queries, heads * dim]."""

    def part(
        self, q: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, scale: float, rule: Scores = PLAIN
    ) -> tuple[Tensor, Tensor]:
        """As a part of a larger softmax: the normalised output [queries, heads, dim] and the log-sum-exp of the scores
        [queries, heads] in 32 bits at least, which is very low for a query that sees nothing."""


class TorchAttention:
    """Gathers for every query all the keys that its row could have, and computes in 32 bits at least: for few queries
    and small contexts."""

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, scale: float, rule: Scores) -> Tensor:
        return self.part(q, keys, values, rows, scale, rule)[0].flatten(1)

    def part(
        self, q: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, scale: float, rule: Scores = PLAIN
    ) -> tuple[Tensor, Tensor]:
        places = torch.arange(rows.reach, device=q.device)
        hidden = places >= rows.seen[:, None]
        if rule.window is not None:
            hidden |= places <= rows.positions[:, None] - rule.window
        queries = torch.arange(q.shape[0], dtype=rows.starts.dtype, device=q.device)
        row = torch.searchsorted(rows.starts, queries, right=True) - 1
        pages = rows.table[rows.sequences[row]].long()
        slots = pages[:, places // rows.page_size] * rows.page_size + places % rows.page_size
        # A hidden place reads what the sequence has first, which was written: 0 times what was not may be no number.
        slots = torch.where(hidden, pages[:, :1] * rows.page_size, slots)
        wide = torch.promote_types(q.dtype, torch.float32)
        mask = very_low(hidden, wide)[:, None, None]
        out, totals = attend_own(q.to(wide), keys[slots].to(wide), values[slots].to(wide), scale, mask, rule)
        return out.to(q.dtype), totals


def attention_backend(name: str, device: torch.device, page_size: int, deterministic: bool = False) -> PagedAttention:
    """The backend of a name (`--attention`). `deterministic`: no query's result depends on the shape of its batch.
    Raises `UsageError` where it is not installed or cannot do what is asked."""
    if name == "auto":
        name = "triton" if device.type == "cuda" and _has_triton() else "torch"
    if name == "torch":
        return TorchAttention()
    try:
        if name == "triton":
            from ssd.layers.triton_attention import TritonAttention

            return TritonAttention(device, deterministic)
        from ssd.layers.flash_attention import FlashAttention

        return FlashAttention(device, page_size, deterministic)
    except ImportError as error:
        raise UsageError(f"--attention {name} is not installed: {error}") from None


def _has_triton() -> bool:
    from importlib.util import find_spec

    return find_spec("triton") is not None
