"""A ragged batch: prefill chunks, decodes and verifications are rows of different length."""

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

    The state begins after `held` tokens: that in the slot `source`, by default the sequence's own. The changes up to
    the row's start were kept. It is left after `written` tokens in the sequence's slot, and after `saved` tokens in the
    slot `save`, unless that is -1."""

    held: int
    source: int | None
    written: int
    save: int = -1
    saved: int = 0


@dataclass(frozen=True)
class Row:
    """Tokens of one sequence in a batch.

    `token_ids[0]` stands at absolute position `start`. `pages` are the sequence's, and hold all its tokens. The logits
    of the last `outputs` tokens are wanted. `slot` numbers the sequence among the running ones, from 0. `state` is
    needed where layers have states."""

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


class Recurs(Protocol):
    """Computes recurrences (`ForwardContext.recur`)."""

    def recur(self, index: int, recurrence: Recurrence, changes: Tensor, queries: Tensor) -> Tensor: ...


class BaseContext:
    """The base of all forward contexts: keeps the hidden states [tokens, width] after some `layers` in `hidden`.

    `FINAL` may be among the layers.

    `states` are those of the rows, where layers have states."""

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
