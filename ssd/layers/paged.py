"""Attention over pages that a CUDA graph can hold: a backend's interface, and the reference backend in torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ssd.layers.attention import PLAIN, Scores, attend_own, merge, very_low


@dataclass(frozen=True)
class PagedRows:
    """The rows of a batch: which sequence's pages each reads, and which of its keys each query sees.

    table: int32 [sequences, pages].
    sequences: int32 [rows], the row's index in `table`.
    starts: int32 [rows + 1], where the row's queries begin in the batch; a row may have none.
    seen: [queries]; query i sees the keys 0 .. `seen[i]` - 1.
    positions: [queries]; a window counts back from here.
    longest: upper bound on a row's queries.
    causal: a row's queries are consecutive tokens, and each sees all keys up to itself."""

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
        return self.table.shape[1] * self.page_size

    @cached_property
    def tables(self) -> Tensor:
        """Return the pages of every row, int32 [rows, pages]."""
        return self.table[self.sequences]

    @cached_property
    def key_starts(self) -> Tensor:
        """Return how many keys the rows before each row see, int32 [rows + 1]; a row without queries sees none."""
        last = self.seen[(self.starts[1:] - 1).clamp(min=0)]
        counts = torch.where(self.starts.diff() > 0, last, 0)
        return F.pad(counts.cumsum(0), (1, 0)).int()


def to_fp8(x: Tensor) -> Tensor:
    """Round x to the nearest FP8 (e4m3), uint8 of the same shape; cut magnitudes to 448, keep NaNs."""
    return x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)


def of_cache(stored: Tensor, dtype: torch.dtype) -> Tensor:
    return (stored.view(torch.float8_e4m3fn) if stored.dtype == torch.uint8 else stored).to(dtype)


class PagedKeys(NamedTuple):
    keys: Tensor
    values: Tensor
    rows: PagedRows


class PagedAttention(Protocol):
    """A backend: q [queries, heads, dim] attends to keys and values [slots, kv_heads, dim] as `rows` say.

    Keys and values have the type of q, or are FP8. Token p of a sequence lies in slot
    `pages[p // page_size] * page_size + p % page_size`. A backend never waits for the device, and its launches depend
    on shapes alone: a CUDA graph can hold it."""

    warms_up: bool = False
    """While set, each `part` also launches the kernels that other batches of its layer need."""

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, scale: float, rule: Scores) -> Tensor:
        return rule.sunk(*self.part(q, keys, values, rows, scale, rule)).flatten(1)

    def part(
        self, q: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, scale: float, rule: Scores = PLAIN
    ) -> tuple[Tensor, Tensor]:
        """Return the normalised output [queries, heads, dim] and the log-sum-exp of the scores, both without sinks.

        The log-sum-exp [queries, heads] is in float32 at least; it is very low for a query that sees nothing."""

    def attend_both(self, q: Tensor, first: PagedKeys, second: PagedKeys, scale: float, rule: Scores) -> Tensor:
        """Attend to two disjoint sets of keys in one softmax; return [queries, heads * dim]."""


class TorchAttention(PagedAttention):
    """The reference backend, in float32 at least: gathers all keys a row could have for every query."""

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
        # Hidden places read the sequence's first key, which was written: 0 times unwritten memory may be NaN.
        slots = torch.where(hidden, pages[:, :1] * rows.page_size, slots)
        wide = torch.promote_types(q.dtype, torch.float32)
        mask = very_low(hidden, wide)[:, None, None]
        out, totals = attend_own(
            q.to(wide), of_cache(keys[slots], wide), of_cache(values[slots], wide), scale, mask, rule
        )
        return out.to(q.dtype), totals

    def attend_both(self, q: Tensor, first: PagedKeys, second: PagedKeys, scale: float, rule: Scores) -> Tensor:
        return merge(self.part(q, *first, scale, rule), self.part(q, *second, scale, rule), rule).flatten(1)
