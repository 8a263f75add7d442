"""The KV cache: keys and values of all sequences, in pages."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, chain

import torch
from torch import Tensor

from ssd.kernels import cpu
from ssd.kernels.attention import slots_of
from ssd.layers.paged import to_fp8
from ssd.models.interface import Shape
from ssd.models.sizes import STEP_BYTES

Span = slice | Tensor
"""The places of consecutive tokens in the cache: a slice, or slot numbers int64 [n]."""


def last(span: Span, count: int) -> Span:
    return slice(span.stop - count, span.stop) if isinstance(span, slice) else span[len(span) - count :]


Block = tuple[Tensor, Tensor]
"""The keys and values of layers of one size, each [layers, ..., kv_heads, head_dim]."""


def allocate(
    shape: Shape, rows: tuple[int, ...], make: Callable[..., Tensor], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """Make memory for the keys or the values of all layers; return it and its blocks.

    A block is [layers, *rows, kv_heads, head_dim], in int8 with STEP_BYTES more. Layers that differ in size have each
    its own block in a flat memory. `make` is called as torch.empty."""
    make, more = partial(make, dtype=dtype, device=device), STEP_BYTES if dtype == torch.int8 else 0
    if not shape.sizes:
        whole = make((shape.layers, *rows, shape.kv_heads, shape.head_dim + more))
        return whole, [whole]
    cells = [(1, *rows, heads, dim + more) for heads, dim in shape.sizes]
    counts = list(map(math.prod, cells))
    whole = make((sum(counts),))
    return whole, [part.view(cell) for part, cell in zip(whole.split(counts), cells, strict=True)]


class KVCache:
    """Owns `keys` and `values` in `blocks`, each [layers, num_pages * page_size, kv_heads, head_dim].

    There is one block, or one a layer if layers differ in size. Token p of a sequence lies in slot
    `pages[p // page_size] * page_size + p % page_size`. `dtype` uint8: FP8. int8, for our kernel alone: each head of a
    token as codes from -127 to 127 and their float32 factor, so that no token depends on those beside it."""

    def __init__(self, shape: Shape, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.head_dim = shape.head_dim
        # Not zeroed: untouched pages cost no memory on a CPU, and nothing reads a slot before it is written.
        made = [allocate(shape, (num_pages * page_size,), torch.empty, dtype, device) for _ in range(2)]
        (self.keys, keys), (self.values, values) = made
        self.blocks: list[Block] = list(zip(keys, values, strict=True))
        self.layers = [layer for block in self.blocks for layer in zip(*block, strict=True)]
        self.pages, self.page_size = num_pages, page_size

    @property
    def served(self) -> bool:
        """Return True if our kernels for CPUs serve the cache."""
        return self.keys.dtype == torch.int8 or cpu.serve(self.keys)

    def blank(self, pages: Sequence[int]) -> None:
        """Fill pages with zeros: unwritten pages have no memory yet, and would be read too fast."""
        for page in pages:
            for kind in chain.from_iterable(self.blocks):
                kind[:, page * self.page_size : (page + 1) * self.page_size].zero_()

    def slots(self, pages: Sequence[int], start: int, stop: int) -> list[int]:
        size = self.page_size
        return [pages[position // size] * size + position % size for position in range(start, stop)]

    def span(self, pages: Sequence[int], length: int) -> Span:
        """Return the first `length` tokens: a slice if the pages are neighbours (no copy), else slots."""
        used = -(-length // self.page_size)
        first = pages[0]
        if all(pages[index] == first + index for index in range(1, used)):
            return slice(first * self.page_size, first * self.page_size + length)
        return torch.tensor(self.slots(pages, 0, length), device=self.keys.device)

    def all_slots(self, pages: Sequence[Sequence[int]], lengths: Sequence[int]) -> tuple[array[int], list[int]]:
        """Return the slots of n sequences' pages, one after the other, and the index where each begins.

        Pages count up to `lengths` tokens. Raises IndexError for a page outside of the cache: kernels check nothing."""
        used = [own[: -(-length // self.page_size)] for own, length in zip(pages, lengths, strict=True)]
        starts = [count * self.page_size for count in accumulate(map(len, used), initial=0)]
        every = [page for own in used for page in own]
        if every and not 0 <= min(every) <= max(every) < self.pages:
            raise IndexError(f"pages from {min(every)} to {max(every)} in a cache of {self.pages}")
        return slots_of(every, self.page_size), starts[:-1]

    def table(self, pages: Sequence[Sequence[int]], lengths: Sequence[int]) -> Tensor:
        """Return slots [n, longest] of the first `lengths` tokens of n sequences.

        Rows are padded with the slot of their last token, which has been written."""
        used = -(-max(lengths) // self.page_size)
        padded = [[*own[:used], *[own[0]] * (used - len(own))] for own in pages]
        last = torch.tensor(lengths, device=self.keys.device)[:, None] - 1
        positions = torch.arange(max(lengths), device=self.keys.device).minimum(last)
        first = torch.tensor(padded, device=self.keys.device).gather(1, positions // self.page_size)
        return first * self.page_size + positions % self.page_size

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [n, kv_heads, head_dim] at `slots` int64 [n]."""
        if self.keys.dtype == torch.uint8:
            keys, values = to_fp8(keys), to_fp8(values)
        own_keys, own_values = self.layers[layer]
        own_keys.index_copy_(0, slots, keys)
        own_values.index_copy_(0, slots, values)
