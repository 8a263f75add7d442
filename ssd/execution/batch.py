"""A ragged batch: prefill chunks, decodes and verifications are rows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

from torch import Tensor

from ssd.kernels.decoder import Views
from ssd.layers.attention import CachePlaces
from ssd.layers.norm import Residual
from ssd.layers.recurrent import Recurrence

FINAL = -1
"""Names, among the layers of `BaseContext`, the hidden states that the logits are made of."""


class StateUse(NamedTuple):
    """A row's use of its sequence's state, where layers have one.

    The state after `held` tokens is in slot `source` (None: the sequence's own); later changes, up to the row's start,
    were kept. The row leaves states after `written` tokens in the sequence's slot, and after `saved` in slot `save`
    (-1: no)."""

    held: int
    source: int | None
    written: int
    save: int = -1
    saved: int = 0


@dataclass(frozen=True)
class Row:
    """Tokens of one sequence in a batch, from absolute position `start` on.

    `pages` hold all tokens of the sequence. The logits of the last `outputs` tokens are wanted. `slot` numbers running
    sequences from 0."""

    token_ids: Sequence[int]
    start: int
    pages: Sequence[int]
    outputs: int = 1
    slot: int = 0
    state: StateUse | None = None

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def predicted(self) -> range:
        """Return the positions that the outputs predict: the logits at p predict the token at p + 1."""
        return range(self.stop - self.outputs + 1, self.stop + 1)


def output_indices(rows: Sequence[Row]) -> list[int]:
    """Return the indices of wanted outputs among all tokens."""
    indices: list[int] = []
    stop = 0
    for row in rows:
        stop += len(row.token_ids)
        indices += range(stop - row.outputs, stop)
    return indices


def tokens_of(rows: Sequence[Row]) -> list[range]:
    """Return the index range of each row among all tokens."""
    starts = accumulate((len(row.token_ids) for row in rows), initial=0)
    return [range(start, start + len(row.token_ids)) for start, row in zip(starts, rows, strict=False)]


class Recurs(Protocol):
    def recur(self, index: int, recurrence: Recurrence, changes: Tensor, queries: Tensor) -> Tensor: ...


class BaseContext:
    """The base of forward contexts: keeps hidden states [tokens, width] after some `layers`, or `FINAL`."""

    states: Recurs | None = None

    def __init__(self, layers: Collection[int] = ()) -> None:
        self._layers, self.hidden = layers, dict[int, Tensor]()

    def recur(self, index: int, recurrence: Recurrence, changes: Tensor, queries: Tensor) -> Tensor:
        assert self.states is not None, "a context of a model with states"
        return self.states.recur(index, recurrence, changes, queries)

    def views(self) -> Views | None:
        return None

    def cache_places(self, layer: int) -> CachePlaces | None:
        return None

    def keep_hidden(self, layers: int, x: Tensor | Residual) -> None:
        if layers in self._layers:
            self.hidden[layers] = x if isinstance(x, Tensor) else x.value
