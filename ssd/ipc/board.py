"""The speculation board: draft tokens by verification outcome, in shared memory, without a lock.

One slot per running sequence, `ENTRIES` entries per slot, one entry per cached outcome. The draft is the only writer,
the target the only reader. An entry is a row of 64-bit words:

    version | epoch | request | round | base | accepted | token | depth | checksum | ids[MAX_LOOKAHEAD]

`version` is a seqlock: 0 while the entry is being written, otherwise a number that changes with every write; it is
written last and compared before and after reading. The checksum covers every other word, so that a torn or scribbled
entry is never used even on a machine that reorders stores. `round` is the verification whose outcome
(accepted, token) the entry answers and `base` the committed length it started from: an entry of another epoch,
request, round or base is stale and does not exist for the reader.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ssd import failpoints
from ssd.params import MAX_CHAINS, MAX_LOOKAHEAD

LINE = MAX_CHAINS  # the entry of the line, what is drafted after a miss; chains have the others
ENTRIES = MAX_CHAINS + 1
VERSION, EPOCH, _REQUEST, _ROUND, _BASE, _ACCEPTED, _TOKEN, DEPTH, CHECKSUM = range(9)
IDS = 9
_WORDS = IDS + MAX_LOOKAHEAD
SALT = 0x5353445F424F4152
_HALF = _WORDS // 2
_HEADER_WORDS = 8  # progress, tree steps, nanoseconds in them, tokens that chains grew by; the rest reserved
_PROGRESS, _STEPS, _STEP_NS, _GROWN = range(4)
_MOST = 2**59  # of a counter; in nanoseconds 18 years

Words = npt.NDArray[np.int64]
# SplitMix64's finaliser: weights on an even grid would not see differences that cancel, such as +1, -2, +1.
_SPREAD = np.arange(1, _WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
_SPREAD = (_SPREAD ^ (_SPREAD >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
_SPREAD = (_SPREAD ^ (_SPREAD >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
WEIGHTS = (_SPREAD ^ (_SPREAD >> np.uint64(31))) | np.uint64(1)


class Key(NamedTuple):
    """What a speculation answers: the outcome (accepted, token) of `round` of `request`, begun at length `base`."""

    epoch: int
    request: int
    round: int
    base: int
    accepted: int
    token: int


class Cached(NamedTuple):
    """A speculation found on the board, and the number of the entry that held it."""

    entry: int
    ids: list[int]


class Telemetry(NamedTuple):
    """The draft's own counters: loop progress (changes while it lives), tree steps taken, seconds spent in them, tokens
    that chains grew by in them."""

    progress: int
    steps: int
    step_seconds: float
    grown: int


def size_bytes(slots: int) -> int:
    """Bytes of shared memory that a board of `slots` slots needs."""
    return 8 * (_HEADER_WORDS + slots * ENTRIES * _WORDS)


def _checksum(rows: Words) -> Words:
    """One word per row over every word but version and checksum; zeroed rows never check out."""
    words = rows.view(np.uint64)
    mixed = (words ^ (words >> np.uint64(29))) * WEIGHTS
    mixed[:, [VERSION, CHECKSUM]] = 0
    total = mixed.sum(axis=1, dtype=np.uint64) ^ np.uint64(SALT)
    return total.view(np.int64)


class _Board:
    def __init__(self, descriptor: int, slots: int) -> None:
        self._memory = mmap.mmap(descriptor, size_bytes(slots))
        words: Words = np.frombuffer(self._memory, dtype=np.int64)
        self._header = words[:_HEADER_WORDS]
        self._slots = words[_HEADER_WORDS:].reshape(slots, ENTRIES, _WORDS)


class BoardWriter(_Board):
    """The draft's side."""

    def __init__(self, descriptor: int, slots: int) -> None:
        super().__init__(descriptor, slots)
        self._version, self._part_of_step = 0, 0.0
        self._header[:] = 0  # whatever the draft before has left there

    def publish(self, slot: int, entries: Sequence[int], keys: Sequence[Key], chains: Sequence[Sequence[int]]) -> None:
        """Write one chain (its ids so far) per entry number; all entries of one call become visible together."""
        rows: Words = np.zeros((len(keys), _WORDS), dtype=np.int64)
        for row, key, chain in zip(rows, keys, chains, strict=True):
            row[EPOCH:DEPTH] = key
            row[DEPTH] = len(chain)
            row[IDS : IDS + len(chain)] = chain
        rows[:, CHECKSUM] = _checksum(rows)
        self._version += 1
        where = self._slots[slot]
        index = np.asarray(entries)
        where[index, VERSION] = 0
        if failpoints.is_armed("draft.mid_write"):
            where[index, EPOCH:_HALF] = rows[:, EPOCH:_HALF]
            failpoints.reach("draft.mid_write")
        where[index, EPOCH:] = rows[:, EPOCH:]
        failpoints.reach("draft.after_payload")
        where[index, VERSION] = self._version
        failpoints.reach("draft.after_commit")

    def clear(self, slot: int) -> None:
        """Forget every entry of a slot."""
        self._slots[slot, :, VERSION] = 0

    def tick(self, step_seconds: float | None = None, depths: float = 1.0, grown: int = 0) -> None:
        """Show that the draft is alive; if a forward was just taken, how long it took, by how many tokens chains
        became deeper, on average, and all together. A forward that brings two is two tree steps."""
        self._header[_PROGRESS] += 1
        if step_seconds is not None:
            steps = int(depths + self._part_of_step)
            self._part_of_step += depths - steps
            self._header[_STEPS] += steps
            self._header[_STEP_NS] += int(step_seconds * 1e9)
            self._header[_GROWN] += grown


class BoardReader(_Board):
    """The target's side. Whatever bytes the memory holds, a lookup returns valid ids or nothing.

    `rejected` counts entries that were not sound, `stale` look-ups that found only what answers another outcome.
    """

    def __init__(self, descriptor: int, slots: int, vocab_size: int) -> None:
        super().__init__(descriptor, slots)
        self.vocab_size = vocab_size
        self.rejected = self.stale = 0

    def lookup(self, slot: int, key: Key, most: int = MAX_LOOKAHEAD) -> list[int] | None:
        """The ids cached for an outcome; see `find`."""
        found = self.find(slot, key, most)
        return None if found is None else found.ids

    def find(self, slot: int, key: Key, most: int = MAX_LOOKAHEAD) -> Cached | None:
        """What is cached for an outcome, at whatever depth exists now and at most `most`; None when it is a miss.

        A chain that is registered but has no token yet has no ids.
        """
        entries = self._slots[slot]
        # Few tokens are alike, so that hardly anything is left to compare.
        for index in np.flatnonzero(entries[:, _TOKEN] == key.token).tolist():
            before = entries[index, VERSION]
            row = entries[index].copy()
            if not before or tuple(row[EPOCH:DEPTH].tolist()) != key:
                continue
            if entries[index, VERSION] != before:
                continue  # overwritten while it was read
            depth = int(row[DEPTH])
            ids: list[int] = row[IDS : IDS + max(0, min(depth, MAX_LOOKAHEAD))].tolist()
            sound = 0 <= depth <= MAX_LOOKAHEAD and all(0 <= token < self.vocab_size for token in ids)
            if not sound or _checksum(row[None])[0] != row[CHECKSUM]:
                self.rejected += 1
                continue
            return Cached(index, ids[:most])
        return None

    def prepared(self, slot: int, key: Key) -> set[int]:
        """For which accepted lengths there is anything that answers an outcome of the key's round. For statistics: what
        is being written meanwhile may be missed."""
        rows = self._slots[slot]
        written = rows[:, VERSION] != 0
        mine = written & (rows[:, EPOCH:_ACCEPTED] == key[: _ACCEPTED - EPOCH]).all(axis=1)
        self.stale += bool(written.any() and not mine.any())
        return set(rows[mine, _ACCEPTED].tolist())

    @property
    def slots(self) -> Words:
        """The entries in place, [slots, ENTRIES, words], for those who look up where they compute."""
        return self._slots

    def telemetry(self) -> Telemetry:
        """Counters that cannot be are 0: what the draft has scribbled must fit into a message (contract C1)."""
        counters: list[int] = self._header[:4].tolist()
        progress, steps, nanoseconds, grown = (word if 0 <= word <= _MOST else 0 for word in counters)
        return Telemetry(progress, steps, nanoseconds / 1e9, grown)
