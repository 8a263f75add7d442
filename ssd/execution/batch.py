"""One ragged batch: prefill chunk, decode and verification are rows of different length (contract C4)."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ssd.execution.kv_cache import KVCache, Span, last
from ssd.layers.attention import PLAIN, Scores, attend, attend_each, attend_own, minus_infinity

# From so many rows of one token on, gathering their keys costs less than a loop over them (docs/performance.md).
_TOGETHER = 16


@dataclass(frozen=True)
class Row:
    """`token_ids` of one sequence, the first at absolute position `start`; `pages` covers all of them.

    The logits of the last `outputs` tokens are wanted. Rows of one sequence have the same `slot`, a small number.
    """

    token_ids: Sequence[int]
    start: int
    pages: Sequence[int]
    outputs: int = 1
    slot: int = 0

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def predicted(self) -> range:
        """The positions that the outputs are about: the logits at p are about the token at p + 1."""
        return range(self.stop - self.outputs + 1, self.stop + 1)


def output_indices(rows: Sequence[Row]) -> list[int]:
    """Where the wanted logits of the rows lie in their concatenated tokens."""
    indices: list[int] = []
    stop = 0
    for row in rows:
        stop += len(row.token_ids)
        indices += range(stop - row.outputs, stop)
    return indices


def _pays_together(singles: Sequence[Row]) -> bool:
    """Whether there are enough of them, of lengths near enough for padding not to double what is read."""
    lengths = [row.stop for row in singles]
    return len(singles) >= _TOGETHER and len(singles) * max(lengths) <= 2 * sum(lengths)


def _taken(kind: Tensor, span: Span) -> Tensor:
    """What lies in a span of the cache; `index_select` copies in half the time of indexing."""
    return kind[span] if isinstance(span, slice) else kind.index_select(0, span)


class _Singles:
    """The rows of one token, `where` in a batch, attending in one go over keys gathered side by side."""

    def __init__(self, rows: Sequence[Row], singles: Sequence[Row], cache: KVCache) -> None:
        device = cache.keys.device
        starts = accumulate((len(row.token_ids) for row in rows), initial=0)
        self.where = torch.tensor(
            [start for start, row in zip(starts, rows, strict=False) if len(row.token_ids) == 1], device=device
        )
        lengths = [row.stop for row in singles]
        self._table = cache.table([row.pages for row in singles], lengths)
        self._lengths = torch.tensor(lengths, device=device)[:, None]
        self._masks: dict[int | None, Tensor] = {}

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """[n, 1, 1, longest]: hides what lies behind the end of a row, and before its window."""
        if window not in self._masks:
            positions = torch.arange(self._table.shape[1], device=self._lengths.device)
            hidden = positions >= self._lengths
            if window is not None:
                hidden |= positions < self._lengths - window
            self._masks[window] = minus_infinity(hidden, dtype)[:, None, None]
        return self._masks[window]

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, scale: float, rule: Scores) -> Tensor:
        own_keys, own_values = (
            kind.index_select(0, self._table.flatten()).view(*self._table.shape, *kind.shape[1:])
            for kind in (keys, values)
        )
        mask = self._mask(rule.window, q.dtype)
        if rule.softcap is not None:  # which torch's fused attention does not know
            return attend_own(q[self.where], own_keys, own_values, scale, mask, rule)[0].flatten(1)
        return attend_each(q[self.where], own_keys, own_values, scale, mask)


class PagedPlan:
    """The plan (see `ssd.models.interface.Plan`) of a list of rows over a paged cache.

    `deterministic`: every token attends by itself, so that no result depends on the length of its row. Of `layers`,
    `shown` keeps the hidden states [tokens, width] of a forward.
    """

    def __init__(
        self, rows: Sequence[Row], cache: KVCache, deterministic: bool = False, layers: Container[int] = ()
    ) -> None:
        self._layers, self.shown = layers, dict[int, Tensor]()
        device = cache.keys.device
        self._cache, self._deterministic = cache, deterministic
        positions = [position for row in rows for position in range(row.start, row.stop)]
        slots = [slot for row in rows for slot in cache.slots(row.pages, row.start, row.stop)]
        self.positions = torch.tensor(positions, dtype=torch.long, device=device)
        self._slots = torch.tensor(slots, dtype=torch.long, device=device)
        singles = [row for row in rows if len(row.token_ids) == 1]
        together = not deterministic and _pays_together(singles)
        self._singles = _Singles(rows, singles, cache) if together else None
        self._parts: list[tuple[int, int, int, Span]] = []
        offset = 0
        for row in rows:
            if not (together and len(row.token_ids) == 1):
                span = cache.span(row.pages, row.stop)
                self._parts.append((offset, offset + len(row.token_ids), row.stop, span))
            offset += len(row.token_ids)
        self._scale = cache.keys.shape[-1] ** -0.5

    def show(self, layers: int, x: Tensor) -> None:
        if layers in self._layers:
            self.shown[layers] = x

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: Scores = PLAIN) -> Tensor:
        self._cache.write(layer, self._slots, k, v)
        all_keys, all_values = self._cache.keys[layer], self._cache.values[layer]
        scale = self._scale if rule.scale is None else rule.scale
        parts: list[Tensor] = []
        for start, stop, length, span in self._parts:
            seen = last(span, rule.reach(stop - start, length))
            keys, values = _taken(all_keys, seen), _taken(all_values, seen)
            if self._deterministic:
                parts += _one_by_one(q[start:stop], keys, values, scale, rule)
            else:
                parts.append(attend(q[start:stop], keys, values, scale, rule))
        if self._singles is None:
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
        out[self._singles.where] = self._singles.attend(q, all_keys, all_values, scale, rule)
        for (start, stop, _, _), part in zip(self._parts, parts, strict=True):
            out[start:stop] = part
        return out


def _one_by_one(q: Tensor, keys: Tensor, values: Tensor, scale: float, rule: Scores) -> list[Tensor]:
    before = keys.shape[0] - q.shape[0]
    return [
        attend(q[i : i + 1], keys[: before + i + 1], values[: before + i + 1], scale, rule) for i in range(q.shape[0])
    ]
