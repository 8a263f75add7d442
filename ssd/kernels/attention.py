"""Attention over cached keys and values (attention.c)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import byref, pointer

from torch import Tensor

from ssd.kernels import library
from ssd.kernels.cpu import by_heads
from ssd.kernels.library import address, call, scratch

NO_WINDOW = 2**62
_PARTS = 2**20  # as in kernels.h
_SEGMENT = 128  # as in attention.c


def slots_of(pages: Sequence[int], page_size: int) -> array[int]:
    numbers, slots = array("q", pages), array("q", bytes(8 * page_size * len(pages)))
    call().expand(address(numbers), len(numbers), page_size, address(slots))
    return slots


class KVSpans:
    """The keys and values of n tokens: token i sees slots[begin[i]] to slots[begin[i] + count[i] - 1].

    The last slot is the token's own. A block has keys and values [layers, ..., kv_heads, dim] in float32, or codes in
    int8 with their steps: of all layers, or of one if layers differ in size. Nothing checks that slots exist."""

    def __init__(
        self, blocks: Sequence[tuple[Tensor, Tensor]], slots: array[int], begin: Sequence[int], count: Sequence[int]
    ) -> None:
        self._blocks, self._lists = blocks, (slots, array("q", begin), array("q", count))
        self.longest, self.tokens = max(count, default=0), len(count)
        self.struct = self._store(*blocks[0])

    def _store(self, keys: Tensor, values: Tensor) -> library.Store:
        layer, cell, lists = keys.itemsize * keys.stride(0), keys.itemsize * keys.shape[-1], map(address, self._lists)
        return library.Store(keys.data_ptr(), values.data_ptr(), layer, cell, *lists, self.longest)

    def _at(self, layer: int) -> tuple[library.Store, int, int]:
        if len(self._blocks) == 1:
            return self.struct, layer, self._blocks[0][0].shape[-2]
        return self._store(*self._blocks[layer]), 0, self._blocks[layer][0].shape[-2]

    def put(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store each token's own k and v [n, kv_heads, dim]."""
        k, v, (n, kv_heads, dim), (store, place, _) = by_heads(k), by_heads(v), k.shape, self._at(layer)
        strides = k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0)
        call().put(byref(store), place, *strides, n, kv_heads, dim)

    def attend(
        self,
        layer: int,
        q: Tensor,
        out: Tensor,
        tokens: range,
        scale: float,
        softcap: float | None = None,
        window: int | None = None,
        own: KVSpans | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Attend with `tokens` of q [n, heads, dim]; write their rows of out [n, heads * dim].

        A token sees its span here, and behind that its span in `own`; of both together the last `window` keys. `sinks`
        float32 [heads], contiguous: the scores of keys without values."""
        q, (_, heads, dim) = by_heads(q), q.shape
        store, place, kv_heads = self._at(layer)
        given = library.Attend(
            pointer(store),
            None if own is None else pointer(own._at(layer)[0]),
            *(q.data_ptr(), out.data_ptr(), q.stride(0), place, heads, kv_heads, dim),
            *(window or NO_WINDOW, scale, softcap or 0.0, library.pointer(sinks)),
        )
        memory = scratch(parts_bytes([View(self, own)], heads, dim))
        call().attend(byref(given), tokens.start, tokens.stop, memory.data_ptr())


class View:
    def __init__(self, shared: KVSpans, own: KVSpans | None = None) -> None:
        self.shared, self.own = shared, own

    @property
    def segments(self) -> int:
        return sum(-(-spans.longest // _SEGMENT) for spans in (self.shared, self.own) if spans is not None)


def parts_bytes(views: Sequence[View], heads: int, dim: int) -> int:
    part = -(-(dim + 2) // 16) * 16  # as `part_size` in attention.c
    needs = [(view.shared.tokens, view.segments * heads * part) for view in views]
    return 64 + 4 * max((min(tokens * one, max(_PARTS, one)) for tokens, one in needs), default=0)
