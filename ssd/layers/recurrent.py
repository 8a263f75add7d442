"""What a layer keeps for a sequence in place of keys and values: a state, and how tokens change it.

A draft token may be rejected, so its change must not be lost in a state. A token leaves its *change*, the numbers from
which it can be made again: the state after any token is an earlier state and the changes since then, in order. So a
rollback costs nothing, and a state has the same bits however its tokens were cut into batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor


class StateSize(NamedTuple):
    """The sizes of what a recurrence keeps: of a sequence a `state`, of a token a `change` of so many numbers."""

    state: tuple[int, ...]
    change: int


class StateRow(NamedTuple):
    """A row of a batch, as a recurrence sees it: earlier changes are made again, then those of `tokens` new tokens.

    The state begins as that in slot `source`, or as zeros if this is -1. The earlier changes lie at the places
    `replayed`. After `written` changes, earlier ones included, the state goes to slot `target`; after `saved` changes
    to slot `save`. None is written where the slot is -1."""

    source: int
    replayed: Sequence[int]
    tokens: int
    target: int = -1
    written: int = 0
    save: int = -1
    saved: int = 0


class Recurrence(Protocol):
    """Computes a layer's output from its states; a family makes one for each of its layers that has a state."""

    size: StateSize

    def __call__(
        self, states: Tensor, kept: Tensor, changes: Tensor, queries: Tensor, rows: Sequence[StateRow]
    ) -> Tensor:
        """Return the outputs [n, out] of a batch, whose new tokens have `changes` [n, change] and `queries` [n, read].

        `states` [slots, *state] in float32 and `kept` [places, change] are what earlier batches left; the caller keeps
        the changes of this one. Rows are computed in order: a row sees what an earlier one has written. A token's
        output is that of the state after its own change."""
