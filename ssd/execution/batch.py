"""A ragged batch: prefill chunks, decodes and verifications are rows of different length."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from ssd.kernels.decoder import Views
from ssd.layers.attention import CachePlaces
from ssd.layers.norm import Residual


@dataclass(frozen=True)
class Row:
    """Tokens of one sequence in a batch.

    `token_ids[0]` stands at absolute position `start`. `pages` are the sequence's, and hold all its tokens. The logits
    of the last `outputs` tokens are wanted. `slot` numbers the sequence among the running ones, from 0."""

    token_ids: Sequence[int]
    start: int
    pages: Sequence[int]
    outputs: int = 1
    slot: int = 0

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def predicted(self) -> range:
        """Return the positions of the tokens that the outputs predict: the logits at p predict the token at p + 1."""
        return range(self.stop - self.outputs + 1, self.stop + 1)


def output_indices(rows: Sequence[Row]) -> list[int]:
    """Return the indices of the wanted outputs among the concatenated tokens of the rows."""
    indices: list[int] = []
    stop = 0
    for row in rows:
        stop += len(row.token_ids)
        indices += range(stop - row.outputs, stop)
    return indices


def tokens_of(rows: Sequence[Row]) -> list[range]:
    """Return the index range of each row among the concatenated tokens."""
    starts = accumulate((len(row.token_ids) for row in rows), initial=0)
    return [range(start, start + len(row.token_ids)) for start, row in zip(starts, rows, strict=False)]


class BaseContext:
    """The base of all forward contexts: keeps the hidden states [tokens, width] after some `layers` in `hidden`."""

    def __init__(self, layers: Collection[int] = ()) -> None:
        self._layers, self.hidden = layers, dict[int, Tensor]()

    def views(self) -> Views | None:
        return None

    def cache_places(self, layer: int) -> CachePlaces | None:
        return None

    def keep_hidden(self, layers: int, x: Tensor | Residual) -> None:
        if layers in self._layers:
            self.hidden[layers] = x if isinstance(x, Tensor) else x.value
