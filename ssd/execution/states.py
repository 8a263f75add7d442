"""The states of recurrent layers: of running sequences, and at page boundaries.

A slot holds the states of all layers after a beginning of one text. Slots below `sequences` are by `Row.slot`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ssd.execution.batch import Row, StateUse, tokens_of
from ssd.layers.recurrent import Recurrence, StateRow, StateSize
from ssd.models.sizes import saved_states


class StateRoom(NamedTuple):
    """The room of a `StateCache`: running `sequences`, each with changes of `reach` tokens.

    `cells` are those of a draft's chains, each with changes of `depth` tokens."""

    sequences: int = 1
    reach: int = 1
    cells: int = 0
    depth: int = 0


ROOM_FOR_ONE = StateRoom()


class StateCache:
    """Owns `states` [slots, *state] of each recurrence, and `kept` [places, change], of tokens in flight.

    The change at position p of a sequence lies in its place p % `reach`. `saved`: slots for page boundaries."""

    def __init__(
        self, sizes: Sequence[StateSize], sequences: int, reach: int, cells: int, depth: int, device: torch.device
    ) -> None:
        self.saved = range(sequences, sequences + saved_states(sequences))
        self.reach, self._first_cell, self._depth = reach, sequences * reach, depth
        # Zeros take no memory on a CPU before they are written, and no time to compute with, as random bits may.
        self.states = [torch.zeros(self.saved.stop, *size.state, device=device) for size in sizes]
        places = self._first_cell + cells * depth
        self.kept = [torch.zeros(places, size.change, device=device) for size in sizes]

    def path(self, slot: int, start: int, stop: int) -> list[int]:
        """Return the places of positions `start` to `stop` - 1."""
        assert stop - start <= self.reach, "no more changes than are kept"
        return [slot * self.reach + position % self.reach for position in range(start, stop)]

    def chain(self, cell: int, start: int, stop: int) -> list[int]:
        """Return the places of a chain's `start`-th to `stop` - 1-th token."""
        return [self._first_cell + cell * self._depth + depth for depth in range(start, stop)]

    def promote(self, slot: int, start: int, cell: int, count: int) -> None:
        """Copy the changes of a chain's first `count` tokens to its sequence, from `start` on."""
        to, of = self.path(slot, start, start + count), self.chain(cell, 0, count)
        for kept in self.kept:
            kept[to] = kept[of]

    def batch(self, rows: Sequence[Row]) -> StateBatch:
        """Return the rows' states; a row without `Row.state` is measured, and leaves nothing."""
        batch = StateBatch(self)
        for tokens, row in zip(tokens_of(rows), rows, strict=True):
            if row.state is None:
                batch.add(None, row.slot, (), tokens)
            else:
                batch.add_path(row.state, row.slot, row.start, tokens)
        return batch


class StateBatch:
    """The states of one forward's rows, added in the order of its tokens."""

    def __init__(self, cache: StateCache) -> None:
        self._cache, self._rows = cache, list[StateRow]()
        self._where, self._places = list[int](), list[int]()  # tokens whose changes are kept, and where

    def add(
        self, use: StateUse | None, slot: int, replayed: Sequence[int], tokens: range, places: Sequence[int] = ()
    ) -> None:
        """Add a row over the state in `slot`, after the changes in places `replayed`.

        `tokens`: its indices in the forward; changes of the last ones are kept in `places`."""
        if use is None:
            self._rows.append(StateRow(slot, replayed, len(tokens)))
            return
        source = use.source if use.source is not None else slot if use.held else -1
        written, saved = use.written - use.held, use.saved - use.held
        target = slot if written or use.source is not None else -1
        self._rows.append(StateRow(source, replayed, len(tokens), target, written, use.save, saved))
        self._where += tokens[len(tokens) - len(places) :]
        self._places += places

    def add_path(self, use: StateUse, slot: int, start: int, tokens: range) -> None:
        """Add a row of a sequence's own text from position `start` on."""
        stop = start + len(tokens)
        places = self._cache.path(slot, max(start, use.written), stop)
        self.add(use, slot, self._cache.path(slot, use.held, start), tokens, places)

    @cached_property
    def _all_rows(self) -> tuple[StateRow, ...]:
        return tuple(self._rows)  # one for all layers: kernels pack it once

    @cached_property
    def _kept(self) -> tuple[Tensor, Tensor]:
        device = self._cache.states[0].device
        return torch.tensor(self._where, device=device), torch.tensor(self._places, device=device)

    def recur(self, index: int, recurrence: Recurrence, changes: Tensor, queries: Tensor) -> Tensor:
        """Compute a recurrence, and keep the changes of tokens that may be rejected."""
        kept = self._cache.kept[index]
        out = recurrence(self._cache.states[index], kept, changes, queries, self._all_rows)
        if self._where:
            where, places = self._kept
            kept.index_copy_(0, places, changes.index_select(0, where).to(kept.dtype))
        return out
