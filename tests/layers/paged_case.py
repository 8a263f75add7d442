"""Batches over pages with random queries, keys and values, and what attention makes of each row by itself."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from ssd.layers.attention import PLAIN, Scores, attend
from ssd.layers.paged import PagedRows


class Case(NamedTuple):
    """A batch over a cache whose other slots hold NaN, and each row's queries, keys and values."""

    rows: PagedRows
    q: Tensor
    keys: Tensor
    values: Tensor
    texts: list[tuple[Tensor, Tensor, Tensor]]

    def expected(self, scale: float, rule: Scores = PLAIN) -> Tensor:
        """[queries, heads * dim] in double precision."""
        return torch.cat([attend(q.double(), k.double(), v.double(), scale, rule) for q, k, v in self.texts if len(q)])


def case(
    lengths: Sequence[tuple[int, int]],
    heads: tuple[int, int] = (4, 2),
    dim: int = 16,
    page: int = 4,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Of each row its queries and its keys, the queries being the last ones; pages and sequences in any order."""
    dice, generator = Random(1), torch.Generator().manual_seed(2)
    needed = [-(-keys // page) for _, keys in lengths]
    free = list(range(sum(needed) + 3))
    dice.shuffle(free)
    order = list(range(len(lengths)))
    dice.shuffle(order)
    width = max(needed) + 2
    table = torch.randint(0, len(free), (len(lengths), width), dtype=torch.int32, generator=generator)
    keys, values = (torch.full((len(free) * page, heads[1], dim), torch.nan, dtype=dtype) for _ in range(2))
    texts, starts, seen = [], [0], []
    for sequence, (queries, length) in zip(order, lengths, strict=True):
        pages = [free.pop() for _ in range(-(-length // page))]
        table[sequence, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        q, k, v = (
            torch.randn(count, number, dim, generator=generator).to(dtype)
            for count, number in ((queries, heads[0]), (length, heads[1]), (length, heads[1]))
        )
        slots = torch.tensor([pages[p // page] * page + p % page for p in range(length)], dtype=torch.long)
        keys[slots], values[slots] = k, v
        texts.append((q, k, v))
        starts.append(starts[-1] + queries)
        seen += range(length - queries + 1, length + 1)
    rows = PagedRows(
        table,
        torch.tensor(order, dtype=torch.int32),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(seen),
        torch.tensor(seen) - 1,
        page,
        max(queries for queries, _ in lengths),
    )
    return Case(rows, torch.cat([q for q, _, _ in texts]), keys, values, texts)
