"""The plan of a batch whose sequences lie in pages, as it comes: on a CPU, and wherever there is no other backend."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import torch
from torch import Tensor

from ssd.execution.batch import Row, Showing
from ssd.execution.kv_cache import KVCache
from ssd.execution.ways import Way, by_kernel, by_torch
from ssd.kernels import cpu
from ssd.kernels.attention import Places, View
from ssd.layers.attention import PLAIN, Scores


class PagedPlan(Showing):
    """The plan (see `ssd.models.interface.Plan`) of a list of rows over a paged cache.

    `deterministic`: every token attends by itself, so that no result depends on the length of its row.
    """

    def __init__(
        self, rows: Sequence[Row], cache: KVCache, deterministic: bool = False, layers: Container[int] = ()
    ) -> None:
        super().__init__(layers)
        positions = [position for row in rows for position in range(row.start, row.stop)]
        self.positions = torch.tensor(positions, dtype=torch.long, device=cache.keys.device)
        self._scale = cache.keys.shape[-1] ** -0.5
        self._put: Callable[[int, Tensor, Tensor], None]
        self._ways: list[Way]
        if cpu.serve(cache.keys):
            places = _places(cache, rows)
            self._put, self._ways = places.put, by_kernel(rows, cache, places, deterministic)
            if len(self._ways) == 1:
                self.view = View(places)
        else:
            self._put, self._ways = _writer(cache, rows), by_torch(rows, cache, deterministic)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: Scores = PLAIN) -> Tensor:
        scale = self._scale if rule.scale is None else rule.scale
        out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
        self._put(layer, k, v)
        for way in self._ways:
            way.attend(layer, q, out, scale, rule)
        return out


def _places(cache: KVCache, rows: Sequence[Row]) -> Places:
    """What each token of the batch sees, itself the last."""
    slots, starts = cache.all_slots([row.pages for row in rows], [row.stop for row in rows])
    begin = [start for start, row in zip(starts, rows, strict=True) for _ in row.token_ids]
    count = [position + 1 for row in rows for position in range(row.start, row.stop)]
    return Places(cache.keys, cache.values, slots, begin, count)


def _writer(cache: KVCache, rows: Sequence[Row]) -> Callable[[int, Tensor, Tensor], None]:
    """Stores what the tokens of the batch add."""
    numbers = [slot for row in rows for slot in cache.slots(row.pages, row.start, row.stop)]
    slots = torch.tensor(numbers, dtype=torch.long, device=cache.keys.device)
    return lambda layer, k, v: cache.write(layer, slots, k, v)
