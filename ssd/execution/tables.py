"""A batch as tensors of fixed shapes, for backends that read page tables.

A batch's numbers go to the device in one copy; page tables stay there, and changed ones are sent."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ssd.execution.batch import BaseContext, Row
from ssd.execution.kv_cache import KVCache
from ssd.law import DRAWN, Law
from ssd.layers.attention import PLAIN, CachePlaces, Scores
from ssd.layers.paged import PagedAttention, PagedRows
from ssd.speculation.noise import halves
from ssd.speculation.sampling import Drawing, Draws, numbers_of


class Draw(NamedTuple):
    """One token's draw: halves of the noise key, and the numbers of the law as a device has them."""

    low: int
    high: int
    numbers: tuple[float, ...]

    @classmethod
    def of(cls, law: Law, position: int) -> Draw:
        return cls(*halves((law.seed, position)), numbers_of(law))


class Upload:
    """A host array, which may be written again after `wait`, and its copy on a device."""

    def __init__(self, size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        cuda = device.type == "cuda"
        host = torch.zeros(size, dtype=dtype, pin_memory=cuda)
        self.host: Any = host.numpy()  # shares its memory
        self.device = torch.zeros(size, dtype=dtype, device=device)
        self._host, self._copied = host, torch.cuda.Event() if cuda else None

    def wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()

    def send(self, part: int | slice = slice(None)) -> None:
        self.device[part].copy_(self._host[part], non_blocking=True)
        if self._copied is not None:
            self._copied.record()


def uploaded(numbers: Tensor, device: torch.device) -> Tensor:
    """Copy to a device in stream order; with page-locked memory the host does not wait."""
    return (numbers.pin_memory() if device.type == "cuda" else numbers).to(device, non_blocking=True)


class Tables:
    """Owns page tables on the device, int32 [sequences + 1, pages], the last for the dummy sequence.

    The dummy sequence pads batches, on one page of its own: padding never writes into a request's."""

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
        """Send the page tables of (slot, pages) that changed; entries behind the pages are undefined."""
        longest: dict[int, list[int]] = {}
        for slot, pages in found:
            longest[slot] = max(longest.get(slot, []), list(pages), key=len)
        new = {slot: pages for slot, pages in longest.items() if self._known[slot][: len(pages)] != pages}
        if new:
            self._upload.wait()  # once: a send may have to wait for a forward that runs
        for slot, pages in new.items():
            self._known[slot] = pages
            self._upload.host[slot, : len(pages)] = pages
            self._upload.send(slot)


class BatchTensors:
    """Owns the inputs of a forward of up to `tokens` tokens in `rows` rows, none longer than `longest`.

    Rows of the dummy sequence take unused tokens, and unused rows are empty."""

    columns: tuple[str, ...] = ("ids", "positions", "slots", "low", "high")  # each has a number per token

    def __init__(self, tokens: int, rows: int, longest: int, device: torch.device) -> None:
        self.tokens, self.rows, self.longest = tokens, rows, longest
        sizes = dict.fromkeys(self.columns, tokens)
        sizes |= {"laws": len(DRAWN) * tokens, "starts": rows + 1, "sequences": rows}
        self._upload = Upload((sum(sizes.values()),), torch.int64, device)
        ends = list(accumulate(sizes.values()))
        self._host = dict(zip(sizes, np.split(self._upload.host, ends[:-1]), strict=True))  # views
        self._host["laws"] = self._host["laws"].view("float64").reshape(-1, tokens)
        self._device = dict(zip(sizes, self._upload.device.split(list(sizes.values())), strict=True))
        self._device["laws"] = self._device["laws"].view(-1, tokens)

    def fill(
        self,
        rows: Sequence[Row],
        tables: Sequence[int],
        cache: KVCache,
        dummy: int = 0,
        dummy_page: int = 0,
        draws: Sequence[Draw] = (),
    ) -> None:
        """Write and send `rows`, the indices of their page tables, and the draw after each token."""
        self.send(
            [len(row.token_ids) for row in rows],
            tables,
            dummy,
            draws,
            ids=([token for row in rows for token in row.token_ids], 0),
            positions=([position for row in rows for position in range(row.start, row.stop)], 0),
            slots=(
                [slot for row in rows for slot in cache.slots(row.pages, row.start, row.stop)],
                dummy_page * cache.page_size,
            ),
        )

    def send(
        self,
        counts: Sequence[int],
        tables: Sequence[int],
        dummy: int,
        draws: Sequence[Draw],
        **columns: tuple[Sequence[int], int],
    ) -> None:
        """Write and send rows of `counts` tokens; each column has the tokens' numbers, and padding's.

        Padding belongs to the page table `dummy`. Rows must fit."""
        used = sum(counts)
        assert used <= self.tokens, "a batch that fits"
        assert max(counts, default=0) <= self.longest, "rows that fit"
        spare = [min(self.longest, self.tokens - start) for start in range(used, self.tokens, self.longest)]
        missing = self.rows - len(counts) - len(spare)
        assert missing >= 0, "no more rows than fit"
        self._upload.wait()
        host = self._host
        for name, (numbers, filler) in columns.items():
            host[name][:used], host[name][used:] = numbers, filler
        host["laws"][:] = 0.0
        if draws:
            host["low"][:used], host["high"][:used], laws = zip(*draws, strict=True)
            host["laws"][:, :used] = list(zip(*laws, strict=True))
        host["starts"][:] = list(accumulate([*counts, *spare, *[0] * missing], initial=0))
        host["sequences"][: len(counts)], host["sequences"][len(counts) :] = list(tables), dummy
        self._upload.send()

    @property
    def fields(self) -> Mapping[str, Tensor]:
        """Return the device's int64 tensors: columns [tokens], `starts` [rows + 1], `sequences` [rows], `laws`.

        `laws` [numbers, tokens] hold the bits of float64, 0 for padding; `sequences` are indices of page tables."""
        return self._device

    @property
    def ids(self) -> Tensor:
        """Return the token ids, int64 [tokens]."""
        return self._device["ids"]

    def draws(self, drawing: Drawing) -> Draws | None:
        """Return the draws of the token after each token, as far as `drawing` needs, or None."""
        if drawing is Drawing.GREEDY:
            return None
        keys = torch.stack((self._device["low"], self._device["high"]), dim=-1).int()
        laws = self._device["laws"].view(torch.float64).float()
        return Draws(keys, laws, drawing >= Drawing.FILTERED)

    def context(
        self, table: Tensor, cache: KVCache, attention: PagedAttention, layers: Collection[int] = ()
    ) -> TableContext:
        """Make a context over these tensors; a forward computes others, such as lengths, from them."""
        positions = self._device["positions"]
        return TableContext(
            positions, self._device["slots"], self._rows(table, cache, positions + 1), cache, attention, layers
        )

    def _rows(self, table: Tensor, cache: KVCache, seen: Tensor, causal: bool = True) -> PagedRows:
        sequences, starts = self._device["sequences"].int(), self._device["starts"].int()
        return PagedRows(
            table, sequences, starts, seen, self._device["positions"], cache.page_size, self.longest, causal
        )


class TableContext(BaseContext):
    """The forward context of a batch in tensors of fixed shapes."""

    def __init__(
        self,
        positions: Tensor,
        slots: Tensor,
        rows: PagedRows,
        cache: KVCache,
        attention: PagedAttention,
        layers: Collection[int] = (),
    ) -> None:
        super().__init__(layers)
        self.positions = positions
        self._slots, self._rows, self._cache, self._attention = slots, rows, cache, attention

    def cache_places(self, layer: int) -> CachePlaces:
        return CachePlaces(*self._cache.layers[layer], self._slots, partial(self.attend_stored, layer))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: Scores = PLAIN) -> Tensor:
        self._cache.write(layer, self._slots, k, v)
        return self.attend_stored(layer, q, rule)

    def attend_stored(self, layer: int, q: Tensor, rule: Scores = PLAIN) -> Tensor:
        scale = rule.scale_of(self._cache.head_dim)
        return self._attention.attend(q, *self._cache.layers[layer], self._rows, scale, rule)


def table_context(
    rows: Sequence[Row], cache: KVCache, attention: PagedAttention, pages: int, layers: Collection[int] = ()
) -> TableContext:
    """Make the context of unpadded rows of sequences with at most `pages` pages."""
    device = cache.keys.device
    counts = [len(row.token_ids) for row in rows]
    batch = BatchTensors(sum(counts), len(rows), max(counts, default=1), device)
    used = [list(row.pages[: -(-row.stop // cache.page_size)]) for row in rows]
    padded = [own + own[:1] * (pages - len(own)) for own in used]
    table = torch.tensor(padded, dtype=torch.int32, device=device).view(len(rows), pages)
    batch.fill(rows, range(len(rows)), cache)
    return batch.context(table, cache, attention, layers)
