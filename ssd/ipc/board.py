"""The speculation board: draft tokens by verification outcome, in shared memory, without a lock.

The draft writes it, the target reads it. There is a slot for every running sequence, with `ENTRIES` entries, one for
each prepared outcome. An entry is a row of 64-bit words:

    version | epoch | request | round | base | accepted | token | rank | fan_out | depth | checksum | ids[MAX_LOOKAHEAD]

`version` is a seqlock: 0 while the entry is written, and another number after every write. The checksum covers the
other words, so a torn or scribbled entry is never used, even on a machine that reorders stores."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ssd.config.params import MAX_CHAINS, MAX_LOOKAHEAD
from ssd.ipc.messages import LinkLoad
from ssd.system import failpoints
from ssd.tuning.estimates import DraftTelemetry

TRUNK = MAX_CHAINS  # the entry of the trunk that is drafted after a miss; chains have the others
ENTRIES = MAX_CHAINS + 1
VERSION, EPOCH, _REQUEST, _ROUND, _BASE, _ACCEPTED, _TOKEN, RANK, FAN_OUT, DEPTH, CHECKSUM = range(11)
IDS = 11
KEY = slice(EPOCH, RANK)
_PLACE = slice(RANK, DEPTH)
_WORDS = IDS + MAX_LOOKAHEAD
SALT = 0x5353445F424F4132  # change it with the layout
_HALF = _WORDS // 2
# Words of the header: progress, tree steps, nanoseconds in them, tokens that chains grew by, kernels compiled since the
# draft is ready; then those of `LinkLoad`, with times in nanoseconds, 0 without a link. The rest is reserved.
_HEADER_WORDS = 16
_PROGRESS, _STEPS, _STEP_NS, _GROWN, _COMPILES = range(5)
_LINK = slice(5, 12)
_MOST = 2**59  # largest plausible counter; 18 years in nanoseconds

Words = npt.NDArray[np.int64]
# SplitMix64's finaliser. Evenly spaced weights would miss differences that cancel, such as +1, -2, +1.
_SPREAD = np.arange(1, _WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
_SPREAD = (_SPREAD ^ (_SPREAD >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
_SPREAD = (_SPREAD ^ (_SPREAD >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
WEIGHTS = (_SPREAD ^ (_SPREAD >> np.uint64(31))) | np.uint64(1)
WEIGHTS[[VERSION, CHECKSUM]] = 0  # not covered by the checksum
_NUMBERS: list[int] = WEIGHTS.tolist()
_MASK64 = 2**64 - 1
_PAYLOAD = struct.Struct(f"{_WORDS - EPOCH}q")


class Key(NamedTuple):
    """The outcome (`accepted`, `token`) of `round` of `request`, which began with `base` committed tokens."""

    epoch: int
    request: int
    round: int
    base: int
    accepted: int
    token: int


class Place(NamedTuple):
    """The `rank`, from 1, of a bonus token among the `fan_out` prepared for its number of accepted tokens."""

    rank: int
    fan_out: int


ENDED = Place(0, 1)
"""The place of a trunk to which no more tokens will be added; without it a trunk has `Place(0, 0)`."""


class Prepared(NamedTuple):
    """The ids so far for an outcome, to be written to board entry number `entry`."""

    entry: int
    key: Key
    ids: Sequence[int]
    place: Place = Place(0, 0)


class Cached(NamedTuple):
    """The ids of board entry number `entry`; `ended` if the entry is a trunk that gets no more tokens."""

    entry: int
    ids: list[int]
    ended: bool = False


def size_bytes(slots: int) -> int:
    return 8 * (_HEADER_WORDS + slots * ENTRIES * _WORDS)


def _checksum(row: Sequence[int]) -> int:
    # Plain integers: faster than NumPy for one row. A row of zeros never has the right checksum.
    total = 0
    for word, weight in zip(row, _NUMBERS, strict=True):
        if word:
            word &= _MASK64
            total += (word ^ (word >> 29)) * weight
    total = (total & _MASK64) ^ SALT
    return total - 2**64 if total >= 2**63 else total


class _Board:
    def __init__(self, descriptor: int, slots: int) -> None:
        self._memory = mmap.mmap(descriptor, size_bytes(slots))
        words: Words = np.frombuffer(self._memory, dtype=np.int64)
        self._header = words[:_HEADER_WORDS]
        self.slots = words[_HEADER_WORDS:].reshape(slots, ENTRIES, _WORDS)  # in place: a device may look up there


class DraftBoard:
    """The draft's side of a board, in shared memory or over a link."""

    def __init__(self) -> None:
        self._part_of_step = 0.0

    def tick(self, step_seconds: float | None = None, depths: float = 1.0, grown: int = 0) -> None:
        """Show that the draft is alive, and count a forward if there was one.

        The forward lengthened the chains by `depths` tokens on average, by `grown` in all. A forward that adds two
        tokens to each chain counts as two tree steps."""
        if step_seconds is None:
            self.count(1)
            return
        steps = int(depths + self._part_of_step)
        self._part_of_step += depths - steps
        self.count(1, steps, int(step_seconds * 1e9), grown)

    def publish(self, slot: int, prepared: Sequence[Prepared]) -> None:
        """Write all entries before the target sees one."""
        raise NotImplementedError

    def flush(self) -> None:
        """Send the published entries, if the target does not read them in place."""

    def clear(self, slot: int) -> None:
        """Forget every entry of a slot, unless the receiver does so."""

    def count(self, progress: int, steps: int = 0, nanoseconds: int = 0, grown: int = 0) -> None:
        raise NotImplementedError


class BoardWriter(_Board, DraftBoard):
    """The draft's side of the board in shared memory."""

    def __init__(self, descriptor: int, slots: int) -> None:
        super().__init__(descriptor, slots)
        DraftBoard.__init__(self)
        self._version = 0
        self._header[:] = 0  # an earlier draft has left its counters there

    def publish(self, slot: int, prepared: Sequence[Prepared]) -> None:
        if not prepared:
            return
        found = []
        for _, key, ids, place in prepared:
            row = [0, *key, *place, len(ids), 0, *ids, *[0] * (MAX_LOOKAHEAD - len(ids))]
            row[CHECKSUM] = _checksum(row)
            found.append(row)
        self._version += 1
        entries, where = [one.entry for one in prepared], self.slots[slot]
        for entry in entries:
            where[entry, VERSION] = 0
        if failpoints.is_armed("draft.mid_write"):
            where[entries, EPOCH:_HALF] = [row[EPOCH:_HALF] for row in found]
            failpoints.reach("draft.mid_write")
        for entry, row in zip(entries, found, strict=True):
            _PAYLOAD.pack_into(where[entry, EPOCH:], 0, *row[EPOCH:])
        failpoints.reach("draft.after_payload")
        for entry in entries:
            where[entry, VERSION] = self._version
        failpoints.reach("draft.after_commit")

    def clear(self, slot: int) -> None:
        self.slots[slot, :, VERSION] = 0

    def count(self, progress: int, steps: int = 0, nanoseconds: int = 0, grown: int = 0) -> None:
        self._header[_PROGRESS] += progress
        if steps or nanoseconds:
            self._header[_STEP_NS] += nanoseconds
            self._header[_GROWN] += grown
            self._header[_STEPS] += steps  # last: a reader that waits for a step then finds its duration

    def note_compile(self) -> None:
        self._header[_COMPILES] += 1

    def show_link(self, load: LinkLoad) -> None:
        rtt, jitter, *counts = msgspec.structs.astuple(load)
        self._header[_LINK] = int(1e9 * rtt), int(1e9 * jitter), *counts


class BoardReader(_Board):
    """The target's side of the board. For any bytes in the memory, a look-up returns valid ids or None.

    `rejected` counts unsound entries, `stale` look-ups in slots whose entries all belong to other rounds."""

    def __init__(self, descriptor: int, slots: int, vocab_size: int) -> None:
        super().__init__(descriptor, slots)
        self._counters = memoryview(self._memory)[:40].cast("q")  # five words of the header; numpy takes longer
        self.vocab_size = vocab_size
        self.rejected = self.stale = 0

    def find(self, slot: int, key: Key, most: int = MAX_LOOKAHEAD) -> Cached | None:
        """Return the entry for an outcome with at most `most` of the ids that exist now, maybe none; None on a miss."""
        entries = self.slots[slot]
        # Few entries have the same token, so few keys are left to compare.
        for index in np.flatnonzero(entries[:, _TOKEN] == key.token).tolist():
            before = entries[index, VERSION]
            row: list[int] = entries[index].tolist()
            if not before or tuple(row[KEY]) != key:
                continue
            if entries[index, VERSION] != before:
                continue  # overwritten while it was read
            depth = row[DEPTH]
            ids = row[IDS : IDS + max(0, min(depth, MAX_LOOKAHEAD))]
            sound = 0 <= depth <= MAX_LOOKAHEAD and all(0 <= token < self.vocab_size for token in ids)
            if not sound or _checksum(row) != row[CHECKSUM]:
                self.rejected += 1
                continue
            return Cached(index, ids[:most], tuple(row[_PLACE]) == ENDED)
        return None

    def place(self, slot: int, entry: int) -> Place:
        """Return the place of an entry, for statistics only: the draft may overwrite the entry meanwhile."""
        return Place(*self.slots[slot, entry, _PLACE].tolist())

    def prepared(self, slot: int, key: Key) -> dict[int, int]:
        """Return the fan-out by accepted length in the key's round, for statistics: it lacks entries being written.

        Count the look-up in `stale` if the slot has entries, but none for that round."""
        rows = self.slots[slot]
        written = rows[:, VERSION] != 0
        mine = written & (rows[:, EPOCH:_ACCEPTED] == key[: _ACCEPTED - EPOCH]).all(axis=1)
        self.stale += bool(written.any() and not mine.any())
        return dict(rows[mine][:, [_ACCEPTED, FAN_OUT]].tolist())

    def link(self) -> LinkLoad | None:
        """Return the figures of the link; None without a link, or if a figure is impossible."""
        rtt, jitter, *counts = found = self._header[_LINK].tolist()
        if rtt == 0 or min(found) < 0 or max(found) > _MOST:
            return None
        return LinkLoad(rtt / 1e9, jitter / 1e9, *counts)

    def telemetry(self) -> DraftTelemetry:
        """Return the draft's counters, impossible ones as 0, so that they fit into a message."""
        progress, steps, nanoseconds, *others = counters = self._counters.tolist()
        if min(counters) < 0 or max(counters) > _MOST:
            progress, steps, nanoseconds, *others = (word if 0 <= word <= _MOST else 0 for word in counters)
        return DraftTelemetry(progress, steps, nanoseconds / 1e9, *others)
