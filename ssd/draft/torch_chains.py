"""Attention of chain tokens by torch, or by a backend that reads page tables."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ssd.draft.chain_cache import ChainCache, ChainTokens
from ssd.execution.kv_cache import KVCache, Span, last
from ssd.layers.attention import Scores, attend_own, attend_part, merge, minus_infinity, very_low
from ssd.layers.paged import PagedAttention, PagedRows


class TorchChains:
    """Attends with chain tokens to the shared path and to each chain separately, merged by log-sum-exp.

    The path is read once per sequence, by `attention` or, without one, by torch. `positions`: those of the chain
    tokens."""

    def __init__(
        self,
        chains: Sequence[ChainTokens],
        cache: KVCache,
        chain_cache: ChainCache,
        attention: PagedAttention | None,
        positions: Tensor,
    ) -> None:
        self._chains, self._cache, self._chain_cache, self._attention = chains, cache, chain_cache, attention
        self._cells, self._depths, self._seen = (self._numbers(name) for name in ("cells", "depths", "seen"))
        self._positions = positions
        self._longest = max(seen for own in chains for seen in own.seen)
        self._own_masks: dict[int | None, Tensor] = {}
        self._shared_spans: dict[int | None, list[_SharedSpan]] = {}

    def _numbers(self, name: str) -> Tensor:
        """Return the lists `name` of all `ChainTokens`, joined, as int64 [chain tokens]."""
        numbers = [number for own in self._chains for number in getattr(own, name)]
        return torch.tensor(numbers, dtype=torch.long, device=self._cache.keys.device)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        keys, values = self._chain_cache.layers[layer]
        keys[self._cells, self._depths], values[self._cells, self._depths] = k, v

    def attend(self, layer: int, q: Tensor, rule: Scores) -> Tensor:
        (keys, values), scale = self._chain_cache.layers[layer], rule.scale_of(self._cache.head_dim)
        mask, length = self._own_mask(rule.window), self._longest
        own = attend_own(q, keys[self._cells, :length], values[self._cells, :length], scale, mask, rule)
        if self._attention is None:
            return merge(self._shared(layer, q, scale, rule), own, rule).flatten(1)
        shared = self._attention.part(q, *self._cache.layers[layer], self._shared_rows, scale, rule)
        return merge(shared, own, rule).flatten(1)

    def _own_mask(self, window: int | None) -> Tensor:
        """Return the mask of tokens over their own chains, [n, 1, 1, longest], in layers with this window."""
        if window not in self._own_masks:
            places = torch.arange(self._longest, device=self._depths.device)
            hidden = places >= self._seen[:, None]
            if window is not None:
                hidden |= places <= self._depths[:, None] - window
            self._own_masks[window] = minus_infinity(hidden, self._cache.keys.dtype)[:, None, None]
        return self._own_masks[window]

    def _shared(self, layer: int, q: Tensor, scale: float, rule: Scores) -> tuple[Tensor, Tensor]:
        if rule.window not in self._shared_spans:
            self._shared_spans[rule.window] = [_shared_span(self._cache, own, rule.window) for own in self._chains]
        outs, totals, start = [], [], 0
        for count, span, mask in self._shared_spans[rule.window]:
            keys, values = (kind[span] for kind in self._cache.layers[layer])
            out, total = attend_part(q[start : start + count], keys, values, scale, mask, rule)
            outs.append(out)
            totals.append(total)
            start += count
        return torch.cat(outs), torch.cat(totals)

    @cached_property
    def _shared_rows(self) -> PagedRows:
        """Return the shared paths for the backend: a row for the chain tokens of each sequence."""
        device, size = self._cache.keys.device, self._cache.page_size
        used = [list(own.pages[: -(-(own.base + max(own.forks)) // size)]) for own in self._chains]
        longest = max(map(len, used))
        counts = [len(own.forks) for own in self._chains]
        seen = [own.base + fork for own in self._chains for fork in own.forks]
        return PagedRows(
            torch.tensor([own + own[:1] * (longest - len(own)) for own in used], dtype=torch.int32, device=device),
            torch.arange(len(counts), dtype=torch.int32, device=device),
            torch.tensor(list(accumulate(counts, initial=0)), dtype=torch.int32, device=device),
            torch.tensor(seen, device=device),
            self._positions,
            size,
            max(counts),
            causal=False,
        )


class _SharedSpan(NamedTuple):
    """The number of a sequence's chain tokens, the span of their path, and the mask over its last keys."""

    tokens: int
    span: Span
    mask: Tensor | None


def _shared_span(cache: KVCache, chains: ChainTokens, window: int | None) -> _SharedSpan:
    device, dtype = cache.keys.device, cache.keys.dtype
    count, deepest = len(chains.forks), max(chains.forks)
    length = chains.base + deepest
    span = cache.span(chains.pages, length)
    if window is None and deepest == 0:
        return _SharedSpan(count, span, None)
    # A token does not see trunk tokens behind its fork, nor tokens before its window.
    positions = chains.positions
    first = chains.base if window is None else max(0, min(min(positions) + 1 - window, length - 1))
    places = torch.arange(first, length, device=device)
    hidden = places >= chains.base + torch.tensor(chains.forks, device=device)[:, None]
    if window is None:
        return _SharedSpan(count, span, minus_infinity(hidden, dtype)[:, None])
    hidden |= places <= torch.tensor(positions, device=device)[:, None] - window
    return _SharedSpan(count, last(span, length - first), very_low(hidden, dtype)[:, None])
