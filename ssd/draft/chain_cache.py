"""The chains of a draft step: their keys and values in cells, and attention over path and cell by our kernels."""

from __future__ import annotations

import math
import mmap
from array import array
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from ssd.execution.kv_cache import Block, KVCache, allocate
from ssd.execution.tables import uploaded
from ssd.kernels.attention import KVSpans
from ssd.layers.attention import Scores
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


class KernelChains:
    """Attends with chain tokens by our kernels: each sees its path (`shared`), and behind that its chain (`own`).

    A token's keys and values go to the last place of `stored`, which is `own` if no token sees later ones."""

    def __init__(self, chains: Sequence[ChainTokens], cache: KVCache, chain_cache: ChainCache) -> None:
        self._head_dim = cache.head_dim
        slots, starts = cache.all_slots([own.pages for own in chains], [own.base + max(own.forks) for own in chains])
        begin = [start for start, own in zip(starts, chains, strict=True) for _ in own.forks]
        self.shared = KVSpans(cache.blocks, slots, begin, [own.base + fork for own in chains for fork in own.forks])
        own_begin = [cell * chain_cache.depth for own in chains for cell in own.cells]
        stored_count = [place + 1 for own in chains for place in own.depths]
        own_count = [seen for own in chains for seen in own.seen]
        cells = chain_cache.blocks, chain_cache.slots, own_begin
        self.stored = KVSpans(*cells, stored_count)
        self.store = self.stored.put
        self.own = self.stored if own_count == stored_count else KVSpans(*cells, own_count)

    def attend(self, layer: int, q: Tensor, rule: Scores) -> Tensor:
        out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
        rest = rule.scale_of(self._head_dim), rule.softcap, rule.window, self.own, rule.sinks
        self.shared.attend(layer, q, out, range(len(q)), *rest)
        return out
