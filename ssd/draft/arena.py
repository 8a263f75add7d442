"""Keys and values of chains: small, dense, reused every round. Branches get no pages (DESIGN, outcome tree)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ssd.execution.batch import PagedPlan
from ssd.execution.kv_cache import KVCache
from ssd.layers.attention import attend_own, attend_part, merge, minus_infinity
from ssd.models.interface import Shape


class Arena:
    """keys and values: [layers, cells, depth, kv_heads, head_dim]; one cell per chain."""

    def __init__(self, shape: Shape, cells: int, depth: int, dtype: torch.dtype, device: torch.device) -> None:
        size = (shape.layers, cells, depth, shape.kv_heads, shape.head_dim)
        # Zeroed once: masked places are multiplied by 0, which must not meet a NaN.
        self.keys = torch.zeros(size, dtype=dtype, device=device)
        self.values = torch.zeros(size, dtype=dtype, device=device)
        self._free = list(range(cells))[::-1]

    def take(self) -> int | None:
        """A free cell, None when all are used."""
        return self._free.pop() if self._free else None

    def give_back(self, cells: Sequence[int]) -> None:
        self._free.extend(cells)

    def promote(self, cell: int, count: int, cache: KVCache, slots: Sequence[int]) -> None:
        """Copy the first `count` tokens of a cell to cache slots: what won is not computed twice."""
        where = torch.tensor(slots, device=self.keys.device)
        cache.keys[:, where] = self.keys[:, cell, :count]
        cache.values[:, where] = self.values[:, cell, :count]


class Branches:
    """The chain rows of one sequence in a batch: one token each, of a chain one or several in order.

    `pages` hold the context all of them share: the path up to the deepest fork. `forks` [n] counts the line tokens
    each may see, `cells` and `depths` say where its own keys go.
    """

    def __init__(self, pages: Sequence[int], base: int) -> None:
        self.pages, self.base = pages, base
        self.forks: list[int] = []
        self.cells: list[int] = []
        self.depths: list[int] = []
        self.tokens: list[int] = []

    def add(self, fork: int, cell: int, depth: int, tokens: Sequence[int]) -> None:
        """Rows for the tokens of a chain from its `depth`-th on."""
        self.forks += [fork] * len(tokens)
        self.cells += [cell] * len(tokens)
        self.depths += range(depth, depth + len(tokens))
        self.tokens += tokens

    @property
    def positions(self) -> list[int]:
        return [self.base + fork + depth for fork, depth in zip(self.forks, self.depths, strict=True)]


class TreePlan:
    """The plan of a draft step: paged rows first, then the branches of every sequence in one run.

    A branch attends to the shared path and to its own chain separately; the parts are merged by log-sum-exp, so that
    the path is read once per sequence and not once per chain.
    """

    def __init__(self, paged: PagedPlan, branches: Sequence[Branches], cache: KVCache, arena: Arena) -> None:
        device = cache.keys.device
        self._paged, self._cache, self._arena = paged, cache, arena
        self._scale = cache.keys.shape[-1] ** -0.5
        positions = torch.tensor([p for b in branches for p in b.positions], dtype=torch.long, device=device)
        self.positions = torch.cat((paged.positions, positions))
        self._cells = torch.tensor([cell for b in branches for cell in b.cells], dtype=torch.long, device=device)
        self._depths = torch.tensor([depth for b in branches for depth in b.depths], dtype=torch.long, device=device)
        longest = max((depth + 1 for b in branches for depth in b.depths), default=0)
        hidden = torch.arange(longest, device=device) > self._depths[:, None]
        self._own_mask = minus_infinity(hidden, cache.keys.dtype)[:, None, None]
        self._shared = [self._context(b, device) for b in branches]

    def _context(self, branches: Branches, device: torch.device) -> tuple[int, slice | Tensor, Tensor | None]:
        """(branches, where their shared keys lie, mask over the line tokens)."""
        deepest = max(branches.forks)
        span = self._cache.span(branches.pages, branches.base + deepest)
        if deepest == 0:
            return len(branches.forks), span, None
        hidden = torch.arange(deepest, device=device) >= torch.tensor(branches.forks, device=device)[:, None]
        return len(branches.forks), span, minus_infinity(hidden, self._cache.keys.dtype)[:, None]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        split = self._paged.positions.shape[0]
        parts = []
        if split:
            parts.append(self._paged.attend(layer, q[:split], k[:split], v[:split]))
        if self._shared:
            parts.append(self._attend_branches(layer, q[split:], k[split:], v[split:]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_branches(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self._arena.keys[layer], self._arena.values[layer]
        keys[self._cells, self._depths], values[self._cells, self._depths] = k, v
        length = self._own_mask.shape[-1]
        own = attend_own(q, keys[self._cells, :length], values[self._cells, :length], self._scale, self._own_mask)
        outs, totals, start = [], [], 0
        for count, span, mask in self._shared:
            part = q[start : start + count]
            out, total = attend_part(
                part, self._cache.keys[layer][span], self._cache.values[layer][span], self._scale, mask
            )
            outs.append(out)
            totals.append(total)
            start += count
        return merge((torch.cat(outs), torch.cat(totals)), own).flatten(1)
