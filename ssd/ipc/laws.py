"""The arena of draft laws beside the speculation board: the probabilities that drafted tokens were drawn from.

Only `--sampler rejection` needs them. [slots, entries, depth] places, one for each token that the board may hold, each
with a header that names the outcome and the token and a row of V float32. The header's first word is a seqlock as on
the board: 0 while the row is being written. A reader copies the rows of the one chain it takes, and no others.

Rows on a GPU are written by the draft's kernels and copied by the target's. The headers are in memory of the host: the
draft writes a version when its device is done with the row, and the target looks at it again when its own is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ssd.ipc.arena import Arena, leading
from ssd.ipc.board import LINE, Key
from ssd.ipc.layouts import LAW_WORDS, Layout
from ssd.ipc.shared import settle

_VERSION, _TOKEN = 0, 1
_TOLERANCE = 1e-3  # of a sum of V float32


class _Written(NamedTuple):
    place: tuple[int, int, int]
    name: tuple[int, ...]  # the token and the words of the key
    law: Tensor


class LawArena(Arena):
    """Both sides' view."""

    def __init__(self, descriptor: int, layout: Layout) -> None:
        super().__init__(descriptor, layout)
        slots, self.entries, self.depth, self._vocab_size = layout.shape
        self._headers = self._words.reshape(slots, self.entries, self.depth, LAW_WORDS)
        self._version = 0
        self._written: list[_Written] = []

    def write(self, slot: int, entry: int, key: Key, start: int, tokens: Sequence[int], laws: Sequence[Tensor]) -> None:
        """The laws [n, <= V] of the tokens of a board entry from its `start`-th on; what does not fit is left out, and
        the target will not use those tokens. Nobody sees them before `show`."""
        if (number := self._number(entry)) is None:
            return
        for index, (token, law) in enumerate(zip(tokens, laws, strict=True), start):
            if index < self.depth:
                self._written.append(_Written((slot, number, index), (token, *key), law))

    def show(self) -> None:
        """What was written, all of it with one wait for the device."""
        written, self._written = self._written, []
        if not written:
            return
        for place, _, _ in written:
            self._headers[place][_VERSION] = 0
        rows = [self._rows[place][: len(law)] for place, _, law in written]
        torch._foreach_copy_(rows, [law for _, _, law in written])
        settle(self._rows)
        for place, name, _ in written:
            self._version += 1
            self._headers[place][_TOKEN:] = name
            self._headers[place][_VERSION] = self._version

    def read(self, slot: int, entry: int, key: Key, tokens: Sequence[int]) -> Tensor:
        """float32 [n, V]: the laws of the first n tokens of a chain, as far as they are there and are laws."""
        number, tokens = self._number(entry), tokens[: self.depth]
        if number is None or not tokens:
            return self._rows.new_empty(0, self._vocab_size)
        place = self._headers[slot, number]
        headers = place[: len(tokens)].copy()
        known = (headers[:, _TOKEN:] == [(token, *key) for token in tokens]).all(axis=1)
        count = leading(known & (headers[:, _VERSION] != 0))
        laws = self._rows[slot, number, :count].clone()
        sound = np.array(_are_laws(laws, tokens[:count]), dtype=bool)
        whole = place[:count, _VERSION] == headers[:count, _VERSION]
        return laws[: leading(sound & whole)]

    def _number(self, entry: int) -> int | None:
        """Where the board's `entry` has its laws: those of chains in order, then the line's."""
        if entry == LINE:
            return self.entries - 1
        return entry if entry < self.entries - 1 else None


def _are_laws(laws: Tensor, tokens: Sequence[int]) -> list[bool]:
    """Whether each token can have been drawn from its row; a NaN fails every comparison. Returns when the rows are
    there."""
    chances = laws.gather(1, torch.tensor(tokens, dtype=torch.long, device=laws.device)[:, None])[:, 0]
    sound = (laws >= 0).all(dim=1) & ((laws.sum(dim=1) - 1).abs() <= _TOLERANCE) & (chances > 0)
    found: list[bool] = sound.tolist()
    return found
