"""Whatever bytes the memory holds, a lookup answers with ids that were written for that outcome, or not at all."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ssd.config.params import MAX_LOOKAHEAD
from ssd.ipc import board as layout
from ssd.ipc.board import ENTRIES, BoardReader, BoardWriter, Cached, Key, Place, Words, size_bytes
from ssd.ipc.device_board import DeviceBoard
from ssd.ipc.messages import TARGET_TO_FRONTEND, Emission, Load, Step
from ssd.ipc.public import Metrics, pack, unpack
from ssd.kernels.rounds import look_up
from ssd.verifier.overlap import ENTRY
from ssd.verifier.proposer import Counters
from tests.boards import lookup, prepared

ROOT = Path(__file__).parents[2]
SLOTS, VOCAB = 3, 1000
KEY = Key(epoch=2, request=7, round=3, base=40, accepted=1, token=99)
HEADER, WORDS = layout._HEADER_WORDS, layout._WORDS

chains = st.lists(st.integers(0, VOCAB - 1), max_size=MAX_LOOKAHEAD)
words = st.integers(-(2**63), 2**63 - 1)


@dataclass(frozen=True)
class Shared:
    """A board with both sides, and its words to scribble on."""

    descriptor: int
    writer: BoardWriter
    reader: BoardReader
    words: Words

    def entry(self, slot: int, number: int) -> Words:
        start = HEADER + (slot * ENTRIES + number) * WORDS
        return self.words[start : start + WORDS]


class DeviceReader(BoardReader):
    """Finds what a device would."""

    def find(self, slot: int, key: Key, most: int = MAX_LOOKAHEAD) -> Cached | None:
        board = DeviceBoard(self, torch.device("cpu"))
        board.fetch(slot + 1)
        found = look_up(*board.words, torch.tensor([slot]), torch.tensor([key]), ENTRY)
        entry, depth, unsound = (int(numbers[0]) for numbers in found[:3])
        self.rejected += unsound
        return Cached(entry, found[3][0, :depth].tolist()[:most]) if entry >= 0 else None


def make(reader: type[BoardReader] = BoardReader) -> Shared:
    descriptor = os.memfd_create("board")
    os.ftruncate(descriptor, size_bytes(SLOTS))
    raw: Words = np.frombuffer(mmap.mmap(descriptor, size_bytes(SLOTS)), dtype=np.int64)
    return Shared(descriptor, BoardWriter(descriptor, SLOTS), reader(descriptor, SLOTS, VOCAB), raw)


@pytest.fixture(scope="module", params=[BoardReader, DeviceReader])
def shared(request: pytest.FixtureRequest) -> Iterator[Shared]:
    board = make(request.param)
    yield board
    os.close(board.descriptor)


@pytest.fixture(autouse=True)
def wipe(shared: Shared) -> None:
    start_over(shared)


def start_over(shared: Shared) -> None:
    shared.words[:] = 0
    shared.reader.rejected = 0


# -- what is written is found -----------------------------------------------------------------------------------------


@given(st.integers(0, SLOTS - 1), st.dictionaries(st.integers(0, ENTRIES - 1), chains, min_size=1, max_size=8))
def test_round_trip(shared: Shared, slot: int, by_entry: dict[int, list[int]]) -> None:
    start_over(shared)
    keys = [KEY._replace(token=entry) for entry in by_entry]
    shared.writer.publish(slot, prepared(list(by_entry), keys, list(by_entry.values())))
    for key, chain in zip(keys, by_entry.values(), strict=True):
        assert lookup(shared.reader, slot, key) == chain
        assert lookup(shared.reader, slot, key, 2) == chain[:2]
        assert lookup(shared.reader, (slot + 1) % SLOTS, key) is None


def test_a_chain_grows_under_the_readers_eyes(shared: Shared) -> None:
    """Registered, then a depth at a time (anytime publishing); a later write replaces the earlier one."""
    assert lookup(shared.reader, 0, KEY) is None
    for depth in range(MAX_LOOKAHEAD + 1):
        shared.writer.publish(0, prepared([5], [KEY], [list(range(depth))]))
        assert lookup(shared.reader, 0, KEY) == list(range(depth))
    shared.writer.publish(0, prepared([5], [KEY], [[8]]))
    assert lookup(shared.reader, 0, KEY) == [8]


def test_an_entry_says_its_place_among_those_prepared(shared: Shared) -> None:
    """Those of one accepted length know how many there are; what is drafted after a miss has no place."""
    keys = [KEY, KEY._replace(token=1), KEY._replace(accepted=2)]
    shared.writer.publish(1, prepared([4, 0, 9], keys, [[5], [], [6]], [Place(1, 2), Place(2, 2), Place(1, 1)]))
    found = [shared.reader.find(1, key) for key in keys]
    assert [shared.reader.place(1, one.entry) for one in found if one] == [(1, 2), (2, 2), (1, 1)]
    assert shared.reader.prepared(1, KEY) == {1: 2, 2: 1}
    shared.writer.publish(1, prepared([4], [KEY], [[5, 6]]))
    assert shared.reader.place(1, 4) == (0, 0)


@pytest.mark.parametrize("field", Key._fields)
@pytest.mark.parametrize("change", [-1, 1])
def test_another_outcome_is_a_miss(shared: Shared, field: str, change: int) -> None:
    shared.writer.publish(1, prepared([0], [KEY], [[1, 2, 3]]))
    assert lookup(shared.reader, 1, KEY._replace(**{field: getattr(KEY, field) + change})) is None
    assert lookup(shared.reader, 1, KEY) == [1, 2, 3] and shared.reader.rejected == 0


def test_a_cleared_slot_is_empty_and_its_neighbours_are_not(shared: Shared) -> None:
    for slot in range(SLOTS):
        shared.writer.publish(slot, prepared([0, 63], [KEY, KEY._replace(token=1)], [[1], [2]]))
    shared.writer.clear(1)
    assert [lookup(shared.reader, slot, KEY) for slot in range(SLOTS)] == [[1], None, [1]]


def test_no_step_is_counted_before_its_time_is(shared: Shared) -> None:
    """A reader looks between any two words that the writer writes, as one that waits for a step does."""
    words, seen = shared.writer._header, []

    class Watched:
        def __getitem__(self, index: int) -> object:
            return words[index]

        def __setitem__(self, index: int, value: int) -> None:
            words[index] = value
            seen.append(shared.reader.telemetry())

    before = shared.reader.telemetry()
    shared.writer._header = Watched()  # type: ignore[assignment]
    try:
        for _ in range(3):
            shared.writer.tick(0.5, 1.0, 7)
    finally:
        shared.writer._header = words
    steps = [
        (now.steps - before.steps, now.step_seconds - before.step_seconds, now.grown - before.grown) for now in seen
    ]
    assert steps[-1] == (3, 1.5, 21)
    assert all(seconds >= 0.5 * count and grown >= 7 * count for count, seconds, grown in steps)


def test_telemetry(shared: Shared) -> None:
    shared.writer.tick()
    shared.writer.tick(0.25)
    shared.writer.tick(0.5, depths=1.5, grown=6)
    assert shared.reader.telemetry() == (3, 2, 0.75, 6, 0)
    shared.writer.tick(0.5, depths=1.5, grown=6)
    shared.writer.note_compile()
    assert shared.reader.telemetry() == (4, 4, 1.25, 12, 1)  # half steps add up


@pytest.mark.parametrize("word", [-1, -(2**63), 2**59 + 1, 2**62 + 1, 2**63 - 1])
@pytest.mark.parametrize("counter", range(5))
def test_counters_that_cannot_be_are_none(shared: Shared, counter: int, word: int) -> None:
    """They travel with the tokens, in messages whose numbers are bounded: one that did not fit would cost them all."""
    shared.writer.tick(0.25, grown=3)
    shared.words[counter] = word
    telemetry = shared.reader.telemetry()
    assert telemetry[counter] == 0
    counters = Counters(telemetry.steps, telemetry.step_seconds)
    load = Load(draft_steps=counters.steps, draft_step_seconds=counters.step_seconds)
    figures = Metrics(draft_step_ms=1e3 * counters.mean_step_seconds)
    step = Step([Emission(1, [5], finish_reason="length", metrics=figures)], load)
    assert unpack(pack(step), TARGET_TO_FRONTEND)[1] == step


# -- what is damaged is not -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chain", [[VOCAB], [1, 2, VOCAB + 5, 3], [-1], [0, 2**40]])
def test_ids_outside_the_vocabulary_are_refused_and_counted(shared: Shared, chain: list[int]) -> None:
    """Although their checksum is right: the writer itself is wrong."""
    shared.writer.publish(0, prepared([0], [KEY], [chain]))
    assert lookup(shared.reader, 0, KEY) is None and shared.reader.rejected == 1


@pytest.mark.parametrize("depth", [-1, -(2**63), MAX_LOOKAHEAD + 1, 2**62])
def test_an_impossible_depth_is_refused_and_counted(shared: Shared, depth: int) -> None:
    shared.writer.publish(0, prepared([0], [KEY], [[1, 2, 3]]))
    entry = shared.entry(0, 0)
    entry[layout.DEPTH] = depth
    entry[layout.CHECKSUM] = layout._checksum(entry.tolist())
    assert lookup(shared.reader, 0, KEY) is None and shared.reader.rejected == 1


def test_one_flipped_bit_never_gives_a_wrong_answer(shared: Shared) -> None:
    for word, bit in product(range(WORDS), range(64)):
        shared.writer.publish(0, prepared([0], [KEY], [[1, 2, 3]]))
        shared.entry(0, 0).view(np.uint64)[word] ^= np.uint64(1 << bit)
        assert lookup(shared.reader, 0, KEY) in ([[1, 2, 3]] if word == layout.VERSION else [None])


@settings(max_examples=500)
@given(chains, chains, st.lists(st.booleans(), min_size=WORDS, max_size=WORDS))
@example([5, 6, 7, 8, 9], [6, 1, 5, 2, 10], [word not in (11, 13, 15) for word in range(WORDS)])  # sums cancel
def test_a_torn_entry_never_gives_a_wrong_answer(
    shared: Shared, one: list[int], two: list[int], mask: list[bool]
) -> None:
    start_over(shared)
    entry = shared.entry(0, 0)
    shared.writer.publish(0, prepared([0], [KEY], [one]))
    first = entry.copy()
    shared.writer.publish(0, prepared([0], [KEY], [two]))
    entry[:] = np.where(mask, first, entry)
    assert lookup(shared.reader, 0, KEY) in (one, two, None)


def test_differences_that_cancel_in_a_linear_sum(shared: Shared) -> None:
    """Three ids changed by +n, -2n, +n at equal distances, as tearing may: an even grid of weights would not see it."""
    shared.writer.publish(0, prepared([0], [KEY], [[500] * MAX_LOOKAHEAD]))
    entry = shared.entry(0, 0)
    ids = entry[layout.IDS :]
    for step in (1, 2, 4):
        for first in range(MAX_LOOKAHEAD - 2 * step):
            for size in (1, 3, 17):
                ids[[first, first + step, first + 2 * step]] += np.array([size, -2 * size, size])
                assert lookup(shared.reader, 0, KEY) is None
                ids[:] = 500
    assert lookup(shared.reader, 0, KEY) == [500] * MAX_LOOKAHEAD


@settings(max_examples=300)
@given(st.data(), st.binary(min_size=64, max_size=2000))
def test_garbage_is_never_an_answer(shared: Shared, data: st.DataObject, scribble: bytes) -> None:
    start_over(shared)
    size = 8 * ENTRIES * WORDS
    shared.words[HEADER : HEADER + size // 8] = np.frombuffer((scribble * size)[:size], dtype=np.int64)
    row = shared.entry(0, data.draw(st.integers(0, ENTRIES - 1)))
    seen = Key(*row[layout.KEY].tolist())
    assert lookup(shared.reader, 0, KEY) is None
    assert lookup(shared.reader, 0, seen) is None


@settings(max_examples=300)
@given(st.integers(0, MAX_LOOKAHEAD), words, st.lists(words, min_size=MAX_LOOKAHEAD, max_size=MAX_LOOKAHEAD))
def test_garbage_under_the_right_key_is_refused_and_counted(
    shared: Shared, depth: int, checksum: int, ids: list[int]
) -> None:
    start_over(shared)
    shared.entry(0, 9)[:] = [1, *KEY, 1, 2, depth, checksum, *ids]
    assert lookup(shared.reader, 0, KEY) is None and shared.reader.rejected == 1


def test_a_damaged_entry_does_not_hide_a_sound_one(shared: Shared) -> None:
    shared.writer.publish(0, prepared([3, 8], [KEY, KEY], [[1, 2], [1, 2]]))
    shared.entry(0, 3)[layout.IDS] = 5
    assert lookup(shared.reader, 0, KEY) == [1, 2] and shared.reader.rejected == 1


@given(st.data())
def test_rows_are_looked_up_at_once_as_one_by_one(shared: Shared, data: st.DataObject) -> None:
    start_over(shared)
    outcomes = st.builds(lambda accepted, token: KEY._replace(accepted=accepted, token=token), *[st.integers(0, 3)] * 2)
    for slot in range(SLOTS):
        keys = data.draw(st.lists(outcomes, min_size=1, max_size=6))
        found = data.draw(st.lists(chains, min_size=len(keys), max_size=len(keys)))
        shared.writer.publish(slot, prepared(range(len(keys)), keys, found))
    rows = data.draw(st.lists(st.tuples(st.integers(0, SLOTS - 1), outcomes), min_size=1, max_size=9))
    board = DeviceBoard(shared.reader, torch.device("cpu"))
    board.fetch(SLOTS)
    entries, depths, _, found_ids = look_up(
        *board.words, torch.tensor([slot for slot, _ in rows]), torch.tensor([key for _, key in rows]), ENTRY
    )
    for (slot, key), entry, depth, ids in zip(rows, entries.tolist(), depths.tolist(), found_ids.tolist(), strict=True):
        one = shared.reader.find(slot, key)
        assert (entry, ids[:depth]) == ((one.entry, one.ids) if one is not None else (-1, []))


# -- two processes ----------------------------------------------------------------------------------------------------

WRITER = """
import sys
from itertools import count
from ssd.ipc.board import BoardWriter
from tests.boards import prepared
from tests.ipc.test_board import KEY, SLOTS, chain
writer = BoardWriter(int(sys.argv[1]), SLOTS)
for number in count():
    writer.publish(0, prepared([4, 5], [KEY, KEY._replace(token=1)], [chain(number), chain(number + 1)]))
"""


def chain(number: int) -> list[int]:
    """The chain of a number: length and ids tell of which (modulo VOCAB)."""
    return [(number + step * step) % VOCAB for step in range(1 + number % MAX_LOOKAHEAD)]


def test_a_writer_in_another_process_is_never_read_torn(shared: Shared) -> None:
    """It rewrites two entries without a pause while they are looked up, until enough different writes were seen."""
    command = [sys.executable, "-c", WRITER, str(shared.descriptor)]
    writer = subprocess.Popen(command, pass_fds=[shared.descriptor], cwd=ROOT)
    try:
        seen: set[int] = set()
        while len(seen) < 100:
            assert writer.poll() is None
            ids = lookup(shared.reader, 0, KEY)
            if ids is not None:
                numbers = range(ids[0], MAX_LOOKAHEAD * VOCAB, VOCAB)
                written = [number for number in numbers if chain(number) == ids]
                assert written
                seen.add(written[0])
            os.sched_yield()
    finally:
        writer.kill()
        writer.wait()


def test_what_answers_another_round_is_counted_as_stale() -> None:
    board = make()
    reader = board.reader
    assert reader.prepared(1, KEY) == {} and reader.stale == 0
    board.writer.publish(1, prepared([0], [KEY._replace(round=KEY.round - 1)], [[5]]))
    assert reader.prepared(1, KEY) == {} and reader.stale == 1
    board.writer.publish(1, prepared([1], [KEY._replace(token=3)], [[5]], [Place(2, 3)]))
    assert reader.prepared(1, KEY) == {KEY.accepted: 3} and reader.stale == 1
    os.close(board.descriptor)
