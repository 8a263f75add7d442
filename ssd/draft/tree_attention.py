"""Attention of a draft step: paths attend over pages, chains over the shared path and their own cell."""

from __future__ import annotations

import math
import mmap
from array import array
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ssd.execution.batch import Recurs
from ssd.execution.kv_cache import Block, KVCache, Span, allocate, last
from ssd.execution.paged import PagedContext
from ssd.execution.tables import TableContext, uploaded
from ssd.kernels.attention import KVSpans, View
from ssd.kernels.decoder import Views
from ssd.layers.attention import PLAIN, Scores, attend_own, attend_part, merge, minus_infinity, very_low
from ssd.layers.norm import Residual
from ssd.layers.paged import PagedAttention, PagedRows
from ssd.layers.recurrent import Recurrence
from ssd.models.interface import Shape


class ChainCache:
    """Owns keys and values of chains, one cell each: `blocks` [layers, cells, depth, kv_heads, head_dim].

    The last `kept` cells are never taken. Cells must hold finite numbers: attention multiplies masked places by 0."""

    def __init__(self, blocks: Sequence[Block], kept: int = 0) -> None:
        self.blocks = blocks
        self.layers = [layer for block in blocks for layer in zip(*block, strict=True)]
        self.cells, self.depth = blocks[0][0].shape[1:3]
        self._free = list(range(self.cells - kept))[::-1]

    @classmethod
    def new(
        cls, shape: Shape, cells: int, depth: int, dtype: torch.dtype, device: torch.device, kept: int = 0
    ) -> ChainCache:
        """Make a cache with memory of its own, in the pages' `dtype`."""
        keys, values = (allocate(shape, (cells + kept, depth), _zeros, dtype, device)[1] for _ in range(2))
        return cls(list(zip(keys, values, strict=True)), kept)

    @cached_property
    def slots(self) -> array[int]:
        """Return the slot numbers of all cells, for our kernels."""
        return array("q", range(self.cells * self.depth))

    def take(self) -> int | None:
        return self._free.pop() if self._free else None

    def give_back(self, cells: Sequence[int]) -> None:
        self._free.extend(cells)

    def promote(self, cell: int, count: int, cache: KVCache, slots: Sequence[int]) -> None:
        """Copy the first `count` tokens of a cell to cache slots."""
        where = uploaded(torch.tensor(slots), cache.keys.device)
        for block, own in zip(cache.blocks, self.blocks, strict=True):
            for kind, cells in zip(block, own, strict=True):
                # Cloned: in static shapes the cells lie in the cache itself, and torch refuses a copy that may overlap.
                kind[:, where] = cells[:, cell, :count].clone()


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(size) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(size)


class ChainTokens:
    """The chain tokens of one sequence in a batch, chain after chain.

    All chains share the path in `pages`: `base` committed tokens, then trunk tokens. By token: `forks`, the trunk
    tokens that it sees; `cells` and `depths`, where its keys and values are; `seen`, the places of its cell that it
    sees."""

    def __init__(self, pages: Sequence[int], base: int) -> None:
        self.pages, self.base = pages, base
        self.forks: list[int] = []
        self.cells: list[int] = []
        self.depths: list[int] = []
        self.seen: list[int] = []
        self.tokens: list[int] = []

    def add(self, fork: int, cell: int, depth: int, tokens: Sequence[int], causal: int | None = None) -> None:
        """Add the tokens of a chain from its `depth`-th on; those behind `causal` ones see all of them."""
        causal, stop = len(tokens) if causal is None else causal, depth + len(tokens)
        self.forks += [fork] * len(tokens)
        self.cells += [cell] * len(tokens)
        self.depths += range(depth, stop)
        self.seen += [*range(depth + 1, depth + 1 + causal), *[stop] * (len(tokens) - causal)]
        self.tokens += tokens

    @property
    def positions(self) -> list[int]:
        return [self.base + fork + depth for fork, depth in zip(self.forks, self.depths, strict=True)]


class TreeContext:
    """The forward context of a draft step: paged rows first, then the chain tokens of every sequence.

    A chain token attends to the shared path and to its chain separately, merged by log-sum-exp: the path is read once
    per sequence."""

    parts: Sequence[Tensor] = ()
    """Features that a draft reads beside tokens, one part after the other: [n, width], or [width] of one token."""
    made: Tensor | None = None
    """The features that the draft makes of the tokens, [n, width]."""
    states: Recurs | None = None
    """The states of all rows, where layers have states."""

    def __init__(
        self,
        paged: PagedContext | TableContext,
        chains: Sequence[ChainTokens],
        cache: KVCache,
        chain_cache: ChainCache,
        attention: PagedAttention | None = None,
    ) -> None:
        self._paged, self._cache, self._chain_cache, self._attention = paged, cache, chain_cache, attention
        self._scale, self._chains = cache.head_dim**-0.5, chains
        kernels = bool(chains) and attention is None and cache.served
        self._places = _places(chains, cache, chain_cache) if kernels else None
        if cache.keys.device.type != "cpu":  # now: a copy sent after the launches would wait for them
            self.positions, self._cells, self._depths, self._seen  # noqa: B018
        self._own_masks: dict[int | None, Tensor] = {}
        self._found: dict[int | None, list[_SharedSpan]] = {}

    def _numbers(self, name: str) -> Tensor:
        """Return the lists `name` of all `ChainTokens`, joined, as int64 [chain tokens]."""
        numbers = [number for own in self._chains for number in getattr(own, name)]
        return torch.tensor(numbers, dtype=torch.long, device=self._cache.keys.device)

    @cached_property
    def positions(self) -> Tensor:
        return torch.cat((self._paged.positions, self._numbers("positions")))

    @cached_property
    def _cells(self) -> Tensor:
        return self._numbers("cells")

    @cached_property
    def _depths(self) -> Tensor:
        return self._numbers("depths")

    @cached_property
    def _seen(self) -> Tensor:
        return self._numbers("seen")

    @cached_property
    def _longest(self) -> int:
        return max((seen for own in self._chains for seen in own.seen), default=0)

    def _own_mask(self, window: int | None) -> Tensor:
        """Return the mask of tokens over their own chains, [n, 1, 1, longest], in layers with this window."""
        if window not in self._own_masks:
            places = torch.arange(self._longest, device=self._depths.device)
            hidden = places >= self._seen[:, None]
            if window is not None:
                hidden |= places <= self._depths[:, None] - window
            self._own_masks[window] = minus_infinity(hidden, self._cache.keys.dtype)[:, None, None]
        return self._own_masks[window]

    def _shared_spans(self, window: int | None) -> list[_SharedSpan]:
        if window not in self._found:
            self._found[window] = [_shared_span(self._cache, own, window) for own in self._chains]
        return self._found[window]

    def views(self) -> Views | None:
        paged = self._paged
        if not isinstance(paged, PagedContext) or (paged.places and paged.view is None):
            return None
        if not self._chains:
            return paged.views()
        if self._places is None or self._places.own is not self._places.stored:  # no kernel lets a token see later ones
            return None
        positions = array("q", [position for own in self._chains for position in own.positions])
        chains = View(self._places.shared, self._places.own)
        return Views([chains] if paged.view is None else [paged.view, chains], paged.places + positions)

    def cache_places(self, layer: int) -> None:
        return None

    def keep_hidden(self, layers: int, x: Tensor | Residual) -> None:
        pass

    def recur(self, index: int, recurrence: Recurrence, changes: Tensor, queries: Tensor) -> Tensor:
        assert self.states is not None, "a draft with states"
        return self.states.recur(index, recurrence, changes, queries)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: Scores = PLAIN) -> Tensor:
        split = self._paged.positions.shape[0]
        parts = []
        if split:
            parts.append(self._paged.attend(layer, q[:split], k[:split], v[:split], rule))
        if self._chains:
            self._store_chains(layer, k[split:], v[split:])
            parts.append(self._attend_chains(layer, q[split:], rule))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def attend_stored(self, layer: int, q: Tensor, rule: Scores = PLAIN) -> Tensor:
        split = self._paged.positions.shape[0]
        parts = [self._paged.attend_stored(layer, q[:split], rule)] if split else []
        if self._chains:
            parts.append(self._attend_chains(layer, q[split:], rule))
        return torch.cat(parts)

    def _store_chains(self, layer: int, k: Tensor, v: Tensor) -> None:
        if self._places is not None:
            self._places.stored.put(layer, k, v)
        else:
            keys, values = self._chain_cache.layers[layer]
            keys[self._cells, self._depths], values[self._cells, self._depths] = k, v

    def _attend_chains(self, layer: int, q: Tensor, rule: Scores) -> Tensor:
        scale = self._scale if rule.scale is None else rule.scale
        if self._places is not None:
            places = self._places
            attended = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
            rest = scale, rule.softcap, rule.window, places.own, rule.sinks
            places.shared.attend(layer, q, attended, range(len(q)), *rest)
            return attended
        keys, values = self._chain_cache.layers[layer]
        mask, length = self._own_mask(rule.window), self._longest
        own = attend_own(q, keys[self._cells, :length], values[self._cells, :length], scale, mask, rule)
        if self._attention is None:
            return merge(self._shared(layer, q, scale, rule), own, rule).flatten(1)
        shared = self._attention.part(q, *self._cache.layers[layer], self._shared_rows, scale, rule)
        return merge(shared, own, rule).flatten(1)

    def _shared(self, layer: int, q: Tensor, scale: float, rule: Scores) -> tuple[Tensor, Tensor]:
        outs, totals, start = [], [], 0
        for count, span, mask in self._shared_spans(rule.window):
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
            self.positions[self._paged.positions.shape[0] :],
            size,
            max(counts),
            causal=False,
        )


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Join parts, [n, width] or [width], to the features of all tokens, [n, width]."""
    return torch.cat([part if part.dim() == 2 else part[None] for part in parts])


class _Places(NamedTuple):
    """Places that kernels read for each chain token: its path `shared`, and its `own` chain.

    Its keys and values go to the last place of `stored`, which is `own` if no token sees later ones."""

    shared: KVSpans
    own: KVSpans
    stored: KVSpans


def _places(chains: Sequence[ChainTokens], cache: KVCache, chain_cache: ChainCache) -> _Places:
    slots, starts = cache.all_slots([own.pages for own in chains], [own.base + max(own.forks) for own in chains])
    begin = [start for start, own in zip(starts, chains, strict=True) for _ in own.forks]
    shared = KVSpans(cache.blocks, slots, begin, [own.base + fork for own in chains for fork in own.forks])
    own_begin = [cell * chain_cache.depth for own in chains for cell in own.cells]
    stored_count = [place + 1 for own in chains for place in own.depths]
    own_count = [seen for own in chains for seen in own.seen]
    cells = chain_cache.blocks, chain_cache.slots, own_begin
    stored = KVSpans(*cells, stored_count)
    return _Places(shared, stored if own_count == stored_count else KVSpans(*cells, own_count), stored)


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
