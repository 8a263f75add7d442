"""Layers whose weights lie in parts on several ranks (Shoeybi et al., arXiv 1909.08053)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ssd.layers.ranks import Ranks


class RowParallel:
    """A linear layer of which each rank has the columns of W for its part of x; their products are summed."""

    def __init__(self, partial: Callable[[Tensor], Tensor], ranks: Ranks) -> None:
        """`partial` gives this rank's product. A bias is in that of rank 0 alone."""
        self._partial, self._ranks = partial, ranks

    def __call__(self, x: Tensor) -> Tensor:
        return self._ranks.sum(self._partial(x))


class Embedding:
    """int64 [n] -> rows of `weight`, [n, width]."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self._weight[token_ids]


class ParallelEmbedding:
    """The same of a table of which this rank has the rows from id `first` on."""

    def __init__(self, weight: Tensor, first: int, ranks: Ranks) -> None:
        self._weight, self._first, self._ranks = weight, first, ranks

    def __call__(self, token_ids: Tensor) -> Tensor:
        here = token_ids - self._first
        elsewhere = (here < 0) | (here >= len(self._weight))
        found = self._weight[here.masked_fill(elsewhere, 0)]
        # Not multiplied by 0, which would not hide a row that is no number.
        return self._ranks.sum(torch.where(elsewhere[:, None], torch.zeros_like(found), found))
