"""Ways in which tokens of a batch attend over pages, each way for some of the rows.

Our kernel takes a token at a time. Torch multiplies matrices: those of one row at a time, or, side by side, those of
many rows of one token each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ssd.execution.batch import Row, tokens_of
from ssd.execution.kv_cache import KVCache, Span, last
from ssd.kernels.attention import Places
from ssd.layers.attention import Scores, attend, attend_each, attend_own, minus_infinity

# From so many rows of one token on, gathering their keys costs less than a loop over them (docs/performance.md).
_TOGETHER = 16
# The longest row whose tokens attend one by one in our kernel, any verification among them. Longer ones, of prompts,
# gain more from products of matrices than they lose by calls.
_KERNEL_TOKENS = 32


class Way(Protocol):
    def attend(self, layer: int, q: Tensor, out: Tensor, scale: float, rule: Scores) -> None:
        """Attention of some tokens of the batch, whose keys and values are in the cache: of q [n, heads, dim] into
        out [n, heads * dim], where other tokens' results stay as they are."""


def by_kernel(rows: Sequence[Row], cache: KVCache, places: Places, deterministic: bool) -> list[Way]:
    """How all rows attend where our kernel serves; `places` are those of their tokens."""
    parts = list(zip(tokens_of(rows), rows, strict=True))
    long = [(tokens, row) for tokens, row in parts if len(tokens) > _KERNEL_TOKENS and not deterministic]
    if not long:
        return [Kernel(places, [range(places.tokens)])]
    short = [tokens for tokens, _ in parts if len(tokens) <= _KERNEL_TOKENS]
    return [Kernel(places, short), RowByRow(long, cache)]


def by_torch(rows: Sequence[Row], cache: KVCache, deterministic: bool) -> list[Way]:
    """How all rows attend where it does not."""
    parts = list(zip(tokens_of(rows), rows, strict=True))
    singles = [(tokens, row) for tokens, row in parts if len(tokens) == 1]
    if deterministic or not _pay_together([row for _, row in singles]):
        return [RowByRow(parts, cache, token_by_token=deterministic)]
    longer = [(tokens, row) for tokens, row in parts if len(tokens) > 1]
    return [SideBySide(singles, cache), RowByRow(longer, cache)]


def _pay_together(singles: Sequence[Row]) -> bool:
    """Whether there are enough of them, of lengths near enough for padding not to double what is read."""
    lengths = [row.stop for row in singles]
    return len(singles) >= _TOGETHER and len(singles) * max(lengths) <= 2 * sum(lengths)


class Kernel:
    """Runs of `tokens`, each of which sees what `places` say."""

    def __init__(self, places: Places, tokens: Sequence[range]) -> None:
        self._places, self._tokens = places, tokens

    def attend(self, layer: int, q: Tensor, out: Tensor, scale: float, rule: Scores) -> None:
        for tokens in self._tokens:
            self._places.attend(layer, q, out, tokens, scale, rule.softcap, rule.window)


class RowByRow:
    """Rows and where in the batch their tokens lie. `token_by_token`: every token attends by itself, so that no result
    depends on the length of its row."""

    def __init__(self, rows: Sequence[tuple[range, Row]], cache: KVCache, *, token_by_token: bool = False) -> None:
        self._cache, self._attend = cache, _one_by_one if token_by_token else attend
        self._rows = [(tokens, row.stop, cache.span(row.pages, row.stop)) for tokens, row in rows]

    def attend(self, layer: int, q: Tensor, out: Tensor, scale: float, rule: Scores) -> None:
        all_keys, all_values = self._cache.keys[layer], self._cache.values[layer]
        for tokens, length, span in self._rows:
            seen, here = last(span, rule.reach(len(tokens), length)), slice(tokens.start, tokens.stop)
            out[here] = self._attend(q[here], _taken(all_keys, seen), _taken(all_values, seen), scale, rule)


def _taken(kind: Tensor, span: Span) -> Tensor:
    """What lies in a span of the cache; `index_select` copies in half the time of indexing."""
    return kind[span] if isinstance(span, slice) else kind.index_select(0, span)


def _one_by_one(q: Tensor, keys: Tensor, values: Tensor, scale: float, rule: Scores) -> Tensor:
    before = keys.shape[0] - q.shape[0]
    parts = [
        attend(q[i : i + 1], keys[: before + i + 1], values[: before + i + 1], scale, rule) for i in range(q.shape[0])
    ]
    return torch.cat(parts)


class SideBySide:
    """Rows of one token, and where in the batch it lies: in one go over keys that are gathered side by side."""

    def __init__(self, singles: Sequence[tuple[range, Row]], cache: KVCache) -> None:
        device, rows = cache.keys.device, [row for _, row in singles]
        self._cache = cache
        self._where = torch.tensor([tokens.start for tokens, _ in singles], device=device)
        lengths = [row.stop for row in rows]
        self._table = cache.table([row.pages for row in rows], lengths)
        self._lengths = torch.tensor(lengths, device=device)[:, None]
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, layer: int, q: Tensor, out: Tensor, scale: float, rule: Scores) -> None:
        keys, values = (
            kind[layer].index_select(0, self._table.flatten()).view(*self._table.shape, *kind.shape[2:])
            for kind in (self._cache.keys, self._cache.values)
        )
        mask = self._mask(rule.window, q.dtype)
        if rule.softcap is not None:  # which torch's fused attention does not know
            out[self._where] = attend_own(q[self._where], keys, values, scale, mask, rule)[0].flatten(1)
        else:
            out[self._where] = attend_each(q[self._where], keys, values, scale, mask)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """[n, 1, 1, longest]: hides what lies behind the end of a row, and before its window."""
        if window not in self._masks:
            positions = torch.arange(self._table.shape[1], device=self._lengths.device)
            hidden = positions >= self._lengths
            if window is not None:
                hidden |= positions < self._lengths - window
            self._masks[window] = minus_infinity(hidden, dtype)[:, None, None]
        return self._masks[window]
