"""A decoder layer in one call (decoder.c)."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, pointer
from typing import NamedTuple

import torch
from torch import Tensor

from ssd.kernels import library
from ssd.kernels.attention import NO_WINDOW, View, scores_bytes
from ssd.kernels.cpu import Product, check


class Heads(NamedTuple):
    """The sizes of an attention, its scale, and its window (None: all tokens)."""

    queries: int
    keys: int
    dim: int
    scale: float
    window: int | None


class Views:
    """What the tokens of a batch see, run after run."""

    def __init__(self, views: Sequence[View]) -> None:
        self._views = views
        self.tokens, self.scores_bytes = sum(view.shared.tokens for view in views), scores_bytes(views)
        parts = [
            library.View(
                pointer(view.shared.struct), None if view.own is None else pointer(view.own.struct), view.shared.tokens
            )
            for view in views
        ]
        self.structs = (library.View * len(parts))(*parts)


class DecoderLayer:
    """A layer of `ssd.models.llama` in one call, bit for bit what it computes with the kernels of `ssd.kernels.cpu`.

    h = x + attention(norm(x)); the result is h + down(silu(gate) * up) of norm(h)."""

    def __init__(
        self,
        norms: tuple[Tensor, Tensor],
        head_norms: tuple[Tensor, Tensor] | None,
        eps: float,
        products: Sequence[Product],
        heads: Heads,
    ) -> None:
        """`norms`: weights before attention and before the feed-forward. `head_norms`: weights on queries and keys.
        `products`: to queries, keys and values; to the output; to gate and up; down."""
        self._kept = norms, head_norms, products
        addresses = [library.pointer(weight) for weight in (*norms, *(head_norms or (None, None)))]
        structs = [product.struct for product in products]
        queries, keys, dim, scale, window = heads
        self._struct = library.Layer(*addresses, eps, *structs, queries, keys, dim, scale, window or NO_WINDOW)
        qkv, _, gate_up, down = structs
        self._width = int(qkv.inputs)
        floats = qkv.inputs + qkv.outputs + (2 * queries + keys) * dim + gate_up.outputs + down.inputs
        self._row_bytes, self._product_bytes = 4 * int(floats), max(product.row_bytes for product in products)

    def __call__(self, layer: int, x: Tensor, table: tuple[Tensor, Tensor], views: Views) -> Tensor:
        """x [n, width] -> [n, width]; `table`: cosines and signed sines, each [n, 1, dim]."""
        n = x.shape[0]
        check(x)
        if x.shape != (views.tokens, self._width) or not x.is_contiguous():
            raise ValueError(f"{views.tokens} contiguous tokens of {self._width} numbers expected, not {list(x.shape)}")
        y = torch.empty(x.shape)
        memory = library.scratch(n * self._row_bytes + max(n * self._product_bytes, views.scores_bytes))
        addresses = x.data_ptr(), table[0].data_ptr(), table[1].data_ptr(), y.data_ptr()
        library.call().decoder_layer(
            byref(self._struct), layer, *addresses, n, views.structs, len(views.structs), memory.data_ptr()
        )
        return y
