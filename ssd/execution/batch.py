"""One ragged batch: prefill chunk, decode and verification are rows of different length (contract C4)."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from ssd.kernels.attention import View
from ssd.kernels.decoder import Views


@dataclass(frozen=True)
class Row:
    """`token_ids` of one sequence, the first at absolute position `start`; `pages` covers all of them.

    The logits of the last `outputs` tokens are wanted. Rows of one sequence have the same `slot`, a small number.
    """

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
        """The positions that the outputs are about: the logits at p are about the token at p + 1."""
        return range(self.stop - self.outputs + 1, self.stop + 1)


def output_indices(rows: Sequence[Row]) -> list[int]:
    """Where the wanted logits of the rows lie in their concatenated tokens."""
    indices: list[int] = []
    stop = 0
    for row in rows:
        stop += len(row.token_ids)
        indices += range(stop - row.outputs, stop)
    return indices


def tokens_of(rows: Sequence[Row]) -> list[range]:
    """Where the tokens of each row lie in their concatenation."""
    starts = accumulate((len(row.token_ids) for row in rows), initial=0)
    return [range(start, start + len(row.token_ids)) for start, row in zip(starts, rows, strict=False)]


class Showing:
    """A plan that keeps of `layers`, in `shown`, the hidden states [tokens, width] of a forward.

    `view` is what the tokens see, where our kernel attends with all of them.
    """

    view: View | None = None

    def __init__(self, layers: Container[int] = ()) -> None:
        self._layers, self.shown = layers, dict[int, Tensor]()
        self._views: Views | None = None

    def views(self) -> Views | None:
        if self._views is None and self.view is not None:
            self._views = Views([self.view])
        return self._views

    def show(self, layers: int, x: Tensor) -> None:
        if layers in self._layers:
            self.shown[layers] = x
