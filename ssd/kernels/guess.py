"""A whole draft step in one call: from tokens to the likeliest next ones (guess.c)."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import byref, c_float, c_int64, c_void_p, pointer
from typing import NamedTuple

import torch
from torch import Tensor

from ssd.kernels import library
from ssd.kernels.cpu import Product, Ranked, check, ranked_lists
from ssd.kernels.decoder import Decoder, Views
from ssd.kernels.library import address


class Ask(NamedTuple):
    """Says which ids to rank after one token of a batch, and by which noise.

    `text`: ids that are ranked beside the listed ones. `noise`: float32 of the listed ids, None for a greedy row.
    `key`: noise key of the other ids (`ssd.speculation.noise.halves`)."""

    text: array[int]
    temperature: float = 0.0
    noise: Tensor | None = None
    key: tuple[int, int] = (0, 0)


class GuessStep:
    """Runs a model of `ssd.models.families.llama` or `ssd.models.eagle3`, and ranks its logits.

    `embedding`: a weight [V, width]. `norm`: weight and epsilon of the last norm. `head` has a logit for each of the
    `ids` int64 [n] (None: 0 to n - 1). `table` [V, width] has rows for ids of a text, None if there are none."""

    def __init__(
        self,
        embedding: Product,
        decoder: Decoder,
        norm: tuple[Tensor, float],
        head: Product,
        ids: Tensor | None = None,
        table: Product | None = None,
    ) -> None:
        self._decoder, self._kept = decoder, (embedding, norm, head, ids, table)
        self._known, self._width = int(embedding.struct.outputs), decoder.width
        struct = head.struct
        rows = pointer(embedding.struct), None if table is None else pointer(table.struct)
        parts = rows[0], decoder.structs, len(decoder), *decoder.tables, norm[0].data_ptr(), norm[1]
        self._struct = library.Model(*parts, struct, library.pointer(ids), rows[1])
        self._reference = byref(self._struct)
        self._ask_bytes = 4 * (int(struct.inputs) + int(struct.outputs)) + head.row_bytes
        self._table_bytes = 0 if table is None else table.dots_bytes

    def __call__(
        self,
        tokens: Sequence[int],
        features: Sequence[Tensor],
        views: Views,
        wanted: Sequence[int],
        asks: Sequence[Ask],
        listed: int,
        count: int,
    ) -> tuple[Ranked, Tensor]:
        """Return the `count` best ids after each token `wanted` (indices), and the layers' output for all tokens.

        `features` float32 are for a model that reads pairs: contiguous parts, each [k, width] or of one token [width].
        Only the first `listed` logits count, at least `count`. Ids of texts must be rows of the table."""
        n, asked = len(tokens), len(asks)
        self._decoder.check(views, n)
        if not 0 <= min(tokens) <= max(tokens) < self._known:
            raise IndexError(f"ids from {min(tokens)} to {max(tokens)} in a table of {self._known} rows")
        ids, scores = (c_int64 * (asked * count))(), (c_float * (asked * count))()
        made, numbers = torch.empty(n, self._width), array("q", tokens)
        structs = (library.Ask * asked)(
            *(
                library.Ask(index, address(text), len(text), library.pointer(noise), temperature, key)
                for index, (text, temperature, noise, key) in zip(wanted, asks, strict=True)
            )
        )
        texts = 2 * 4 * max((len(ask.text) for ask in asks), default=0) + self._table_bytes
        size = 4 * n * self._width + self._decoder.scratch_bytes(views)
        memory = library.scratch(max(size, asked * self._ask_bytes + texts))
        library.call().guess(
            *(self._reference, address(numbers), self._rows(features, n), address(views.positions), n),
            *(views.structs, len(views.structs), structs, asked, listed, count),
            *(made.data_ptr(), ids, scores, memory.data_ptr()),
        )
        return ranked_lists(ids, scores, count), made

    def _rows(self, features: Sequence[Tensor], n: int) -> ctypes.Array[c_void_p] | None:
        """Return the address of each token's features; None without `features`.

        Raises `ValueError` for other shapes."""
        if not features:
            return None
        found, step = list[int](), 4 * self._width
        for part in features:
            check(part)
            if part.shape[-1] != self._width or not part.is_contiguous():
                raise ValueError(f"features {list(part.shape)} of {self._width} numbers a token")
            start = part.data_ptr()
            found += [start] if part.dim() == 1 else range(start, start + step * len(part), step)
        if len(found) != n:
            raise ValueError(f"{len(found)} features of {n} tokens")
        return (c_void_p * n)(*found)
