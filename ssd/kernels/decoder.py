"""All decoder layers in one call (decoder.c)."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from ctypes import byref, pointer
from typing import NamedTuple

import torch
from torch import Tensor

from ssd.kernels import library
from ssd.kernels.attention import NO_WINDOW, KVSpans, View, parts_bytes
from ssd.kernels.cpu import Product, check
from ssd.kernels.library import address


class Heads(NamedTuple):
    queries: int
    keys: int
    dim: int
    scale: float
    window: int | None


class Views:
    """The keys that a batch's tokens see, and their positions; `kept`: layers after which hidden states are wanted."""

    def __init__(self, views: Sequence[View], positions: array[int], kept: Collection[int] = ()) -> None:
        self.views, self.positions, self.kept = views, positions, kept
        self.tokens = sum(view.shared.tokens for view in views)
        parts = [
            library.CView(
                pointer(view.shared.struct), None if view.own is None else pointer(view.own.struct), view.shared.tokens
            )
            for view in views
        ]
        self.structs = (library.CView * len(parts))(*parts)


class DecoderLayer:
    """A layer of `ssd.models.families.llama`, or with a `token_norm` of an EAGLE-3 head (`ssd.plugins.drafts`).

    `norms`: weights before attention and before the feed-forward. `head_norms`: weights on queries and keys, or none.
    `products`: to queries, keys and values; to the output; to gate and up; down. `normed_residual`: the feed-forward
    adds to the normed x + attention."""

    def __init__(
        self,
        norms: tuple[Tensor, Tensor],
        head_norms: Sequence[Tensor],
        eps: float,
        products: Sequence[Product],
        heads: Heads,
        token_norm: Tensor | None = None,
        normed_residual: bool = False,
    ) -> None:
        self._kept = norms, head_norms, token_norm, products
        addresses = [library.pointer(weight) for weight in (*norms, *(head_norms or (None, None)), token_norm)]
        structs = [product.struct for product in products]
        queries, keys, dim, scale, window = heads
        sizes = queries, keys, dim, scale, window or NO_WINDOW
        self.struct = library.CLayer(*addresses, eps, *structs, *sizes, normed_residual)
        qkv, out, gate_up, down = structs
        self.width, self.heads = int(out.outputs), queries
        floats = qkv.inputs + qkv.columns + (2 * queries + keys) * dim + gate_up.columns + down.inputs
        self.row_bytes, self.product_bytes = 4 * int(floats), max(product.row_bytes for product in products)


class Decoder:
    """Runs a model's layers in one call, with the bits that the kernels of `ssd.kernels.cpu` give one by one.

    `table`: cosines and signed sines of all positions, each [positions, dim], float32."""

    def __init__(self, layers: Sequence[DecoderLayer], table: tuple[Tensor, Tensor]) -> None:
        self._layers, self._table = layers, table
        self.structs = (library.CLayer * len(layers))(*(layer.struct for layer in layers))
        self.tables = tuple(part.data_ptr() for part in table)
        self.width, (self._positions, dim) = layers[0].width, table[0].shape
        self._heads = max(layer.heads for layer in layers), dim
        self._row_bytes = max(layer.row_bytes for layer in layers) + 2 * 4 * dim
        self._product_bytes = max(layer.product_bytes for layer in layers)

    def __len__(self) -> int:
        return len(self._layers)

    def check(self, views: Views, n: int) -> None:
        """Raise `ValueError` or `IndexError` unless `views` has n tokens at positions that exist."""
        if len(views.positions) != n or views.tokens != n:
            raise ValueError(f"{n} tokens with {len(views.positions)} positions and {views.tokens} views")
        self._check(views.positions)

    def _check(self, positions: array[int]) -> None:
        if not 0 <= min(positions, default=0) <= max(positions, default=0) < self._positions:
            raise IndexError(f"positions beyond the {self._positions} that the model has")

    def remember(self, x: Tensor, positions: array[int], to: KVSpans) -> None:
        """Store the keys and values that all layers make of normed x [n, width] as each token's own in `to`."""
        check(x)
        n = len(positions)
        if x.shape != (n, self.width) or not x.is_contiguous() or to.tokens != n:
            raise ValueError(f"{n} positions of {self.width} numbers expected, not {list(x.shape)} and {to.tokens}")
        self._check(positions)
        memory = library.scratch(n * (self._row_bytes + self._product_bytes))
        addresses = *self.tables, address(positions), x.data_ptr(), n, byref(to.struct), memory.data_ptr()
        library.call().remember(self.structs, len(self), *addresses)

    def scratch_bytes(self, views: Views) -> int:
        n = views.tokens
        return n * self._row_bytes + max(n * self._product_bytes, parts_bytes(views.views, *self._heads))

    def __call__(self, x: Tensor, views: Views, first: int, stop: int) -> Tensor:
        """Map x [n, width] -> [n, width] by the layers from `first` to `stop` - 1; none of them reads pairs."""
        n = x.shape[0]
        check(x)
        if x.shape != (views.tokens, self.width) or not x.is_contiguous():
            raise ValueError(f"{views.tokens} contiguous tokens of {self.width} numbers expected, not {list(x.shape)}")
        self.check(views, n)
        y = torch.empty(x.shape, dtype=torch.float32)
        memory = library.scratch(self.scratch_bytes(views))
        addresses = *self.tables, address(views.positions), x.data_ptr(), None, y.data_ptr()
        structs = views.structs, len(views.structs), memory.data_ptr()
        library.call().decoder(self.structs, first, stop, *addresses, n, *structs)
        return y
