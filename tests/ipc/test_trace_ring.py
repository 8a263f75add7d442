"""Traces: what is written is read, also late, also while it is overwritten."""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.ipc.process import memory_file
from ssd.ipc.trace_ring import (
    CAPACITY,
    FIGURES,
    NO_TRACE,
    SIZE_BYTES,
    Mark,
    Moment,
    State,
    TraceReader,
    TraceRing,
    spans,
)


@pytest.fixture
def descriptor() -> Iterator[int]:
    descriptor = memory_file("test", SIZE_BYTES)
    yield descriptor
    os.close(descriptor)


def codes(reader: TraceReader) -> list[tuple[int, int]]:
    return [(code, detail) for _, _, code, detail, *_ in reader.news().tolist()]


def test_states_and_marks_come_in_order_and_once(descriptor: int) -> None:
    trace, reader = TraceRing(descriptor, "target"), TraceReader(descriptor, "target")
    trace.enter(State.VERIFY, 5)
    trace.looked_up(7, "hit")
    trace.looked_up(8, "")
    trace.enter(State.OTHER)
    trace.enter(State.OTHER)
    assert codes(reader) == [(State.VERIFY, 5), (Mark.HIT, 7), (State.OTHER, 0)]
    assert codes(reader) == []
    trace.enter(State.IDLE)
    assert codes(reader) == [(State.IDLE, 0)]
    reader.rewind()
    assert len(reader.news()) == 4


def test_a_mark_has_its_figures_and_a_state_or_a_mark_after_it_has_none(descriptor: int) -> None:
    """Also where an older record with figures lay."""
    trace, reader = TraceRing(descriptor, "target"), TraceReader(descriptor, "target")
    for _ in range(CAPACITY):
        trace.note(Mark.NO_GAIN, 3, *range(1, 8))
    trace.looked_up(7, "late", 1.0, math.nan)
    trace.looked_up(7, "hit")
    trace.note(Mark.UNSEEN, 7)
    trace.enter(State.OTHER)
    _, moments = spans(reader.news(), until=2**62)
    assert moments[0].figures == (1, 2, 3, 4, 5, 6, 7)
    assert [moment.figures for moment in moments[-3:]] == [(1.0, 0.0), (), (0.0, 0.0)]


@pytest.mark.parametrize("mark", Mark)
def test_every_mark_has_a_sentence_whatever_its_figures_are(mark: Mark) -> None:
    """Every process of the engine can write to this memory."""
    for figures in ((), (0.0,) * 8, (-1e300,) * 8, tuple(range(1, 9))):
        line = Moment(mark, 0, 3, figures[: len(FIGURES[mark])]).line
        assert "3" in line and "{" not in line


def test_the_lanes_of_the_processes_are_apart(descriptor: int) -> None:
    TraceRing(descriptor, "target").enter(State.VERIFY)
    TraceRing(descriptor, "draft").enter(State.DEPTH, 1)
    assert codes(TraceReader(descriptor, "target")) == [(State.VERIFY, 0)]
    assert codes(TraceReader(descriptor, "draft")) == [(State.DEPTH, 1)]


def test_a_late_reader_gets_the_newest_records(descriptor: int) -> None:
    trace, reader = TraceRing(descriptor, "target"), TraceReader(descriptor, "target")
    for number in range(CAPACITY + 10):
        trace.enter(State.DEPTH, number + 1)
    news = reader.news()
    # What the next record overwrites is not trusted.
    assert news[:, 0].tolist() == list(range(11, CAPACITY + 10))
    assert (np.diff(news[:, 1]) >= 0).all()


def test_a_record_that_has_another_number_is_not_read(descriptor: int) -> None:
    trace, reader = TraceRing(descriptor, "target"), TraceReader(descriptor, "target")
    for depth in (1, 2, 3):
        trace.enter(State.DEPTH, depth)
    with mmap.mmap(descriptor, SIZE_BYTES) as memory:
        first = memory.find(struct.pack("<2q", State.DEPTH, 2)) - 16  # number and time come before
        struct.pack_into("<q", memory, first, CAPACITY + 1)
    assert codes(reader) == [(State.DEPTH, 1), (State.DEPTH, 3)]


def test_who_comes_after_a_dead_writer_goes_on_in_its_lane(descriptor: int) -> None:
    TraceRing(descriptor, "draft").enter(State.DEPTH, 1)
    TraceRing(descriptor, "draft").enter(State.DOWN)
    TraceRing(descriptor, "draft").enter(State.LOADING)
    assert [number for number, *_ in TraceReader(descriptor, "draft").news().tolist()] == [0, 1, 2]


@given(
    counts=st.lists(
        st.sampled_from([-(2**63), -1, 0, 3, 2**62 - 2, 2**62, 2**63 - 1]) | st.integers(-(2**63), 2**63 - 1)
    )
)
def test_a_count_that_cannot_be_ends_nobody(counts: list[int]) -> None:
    """Every process of the engine can write to this memory."""
    descriptor = memory_file("test", SIZE_BYTES)
    memory = mmap.mmap(descriptor, SIZE_BYTES)
    reader = TraceReader(descriptor, "target")
    for count in counts:
        memory[:8] = count.to_bytes(8, "little", signed=True)
        reader.news()
        TraceRing(descriptor, "target").enter(State.DOWN)
        assert codes(reader)[-1:] == [(State.DOWN, 0)]
    os.close(descriptor)


def test_a_silent_lane_writes_nothing(descriptor: int) -> None:
    NO_TRACE.enter(State.VERIFY)
    NO_TRACE.looked_up(1, "hit")
    assert codes(TraceReader(descriptor, "target")) == []


def test_every_nanosecond_has_a_state() -> None:
    records = np.array(
        [[0, 100, State.VERIFY, 5], [1, 130, Mark.LATE, 9], [2, 150, State.OTHER, 0], [3, 160, 99, 0]], dtype=np.int64
    )
    states, moments = spans(records, until=200)
    assert states == [(State.VERIFY, 100, 150, 5), (State.OTHER, 150, 200, 0)]
    assert [moment[:3] for moment in moments] == [(Mark.LATE, 130, 9)]


def test_what_was_overwritten_is_lost_and_not_a_long_state() -> None:
    records = np.array([[0, 100, State.VERIFY, 5], [7, 150, Mark.HIT, 1], [8, 160, State.IDLE, 0]], dtype=np.int64)
    states, _ = spans(records, until=200)
    assert [(state, end - begin) for state, begin, end, _ in states] == [(State.LOST, 60), (State.IDLE, 40)]


@pytest.mark.parametrize(
    ("mark", "figures", "words"),
    [
        (
            Mark.NO_GAIN,
            (1, -0.766, 2, -380, 140, 1, 2),
            "1 draft token, 2 ms each, for 1 row would bring 0.766 tokens fewer",
        ),
        (Mark.K_NOT_COVERED, (1, 1), "the draft prepared 1 outcome, none with 1 accepted token"),
        (Mark.K_NOT_COVERED, (11, 0), "the draft prepared 11 outcomes, none with 0 accepted tokens"),
        (Mark.HOPELESS, (1.1, 0.1), "a proposal would bring 0.1 tokens, and costs the time of 1.1 tokens"),
        (Mark.SILENT, (9, 0, 2, 1), "nothing for 9 ms, four times the expected wait"),
        (Mark.PLAN, (9, 3, 1, 1), "plan for 1 row: sd, K 1, 9 tok/s expected"),
    ],
)
def test_numbers_are_said_as_one_speaks(mark: Mark, figures: tuple[float, ...], words: str) -> None:
    line = Moment(mark, 0, 1, figures).line
    assert words in line and "-" not in line and "another mode" not in line
