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

    `text`: ids beside the listed ones. `noise`: float32 of the listed ids, None for a greedy row. `key`: noise key of
    the other ids. A first-order head reads the token `before`, or, if `after` >= 0, the best id of that earlier ask."""

    text: array[int]
    temperature: float = 0.0
    noise: Tensor | None = None
    key: tuple[int, int] = (0, 0)
    before: int = 0
    after: int = -1

    def struct(self, index: int) -> library.CAsk:
        text, noise = (address(self.text), len(self.text)), library.pointer(self.noise)
        return library.CAsk(index, self.before, self.after, *text, noise, self.temperature, self.key)


class Ending(NamedTuple):
    """Says where guesses that follow each other end: once the probability that all are right is below `least`.

    `reached`: that probability for all earlier ones. `rates`: the probability of a guess by its softmax among the best
    scores, at log-odds from -6 to 5 (`ssd.draft.chances.Calibration`)."""

    rates: Sequence[float]
    reached: float
    least: float


class GuessStep:
    """Runs a model of `ssd.models.families.llama` or `ssd.plugins.drafts`, and ranks its logits.

    `embedding` [V, width]. `norm`: weight and epsilon. `head` has a logit for each of `ids` int64 [n] (None: 0 to n -
    1). `table` [V, width]: rows for ids of a text. `mask` float32 [width]: the embedding of negative ids. `first` [V,
    rank] and [n, rank]: a first-order head."""

    def __init__(
        self,
        embedding: Product,
        decoder: Decoder,
        norm: tuple[Tensor, float],
        head: Product,
        ids: Tensor | None = None,
        table: Product | None = None,
        mask: Tensor | None = None,
        first: tuple[Product, Product] | None = None,
    ) -> None:
        self._decoder, self._kept = decoder, (embedding, norm, head, ids, table, mask, first)
        self._known, self._width = int(embedding.struct.outputs), decoder.width
        self._least = 0 if mask is None else -1
        struct = head.struct
        rows = pointer(embedding.struct), None if table is None else pointer(table.struct)
        parts = rows[0], decoder.structs, len(decoder), *decoder.tables, norm[0].data_ptr(), norm[1]
        firsts = (None, None) if first is None else tuple(pointer(product.struct) for product in first)
        self._struct = library.CModel(*parts, struct, library.pointer(ids), rows[1], library.pointer(mask), *firsts)
        self._reference = byref(self._struct)
        outputs = int(struct.outputs)
        more = 0 if first is None else 4 * (int(first[0].struct.inputs) + outputs) + first[1].row_bytes
        self._ask_bytes = 4 * (int(struct.inputs) + outputs) + max(head.row_bytes, more)
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
        ending: Ending | None = None,
    ) -> tuple[Ranked, Tensor]:
        """Return the `count` best ids after each token `wanted` (indices), and the layers' output for all tokens.

        `features` float32 are for a model that reads pairs: contiguous, each [k, width] or [width]. Only the first
        `listed` logits count, at least `count`. Ids of texts must be rows of the table.

        With one view and without features there may be more asks than `wanted`: each reads the best id of the ask
        before, as a token behind all others, for which the view has a place. With an `ending` the result may lack the
        last asks."""
        n, asked, more = len(tokens), len(asks), len(asks) - len(wanted)
        if more and (features or not wanted or len(views.structs) != 1):
            raise ValueError(f"{more} asks behind {len(wanted)} wanted tokens in {len(views.structs)} views")
        self._check(tokens, views, more)
        ids, scores = (c_int64 * (asked * count))(), (c_float * (asked * count))()
        made, numbers = torch.empty(n, self._width, dtype=torch.float32), array("q", tokens)
        indexed = zip([*wanted, *[0] * more], asks, strict=True)
        structs = (library.CAsk * asked)(*(ask.struct(index) for index, ask in indexed))
        memory = library.scratch(self._scratch_bytes(views, n, asks))
        results = made.data_ptr(), ids, scores, memory.data_ptr()
        if more:
            places = address(numbers), address(views.positions), n
            known, reached, least = ending or (None, 1.0, 0.0)
            rates = None if known is None else (c_float * len(known))(*known)
            how = len(wanted), more, listed, count, rates, reached, least
            done = library.call().go_on(self._reference, *places, views.structs, structs, *how, *results)
            found = ranked_lists(ids, scores, count)
            return Ranked(found.ids[:done], found.scores[:done]), made
        library.call().guess(
            *(self._reference, address(numbers), self._rows(features, n), address(views.positions), n),
            *(views.structs, len(views.structs), structs, asked, listed, count),
            *results,
        )
        return ranked_lists(ids, scores, count), made

    def _check(self, tokens: Sequence[int], views: Views, more: int) -> None:
        self._decoder.check(views, len(tokens) + more)
        if not self._least <= min(tokens) <= max(tokens) < self._known:
            raise IndexError(f"ids from {min(tokens)} to {max(tokens)} in a table of {self._known} rows")

    def _scratch_bytes(self, views: Views, n: int, asks: Sequence[Ask]) -> int:
        texts = 2 * 4 * max((len(ask.text) for ask in asks), default=0) + self._table_bytes
        layers = 4 * n * self._width + self._decoder.scratch_bytes(views)
        return max(layers, len(asks) * self._ask_bytes + texts)

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
