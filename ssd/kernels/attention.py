"""Attention over keys and values in a cache, token by token (attention.c)."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref

import torch
from torch import Tensor

from ssd.kernels import library
from ssd.kernels.cpu import by_heads
from ssd.kernels.library import call, scratch

NO_WINDOW = 2**62


class Places:
    """Where the keys and values are that each of n tokens sees: of those in `keys` and `values`
    [layers, ..., kv_heads, dim], token i sees the ones in slots[begin[i]] to slots[begin[i] + count[i] - 1], its own
    the last. Slots [m] int64 must be some that there are: nothing checks them."""

    def __init__(self, keys: Tensor, values: Tensor, slots: Tensor, begin: Sequence[int], count: Sequence[int]) -> None:
        self._kept = keys, values, slots, torch.tensor(begin), torch.tensor(count)
        lists = (kept.data_ptr() for kept in self._kept[2:])
        self.longest, self.tokens = max(count, default=0), len(count)
        self.struct = library.Store(keys.data_ptr(), values.data_ptr(), keys.stride(0), *lists, self.longest)

    def put(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store what each token adds, k and v [n, kv_heads, dim]."""
        k, v, (n, kv_heads, dim) = by_heads(k), by_heads(v), k.shape
        strides = k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0)
        call().put(byref(self.struct), layer, *strides, n, kv_heads * dim)

    def attend(
        self,
        layer: int,
        q: Tensor,
        out: Tensor,
        tokens: range,
        scale: float,
        softcap: float | None = None,
        window: int | None = None,
        own: Places | None = None,
    ) -> None:
        """Attention of these `tokens`, q [n, heads, dim], into out [n, heads * dim]. Each sees what it shares with
        others here and behind that what is its `own`, of all of them the last `window`."""
        q, (_, heads, dim) = by_heads(q), q.shape
        sizes = heads, self._kept[0].shape[-2], dim
        room = scratch(scores_bytes([View(self, own)]))
        call().attend(
            *(byref(self.struct), None if own is None else byref(own.struct), layer),
            *(q.data_ptr(), q.stride(0), out.data_ptr(), tokens.start, tokens.stop, *sizes),
            *(scale, softcap or 0.0, window or NO_WINDOW, room.data_ptr()),
        )


class View:
    """Tokens that see what is in `shared`, and behind that what is in `own`."""

    def __init__(self, shared: Places, own: Places | None = None) -> None:
        self.shared, self.own = shared, own

    @property
    def longest(self) -> int:
        return self.shared.longest + (0 if self.own is None else self.own.longest)


def scores_bytes(views: Sequence[View]) -> int:
    """What attention needs for scores: those of one token in each thread."""
    return 4 * torch.get_num_threads() * max(view.longest for view in views)
