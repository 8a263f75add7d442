"""A batch as tensors of fixed shapes, for attention backends that read page tables (`ssd.layers.paged`).

What a round has to tell the device is one array of integers, which goes there in one copy; page tables stay there and
are told what is new.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssd.execution.batch import Row, Showing
from ssd.execution.kv_cache import KVCache
from ssd.layers.attention import PLAIN, Scores
from ssd.layers.paged import PagedAttention, PagedRows


class Draw(NamedTuple):
    """What decides the token after a token: the halves of its noise's key (`ssd.speculation.noise.halves`), and one
    over its temperature; 0 is greedy."""

    low: int = 0
    high: int = 0
    inverse_temperature: float = 0.0


class Upload:
    """A host array and its copy on a device; the host's may be written again once `wait` has returned."""

    def __init__(self, size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        cuda = device.type == "cuda"
        host = torch.zeros(size, dtype=dtype, pin_memory=cuda)
        self.host: Any = host.numpy()  # shares its memory
        self.device = torch.zeros(size, dtype=dtype, device=device)
        self._host, self._copied = host, torch.cuda.Event() if cuda else None

    def wait(self) -> None:
        """Until the last `send` has read the host's array."""
        if self._copied is not None:
            self._copied.synchronize()

    def send(self, part: int | slice = slice(None)) -> None:
        """Copy a part of the host's array, in the order of the device's work."""
        self.device[part].copy_(self._host[part], non_blocking=True)
        if self._copied is not None:
            self._copied.record()


class Tables:
    """Page tables on the device, int32 [sequences + 1, pages]: one for each slot, and that of a dummy sequence, which
    has one page and nothing of worth in it (invariant I6 of docs/gpu.md)."""

    def __init__(self, sequences: int, pages: int, dummy_page: int, device: torch.device) -> None:
        self._upload = Upload((sequences + 1, pages), torch.int32, device)
        self._upload.host[:] = dummy_page
        self._upload.send()
        self._known: list[list[int]] = [[] for _ in range(sequences)]
        self.dummy, self.dummy_page = sequences, dummy_page

    @property
    def tensor(self) -> Tensor:
        return self._upload.device

    def tell(self, found: Iterable[tuple[int, Sequence[int]]]) -> None:
        """These are the pages of some slots that will be read; those behind them may be anything."""
        longest: dict[int, list[int]] = {}
        for slot, pages in found:
            longest[slot] = max(longest.get(slot, []), list(pages), key=len)
        new = {slot: pages for slot, pages in longest.items() if self._known[slot][: len(pages)] != pages}
        if new:
            self._upload.wait()  # once: what is sent now may have to wait for a forward that runs
        for slot, pages in new.items():
            self._known[slot] = pages
            self._upload.host[slot, : len(pages)] = pages
            self._upload.send(slot)


class BatchTensors:
    """What a forward reads of a batch of at most `tokens` tokens in at most `rows` rows, none longer than `longest`.

    Tokens that are too many belong to rows of a dummy sequence, rows that are too many have no tokens: shapes never
    change.
    """

    def __init__(self, tokens: int, rows: int, longest: int, device: torch.device) -> None:
        self.tokens, self.rows, self.longest = tokens, rows, longest
        self._upload = Upload((6 * tokens + 2 * rows + 1,), torch.int64, device)
        self._sizes = [tokens] * 6 + [rows + 1, rows]

    def fill(
        self,
        rows: Sequence[Row],
        tables: Sequence[int],
        cache: KVCache,
        dummy: int = 0,
        dummy_page: int = 0,
        draws: Sequence[Draw] = (),
    ) -> None:
        """Write `rows`, whose page tables have the numbers `tables`, and what to draw after each token; send it all."""
        counts = [len(row.token_ids) for row in rows]
        used = sum(counts)
        spare = [min(self.longest, self.tokens - start) for start in range(used, self.tokens, self.longest)]
        counts += spare
        assert used <= self.tokens and len(counts) <= self.rows, "a batch that fits"
        assert max(counts, default=0) <= self.longest, "rows that fit"
        counts += [0] * (self.rows - len(counts))
        self._upload.wait()
        ids, positions, slots, low, high, inverse, starts, sequences = self._fields()
        ids[:used] = [token for row in rows for token in row.token_ids]
        positions[:used] = [position for row in rows for position in range(row.start, row.stop)]
        slots[:used] = [slot for row in rows for slot in cache.slots(row.pages, row.start, row.stop)]
        ids[used:], positions[used:], slots[used:] = 0, 0, dummy_page * cache.page_size
        inverse[:] = 0.0
        if draws:
            low[:used], high[:used], inverse[:used] = zip(*draws, strict=True)
        starts[:] = list(accumulate(counts, initial=0))
        sequences[: len(rows)], sequences[len(rows) :] = list(tables), dummy
        self._upload.send()

    def _fields(self) -> list[Any]:
        fields, start = [], 0
        for size in self._sizes:
            fields.append(self._upload.host[start : start + size])
            start += size
        fields[5] = fields[5].view("float64")
        return fields

    @property
    def fields(self) -> tuple[Tensor, ...]:
        """On the device: ids, positions, places in the cache, the halves and (as the bits of float64) the inverse
        temperatures of draws, all [tokens]; where rows begin [rows + 1]; their tables [rows]."""
        return self._upload.device.split(self._sizes)

    @property
    def ids(self) -> Tensor:
        """int64 [tokens]."""
        return self._upload.device[: self.tokens]

    @property
    def draws(self) -> tuple[Tensor, Tensor]:
        """The halves int32 [tokens, 2] and the inverse temperatures float32 [tokens] of the draws."""
        _, _, _, low, high, inverse, *_ = self.fields
        return torch.stack((low, high), dim=-1).int(), inverse.view(torch.float64).float()

    def plan(self, table: Tensor, cache: KVCache, attention: PagedAttention, layers: Container[int] = ()) -> TablePlan:
        """A new plan that reads these tensors: what it works out of them, it works out in its own forward."""
        _, positions, slots, *_, starts, sequences = self.fields
        paged = PagedRows(table, sequences.int(), starts.int(), positions + 1, positions, cache.page_size, self.longest)
        return TablePlan(positions, slots, paged, cache, attention, layers)


class TablePlan(Showing):
    """The plan (see `ssd.models.interface.Plan`) of a batch that lies in tensors."""

    def __init__(
        self,
        positions: Tensor,
        slots: Tensor,
        rows: PagedRows,
        cache: KVCache,
        attention: PagedAttention,
        layers: Container[int] = (),
    ) -> None:
        super().__init__(layers)
        self.positions = positions
        self._slots, self._rows, self._cache, self._attention = slots, rows, cache, attention
        self._scale = cache.keys.shape[-1] ** -0.5

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: Scores = PLAIN) -> Tensor:
        self._cache.write(layer, self._slots, k, v)
        scale = self._scale if rule.scale is None else rule.scale
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        return self._attention.attend(q, keys, values, self._rows, scale, rule)


def table_plan(
    rows: Sequence[Row], cache: KVCache, attention: PagedAttention, pages: int, layers: Container[int] = ()
) -> TablePlan:
    """The plan of rows just as they are, of sequences with at most `pages` pages."""
    device = cache.keys.device
    counts = [len(row.token_ids) for row in rows]
    batch = BatchTensors(sum(counts), len(rows), max(counts, default=1), device)
    used = [list(row.pages[: -(-row.stop // cache.page_size)]) for row in rows]
    padded = [own + own[:1] * (pages - len(own)) for own in used]
    table = torch.tensor(padded, dtype=torch.int32, device=device).view(len(rows), pages)
    batch.fill(rows, range(len(rows)), cache)
    return batch.plan(table, cache, attention, layers)
