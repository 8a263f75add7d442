"""Draft probabilities in shared memory: the distribution each drafted token was drawn from (`--sampler rejection`).

There is a row of V float32 for each token that the board may hold, at [slot, entry, depth], and a header: a version (a
seqlock, as on the board), the token and the outcome. Headers always lie in host memory. The draft writes a version
after its device has finished the row; the target compares versions after its own device has copied the row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ssd.ipc.arenas import Arena, leading, settle
from ssd.ipc.board import TRUNK, Key
from ssd.ipc.layouts import DRAFT_PROBS_WORDS, Layout, draft_probs_layout
from ssd.ipc.process import Start

_VERSION, _TOKEN = 0, 1
_TOLERANCE = 1e-3  # how far the sum of a row may be from 1


class DraftProbsArena(Arena):
    name = "draft_probs"

    def __init__(self, descriptor: int, layout: Layout) -> None:
        super().__init__(descriptor, layout)
        slots, self.entries, self.depth, self._vocab_size = layout.shape
        self._headers = self._words.reshape(slots, self.entries, self.depth, DRAFT_PROBS_WORDS)
        self._version = 0
        self._staged: list[tuple[tuple[int, int, int], tuple[int, ...], Tensor]] = []  # place, (token, *key), row

    @classmethod
    def of(cls, start: Start) -> DraftProbsArena | None:
        config = start.config
        if start.draft_probs_fd < 0:
            return None
        return cls(start.draft_probs_fd, draft_probs_layout(config.max_num_seqs, config.speculation, config.vocab_size))

    def write(self, slot: int, entry: int, key: Key, start: int, tokens: Sequence[int], rows: Sequence[Tensor]) -> None:
        """Stage `rows`, each [<= V], of a board entry's tokens from the `start`-th on, until `show`.

        Rows beyond the arena are dropped, and the target does not use their tokens."""
        if (number := self._number(entry)) is None:
            return
        for index, (token, probs) in enumerate(zip(tokens, rows, strict=True), start):
            if index < self.depth:
                self._staged.append(((slot, number, index), (token, *key), probs))

    def show(self) -> None:
        """Make all staged rows visible, with one wait for the device."""
        staged, self._staged = self._staged, []
        if not staged:
            return
        for place, _, _ in staged:
            self._headers[place][_VERSION] = 0
        rows = [self._rows[place][: len(probs)] for place, _, probs in staged]
        torch._foreach_copy_(rows, [probs for _, _, probs in staged])
        settle(self._rows)
        for place, name, _ in staged:
            self._version += 1
            self._headers[place][_TOKEN:] = name
            self._headers[place][_VERSION] = self._version

    def read(self, slot: int, entry: int, key: Key, tokens: Sequence[int]) -> Tensor:
        """Return the draft probabilities, float32 [n, V], of the first n `tokens` of a board entry.

        n counts the leading rows that are there, are distributions and give their token a probability above 0."""
        number, tokens = self._number(entry), tokens[: self.depth]
        if number is None or not tokens:
            return self._rows.new_empty(0, self._vocab_size)
        place = self._headers[slot, number]
        headers = place[: len(tokens)].copy()
        known = (headers[:, _TOKEN:] == [(token, *key) for token in tokens]).all(axis=1)
        count = leading(known & (headers[:, _VERSION] != 0))
        rows = self._rows[slot, number, :count].clone()
        sound = np.array(_are_distributions(rows, tokens[:count]), dtype=bool)
        whole = place[:count, _VERSION] == headers[:count, _VERSION]
        return rows[: leading(sound & whole)]

    def _number(self, entry: int) -> int | None:
        if entry == TRUNK:
            return self.entries - 1
        return entry if entry < self.entries - 1 else None


def _are_distributions(rows: Tensor, tokens: Sequence[int]) -> list[bool]:
    # Waits until the rows are copied. A NaN fails every comparison.
    chances = rows.gather(1, torch.tensor(tokens, dtype=torch.long, device=rows.device)[:, None])[:, 0]
    sound = (rows >= 0).all(dim=1) & ((rows.sum(dim=1) - 1).abs() <= _TOLERANCE) & (chances > 0)
    found: list[bool] = sound.tolist()
    return found
