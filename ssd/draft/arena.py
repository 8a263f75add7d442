"""Keys and values of chains: small, dense, reused every round. Branches get no pages (DESIGN, outcome tree)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ssd.execution.kv_cache import KVCache, Span, last
from ssd.execution.paged import PagedPlan
from ssd.execution.tables import TablePlan
from ssd.kernels import cpu
from ssd.kernels.attention import Places, View
from ssd.kernels.decoder import Views
from ssd.layers.attention import PLAIN, Scores, attend_own, attend_part, merge, minus_infinity, very_low
from ssd.layers.paged import PagedAttention, PagedRows
from ssd.models.interface import Shape


class Arena:
    """keys and values: [layers, cells, depth, kv_heads, head_dim]; one cell per chain, all of them free. They hold
    numbers: masked places are multiplied by 0."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        self._free = list(range(keys.shape[1]))[::-1]

    @classmethod
    def new(cls, shape: Shape, cells: int, depth: int, dtype: torch.dtype, device: torch.device) -> Arena:
        """One with memory of its own."""
        size = (shape.layers, cells, depth, shape.kv_heads, shape.head_dim)
        return cls(torch.zeros(size, dtype=dtype, device=device), torch.zeros(size, dtype=dtype, device=device))

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

    def __init__(
        self,
        paged: PagedPlan | TablePlan,
        branches: Sequence[Branches],
        cache: KVCache,
        arena: Arena,
        attention: PagedAttention | None = None,
    ) -> None:
        """`attention` is the backend for the shared paths; without one they are read span by span."""
        device = cache.keys.device
        self._paged, self._cache, self._arena, self._attention = paged, cache, arena, attention
        self._scale = cache.keys.shape[-1] ** -0.5
        positions = torch.tensor([p for b in branches for p in b.positions], dtype=torch.long, device=device)
        self.positions = torch.cat((paged.positions, positions))
        self._cells = torch.tensor([cell for b in branches for cell in b.cells], dtype=torch.long, device=device)
        self._depths = torch.tensor([depth for b in branches for depth in b.depths], dtype=torch.long, device=device)
        self._longest = max((depth + 1 for b in branches for depth in b.depths), default=0)
        self._branches = branches
        ours = bool(branches) and attention is None and cpu.serve(cache.keys)
        self._places = _places(branches, cache, arena) if ours else None
        self._views: Views | None = None
        self._own_masks: dict[int | None, Tensor] = {}
        self._found: dict[int | None, list[_Context]] = {}

    def _own_mask(self, window: int | None) -> Tensor:
        """[n, 1, 1, longest]: what branches see of their own keys in layers with this window; found out once."""
        if window not in self._own_masks:
            places = torch.arange(self._longest, device=self._depths.device)
            hidden = places > self._depths[:, None]
            if window is not None:
                hidden |= places <= self._depths[:, None] - window
            self._own_masks[window] = minus_infinity(hidden, self._cache.keys.dtype)[:, None, None]
        return self._own_masks[window]

    def _contexts(self, window: int | None) -> list[_Context]:
        if window not in self._found:
            self._found[window] = [_context(self._cache, branches, window) for branches in self._branches]
        return self._found[window]

    def views(self) -> Views | None:
        path, ours = self._paged.view, self._places is not None or not self._branches
        if self._views is None and path is not None and ours:
            self._views = Views([path] if self._places is None else [path, View(*self._places)])
        return self._views

    def show(self, layers: int, x: Tensor) -> None:
        pass

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: Scores = PLAIN) -> Tensor:
        split = self._paged.positions.shape[0]
        parts = []
        if split:
            parts.append(self._paged.attend(layer, q[:split], k[:split], v[:split], rule))
        if self._branches:
            parts.append(self._attend_branches(layer, q[split:], k[split:], v[split:], rule))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_branches(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: Scores) -> Tensor:
        scale = self._scale if rule.scale is None else rule.scale
        if self._places is not None:
            shared, chains = self._places
            chains.put(layer, k, v)
            attended = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
            shared.attend(layer, q, attended, range(len(q)), scale, rule.softcap, rule.window, own=chains)
            return attended
        keys, values = self._arena.keys[layer], self._arena.values[layer]
        keys[self._cells, self._depths], values[self._cells, self._depths] = k, v
        mask, length = self._own_mask(rule.window), self._longest
        own = attend_own(q, keys[self._cells, :length], values[self._cells, :length], scale, mask, rule)
        if self._attention is None:
            return merge(self._shared(layer, q, scale, rule), own).flatten(1)
        paths = self._cache.keys[layer], self._cache.values[layer]
        return merge(self._attention.part(q, *paths, self._shared_rows, scale, rule), own).flatten(1)

    def _shared(self, layer: int, q: Tensor, scale: float, rule: Scores) -> tuple[Tensor, Tensor]:
        """What the branches of every sequence make of the path they share."""
        outs, totals, start = [], [], 0
        for count, span, mask in self._contexts(rule.window):
            part = q[start : start + count]
            out, total = attend_part(
                part, self._cache.keys[layer][span], self._cache.values[layer][span], scale, mask, rule
            )
            outs.append(out)
            totals.append(total)
            start += count
        return torch.cat(outs), torch.cat(totals)

    @cached_property
    def _shared_rows(self) -> PagedRows:
        """The same paths as a backend wants them: a row for the branches of every sequence."""
        device, size = self._cache.keys.device, self._cache.page_size
        used = [list(b.pages[: -(-(b.base + max(b.forks)) // size)]) for b in self._branches]
        longest = max(map(len, used))
        counts = [len(b.forks) for b in self._branches]
        seen = [b.base + fork for b in self._branches for fork in b.forks]
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


def _places(branches: Sequence[Branches], cache: KVCache, arena: Arena) -> tuple[Places, Places]:
    """What each branch sees of its sequence's path, and of its own chain."""
    slots, starts = cache.all_slots([b.pages for b in branches], [b.base + max(b.forks) for b in branches])
    begin = [start for start, b in zip(starts, branches, strict=True) for _ in b.forks]
    shared = Places(cache.keys, cache.values, slots, begin, [b.base + fork for b in branches for fork in b.forks])
    cells, depth = arena.keys.shape[1:3]
    own_begin = [cell * depth for b in branches for cell in b.cells]
    own_count = [place + 1 for b in branches for place in b.depths]
    return shared, Places(arena.keys, arena.values, torch.arange(cells * depth), own_begin, own_count)


class _Context(NamedTuple):
    """How many branches a sequence has, where the keys they share lie, and the mask over the last of these."""

    branches: int
    span: Span
    mask: Tensor | None


def _context(cache: KVCache, branches: Branches, window: int | None) -> _Context:
    device, dtype = cache.keys.device, cache.keys.dtype
    count, deepest = len(branches.forks), max(branches.forks)
    length = branches.base + deepest
    span = cache.span(branches.pages, length)
    if window is None and deepest == 0:
        return _Context(count, span, None)
    # Line tokens after its fork are hidden from a branch, and what lies before its window.
    positions = branches.positions
    first = branches.base if window is None else max(0, min(min(positions) + 1 - window, length - 1))
    places = torch.arange(first, length, device=device)
    hidden = places >= branches.base + torch.tensor(branches.forks, device=device)[:, None]
    if window is None:
        return _Context(count, span, minus_infinity(hidden, dtype)[:, None])
    hidden |= places <= torch.tensor(positions, device=device)[:, None] - window
    return _Context(count, last(span, length - first), very_low(hidden, dtype)[:, None])
