"""Attention of an unpadded batch over pages, by our kernel or torch, without a backend.

Our kernel takes all rows. Torch takes one row at a time, or many rows of one token together."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from functools import cached_property

import torch
from torch import Tensor

from ssd.execution.batch import BaseContext, Row, tokens_of
from ssd.execution.kv_cache import KVCache, Span, last
from ssd.kernels.attention import KVSpans, View
from ssd.kernels.decoder import Views
from ssd.layers.attention import PLAIN, Scores, attend, attend_each, attend_own, minus_infinity

# Rows of one token from which on gathering their keys costs less than a loop over them (docs/performance.md).
_BATCHED_ROWS = 16


class PagedContext(BaseContext):
    """The forward context of rows over a paged cache.

    `deterministic`: every token attends by itself, whatever the length of its row; our kernel always does so."""

    def __init__(
        self, rows: Sequence[Row], cache: KVCache, deterministic: bool = False, layers: Collection[int] = ()
    ) -> None:
        super().__init__(layers)
        self.places = array("q", [position for row in rows for position in range(row.start, row.stop)])
        self._device = cache.keys.device
        if self._device.type != "cpu":  # a copy sent after the launches would wait for them
            self.positions  # noqa: B018
        self.view = View(_spans(cache, rows, self.places)) if rows and cache.served else None
        self._cache, self._paths = cache, list[RowPath | BatchedPath]()
        if rows and self.view is None:
            slots = [slot for row in rows for slot in cache.slots(row.pages, row.start, row.stop)]
            self._slots = torch.tensor(slots, dtype=torch.long, device=self._device)
            self._paths = _torch_paths(rows, cache, deterministic)

    @cached_property
    def positions(self) -> Tensor:
        """Return the positions as int64 [n]; kernels of a whole decoder read `places`."""
        return torch.tensor(self.places, dtype=torch.long, device=self._device)

    def views(self) -> Views | None:
        return None if self.view is None else Views([self.view], self.places, self._layers)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: Scores = PLAIN) -> Tensor:
        if self.view is not None:
            self.view.shared.put(layer, k, v)
        elif self._paths:
            self._cache.write(layer, self._slots, k, v)
        return self.attend_stored(layer, q, rule)

    def attend_stored(self, layer: int, q: Tensor, rule: Scores = PLAIN) -> Tensor:
        scale, out = rule.scale_of(self._cache.head_dim), q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
        if self.view is not None:
            rest = scale, rule.softcap, rule.window, None, rule.sinks
            self.view.shared.attend(layer, q, out, range(len(q)), *rest)
        for path in self._paths:
            path.attend(layer, q, out, scale, rule)
        return out


def _spans(cache: KVCache, rows: Sequence[Row], positions: Sequence[int]) -> KVSpans:
    slots, starts = cache.all_slots([row.pages for row in rows], [row.stop for row in rows])
    begin = [start for start, row in zip(starts, rows, strict=True) for _ in row.token_ids]
    count = [position + 1 for position in positions]
    return KVSpans(cache.blocks, slots, begin, count)


def _torch_paths(rows: Sequence[Row], cache: KVCache, deterministic: bool) -> list[RowPath | BatchedPath]:
    """Return what attends with the tokens of some rows each, and writes only their rows of the output."""
    parts = list(zip(tokens_of(rows), rows, strict=True))
    singles = [(tokens, row) for tokens, row in parts if len(tokens) == 1]
    lengths = [row.stop for _, row in singles]
    # Padding must not double the number of keys read.
    batched = len(singles) >= _BATCHED_ROWS and len(singles) * max(lengths) <= 2 * sum(lengths)
    if deterministic or not batched:
        return [RowPath(parts, cache, token_by_token=deterministic)]
    longer = [(tokens, row) for tokens, row in parts if len(tokens) > 1]
    return [BatchedPath(singles, cache), RowPath(longer, cache)]


class RowPath:
    """Attends one row at a time; `rows` are (its tokens' indices in the batch, row)."""

    def __init__(self, rows: Sequence[tuple[range, Row]], cache: KVCache, *, token_by_token: bool = False) -> None:
        self._cache, self._attend = cache, _one_by_one if token_by_token else attend
        self._rows = [(tokens, row.stop, cache.span(row.pages, row.stop)) for tokens, row in rows]

    def attend(self, layer: int, q: Tensor, out: Tensor, scale: float, rule: Scores) -> None:
        all_keys, all_values = self._cache.layers[layer]
        for tokens, length, span in self._rows:
            seen, here = last(span, rule.reach(len(tokens), length)), slice(tokens.start, tokens.stop)
            out[here] = self._attend(q[here], _taken(all_keys, seen), _taken(all_values, seen), scale, rule)


def _taken(kind: Tensor, span: Span) -> Tensor:
    return kind[span] if isinstance(span, slice) else kind.index_select(0, span)


def _one_by_one(q: Tensor, keys: Tensor, values: Tensor, scale: float, rule: Scores) -> Tensor:
    before = keys.shape[0] - q.shape[0]
    parts = [
        attend(q[i : i + 1], keys[: before + i + 1], values[: before + i + 1], scale, rule) for i in range(q.shape[0])
    ]
    return torch.cat(parts)


class BatchedPath:
    """Attends with rows of one token together, over padded keys."""

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
            kind.index_select(0, self._table.flatten()).view(*self._table.shape, *kind.shape[1:])
            for kind in self._cache.layers[layer]
        )
        mask = self._mask(rule.window, q.dtype)
        if rule.softcap is not None or rule.sinks is not None:  # which torch's fused attention does not know
            parts = attend_own(q[self._where], keys, values, scale, mask, rule)
            out[self._where] = rule.sunk(*parts).flatten(1)
        else:
            out[self._where] = attend_each(q[self._where], keys, values, scale, mask)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return a mask [n, 1, 1, longest] that hides padding, and keys before the window."""
        if window not in self._masks:
            positions = torch.arange(self._table.shape[1], device=self._lengths.device)
            hidden = positions >= self._lengths
            if window is not None:
                hidden |= positions < self._lengths - window
            self._masks[window] = minus_infinity(hidden, dtype)[:, None, None]
        return self._masks[window]
