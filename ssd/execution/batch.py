"""One ragged batch: prefill chunk, decode and verification are rows of different length (contract C4)."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ssd.execution.kv_cache import KVCache, Span, last
from ssd.kernels import cpu
from ssd.kernels.attention import Places, View
from ssd.kernels.decoder import Views
from ssd.layers.attention import PLAIN, Scores, attend, attend_each, attend_own, minus_infinity

# From so many rows of one token on, gathering their keys costs less than a loop over them (docs/performance.md).
_TOGETHER = 16
# The longest row whose tokens attend one by one in our kernel, any verification among them. Longer ones, of prompts,
# gain more from products of matrices than they lose by calls.
_KERNEL_TOKENS = 32


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


def _tokens(rows: Sequence[Row]) -> list[range]:
    """Which tokens of the batch are those of each row."""
    stops = accumulate((len(row.token_ids) for row in rows), initial=0)
    return [range(start, start + len(row.token_ids)) for start, row in zip(stops, rows, strict=False)]


def _places(cache: KVCache, rows: Sequence[Row]) -> Places:
    """What each token of the batch sees, itself the last."""
    slots, starts = cache.all_slots([row.pages for row in rows], [row.stop for row in rows])
    begin = [start for start, row in zip(starts, rows, strict=True) for _ in row.token_ids]
    count = [position + 1 for row in rows for position in range(row.start, row.stop)]
    return Places(cache.keys, cache.values, slots, begin, count)


class Showing:
    """A plan that keeps of `layers`, in `shown`, the hidden states [tokens, width] of a forward.

    `view` is what the tokens see, where our kernel attends with all of them.
    """

    view: View | None = None

    def __init__(self, layers: Container[int] = ()) -> None:
        self._layers, self.shown = layers, dict[int, Tensor]()
        self._views: Views | None = None

    def views(self) -> Views | None:
        if self._views is None and self.view is not None:
            self._views = Views([self.view])
        return self._views

    def show(self, layers: int, x: Tensor) -> None:
        if layers in self._layers:
            self.shown[layers] = x


class PagedPlan(Showing):
    """The plan (see `ssd.models.interface.Plan`) of a list of rows over a paged cache.

    `deterministic`: every token attends by itself, so that no result depends on the length of its row.
    """

    def __init__(
        self, rows: Sequence[Row], cache: KVCache, deterministic: bool = False, layers: Container[int] = ()
    ) -> None:
        super().__init__(layers)
        device = cache.keys.device
        self._cache, self._deterministic = cache, deterministic
        positions = [position for row in rows for position in range(row.start, row.stop)]
        self.positions = torch.tensor(positions, dtype=torch.long, device=device)
        self._scale = cache.keys.shape[-1] ** -0.5
        self._places = _places(cache, rows) if cpu.serve(cache.keys) else None
        self._by_kernel: list[range] = []
        self._parts: list[tuple[range, int, Span]] = []
        self._singles: _Singles | None = None
        if self._places is None:
            slots = [slot for row in rows for slot in cache.slots(row.pages, row.start, row.stop)]
            self._slots = torch.tensor(slots, dtype=torch.long, device=device)
            singles = [row for row in rows if len(row.token_ids) == 1]
            if not deterministic and _pays_together(singles):
                self._singles = _Singles(rows, singles, cache)
        for row, tokens in zip(rows, _tokens(rows), strict=True):
            if self._places is not None and (deterministic or len(tokens) <= _KERNEL_TOKENS):
                self._by_kernel.append(tokens)
            elif self._singles is None or len(tokens) > 1:
                self._parts.append((tokens, row.stop, cache.span(row.pages, row.stop)))
        if not self._parts and self._places is not None:
            self._by_kernel, self.view = [range(len(positions))], View(self._places)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: Scores = PLAIN) -> Tensor:
        scale = self._scale if rule.scale is None else rule.scale
        out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
        if self._places is not None:
            self._places.put(layer, k, v)
            for tokens in self._by_kernel:
                self._places.attend(layer, q, out, tokens, scale, rule.softcap, rule.window)
        else:
            self._cache.write(layer, self._slots, k, v)
        all_keys, all_values = self._cache.keys[layer], self._cache.values[layer]
        if self._singles is not None:
            out[self._singles.where] = self._singles.attend(q, all_keys, all_values, scale, rule)
        for tokens, length, span in self._parts:
            seen, here = last(span, rule.reach(len(tokens), length)), slice(tokens.start, tokens.stop)
            keys, values = _taken(all_keys, seen), _taken(all_values, seen)
            each = _one_by_one if self._deterministic else attend
            out[here] = each(q[here], keys, values, scale, rule)
        return out


def _one_by_one(q: Tensor, keys: Tensor, values: Tensor, scale: float, rule: Scores) -> Tensor:
    before = keys.shape[0] - q.shape[0]
    parts = [
        attend(q[i : i + 1], keys[: before + i + 1], values[: before + i + 1], scale, rule) for i in range(q.shape[0])
    ]
    return torch.cat(parts)
