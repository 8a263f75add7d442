"""One ragged batch: prefill chunk, decode and verification are rows of different length (contract C4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ssd.execution.kv_cache import KVCache
from ssd.layers.attention import attend


@dataclass(frozen=True)
class Row:
    """`token_ids` of one sequence, the first at absolute position `start`; `pages` covers all of them.

    The logits of the last `outputs` tokens are wanted.
    """

    token_ids: Sequence[int]
    start: int
    pages: Sequence[int]
    outputs: int = 1

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)


def output_indices(rows: Sequence[Row]) -> list[int]:
    """Where the wanted logits of the rows lie in their concatenated tokens."""
    indices: list[int] = []
    stop = 0
    for row in rows:
        stop += len(row.token_ids)
        indices += range(stop - row.outputs, stop)
    return indices


class PagedPlan:
    """The plan (see `ssd.models.interface.Plan`) of a list of rows over a paged cache.

    `deterministic`: every token attends by itself, so that no result depends on the length of its row.
    """

    def __init__(self, rows: Sequence[Row], cache: KVCache, deterministic: bool = False) -> None:
        device = cache.keys.device
        self._cache, self._deterministic = cache, deterministic
        positions = [position for row in rows for position in range(row.start, row.stop)]
        slots = [slot for row in rows for slot in cache.slots(row.pages, row.start, row.stop)]
        self.positions = torch.tensor(positions, dtype=torch.long, device=device)
        self._slots = torch.tensor(slots, dtype=torch.long, device=device)
        self._parts: list[tuple[int, int, slice | Tensor]] = []
        offset = 0
        for row in rows:
            self._parts.append((offset, offset + len(row.token_ids), cache.span(row.pages, row.stop)))
            offset += len(row.token_ids)
        self._scale = cache.keys.shape[-1] ** -0.5

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._cache.write(layer, self._slots, k, v)
        all_keys, all_values = self._cache.keys[layer], self._cache.values[layer]
        parts = []
        for start, stop, span in self._parts:
            keys, values = all_keys[span], all_values[span]
            if self._deterministic:
                parts += self._one_by_one(q[start:stop], keys, values)
            else:
                parts.append(attend(q[start:stop], keys, values, self._scale))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _one_by_one(self, q: Tensor, keys: Tensor, values: Tensor) -> list[Tensor]:
        before = keys.shape[0] - q.shape[0]
        return [
            attend(q[i : i + 1], keys[: before + i + 1], values[: before + i + 1], self._scale)
            for i in range(q.shape[0])
        ]
