"""The arena of draft laws beside the speculation board: the probabilities that drafted tokens were drawn from.

Only `--sampler rejection` needs them. [slots, entries, depth] places, one for each token that the board may hold, each
with a header that names the outcome and the token and a row of V float32. The header's first word is a seqlock as on
the board: 0 while the row is being written. A reader copies the rows of the one chain it takes, and no others.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ssd.ipc.board import LINE, Key, Words
from ssd.params import Speculation

_VERSION, _TOKEN, _KEY = 0, 1, 2
_WORDS = _KEY + len(Key._fields)
_TOLERANCE = 1e-3  # of a sum of V float32

Law = npt.NDArray[np.float32]


class LawArena:
    """Both sides' view. `size_bytes` and the constructor take the same numbers: `speculation` bounds the chains and
    their depth, and the last entry is the line's."""

    def __init__(self, descriptor: int, slots: int, speculation: Speculation, vocab_size: int) -> None:
        self._memory = mmap.mmap(descriptor, self.size_bytes(slots, speculation, vocab_size))
        self.entries, self.depth = speculation.chains + 1, speculation.longest
        shape = (slots, self.entries, self.depth)
        count = slots * self.entries * self.depth
        headers: Words = np.frombuffer(self._memory, np.int64, count * _WORDS)
        self._headers = headers.reshape(*shape, _WORDS)
        rows: Law = np.frombuffer(self._memory, np.float32, offset=headers.nbytes)
        self._rows = rows.reshape(*shape, vocab_size)
        self._version = 0

    @staticmethod
    def size_bytes(slots: int, speculation: Speculation, vocab_size: int) -> int:
        """Bytes of shared memory; only those that are written to take any room."""
        places = slots * (speculation.chains + 1) * speculation.longest
        return places * (8 * _WORDS + 4 * vocab_size)

    def write(self, slot: int, entry: int, key: Key, start: int, tokens: Sequence[int], laws: Sequence[Law]) -> None:
        """The laws [n, <= V] of the tokens of a board entry from its `start`-th on; what does not fit is left out, and
        the target will not use those tokens."""
        if (place := self._place(entry)) is None:
            return
        for index, (token, law) in enumerate(zip(tokens, laws, strict=True), start):
            if index >= self.depth:
                return
            header, row = self._headers[slot, place, index], self._rows[slot, place, index]
            self._version += 1
            header[_VERSION] = 0
            row[: len(law)] = law
            header[_TOKEN:] = (token, *key)
            header[_VERSION] = self._version

    def read(self, slot: int, entry: int, key: Key, tokens: Sequence[int]) -> Law:
        """float32 [n, V]: the laws of the first n tokens of a chain, as far as they are there and are laws."""
        found: list[Law] = []
        place = self._place(entry)
        for index, token in enumerate(tokens[: self.depth] if place is not None else ()):
            header = self._headers[slot, place, index].copy()
            law = self._rows[slot, place, index].copy()
            torn = header[_VERSION] == 0 or header[_VERSION] != self._headers[slot, place, index, _VERSION]
            if torn or tuple(header[_TOKEN:].tolist()) != (token, *key) or not _is_law(law, token):
                break
            found.append(law)
        return np.stack(found) if found else np.empty((0, self._rows.shape[-1]), np.float32)

    def _place(self, entry: int) -> int | None:
        """Where the board's `entry` has its laws: those of chains in order, then the line's."""
        if entry == LINE:
            return self.entries - 1
        return entry if entry < self.entries - 1 else None


def _is_law(law: Law, token: int) -> bool:
    """Whether `token` can have been drawn from it; a NaN fails every comparison."""
    return bool(law.min() >= 0) and abs(float(law.sum()) - 1) <= _TOLERANCE and float(law[token]) > 0
