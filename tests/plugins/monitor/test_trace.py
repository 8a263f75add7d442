"""The trace: its shape, what lies on which trace, and that arrows lead where a round went."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ssd.cli.main import main
from ssd.client import Client
from ssd.config.params import SamplingParams, Speculation
from ssd.ipc.messages import EndEvent
from ssd.ipc.process import memory_file
from ssd.ipc.public import Metrics
from ssd.ipc.trace_ring import FIGURES, SIZE_BYTES, Mark, Moment, Span, State, TraceReader, TraceRing
from ssd.monitor.messages import Snapshot, TraceNews
from ssd.plugins.monitor import trace as trace_command
from ssd.plugins.monitor.history import History
from ssd.plugins.monitor.statistics import figures
from ssd.plugins.monitor.subscriber import Subscriber
from ssd.plugins.monitor.trace_events import slowest, trace
from tests.faults.engine import running_engine
from tests.mock import ROUND_VARIABLE

MS = 1_000_000
TARGET = (
    [
        Span(State.PREFILL, 0, 10 * MS, 7),
        Span(State.OTHER, 10 * MS, 12 * MS, 0),
        Span(State.VERIFY, 12 * MS, 30 * MS, 5),
        Span(State.OTHER, 30 * MS, 32 * MS, 0),
        Span(State.VERIFY, 32 * MS, 50 * MS, 5),
        Span(State.IDLE, 50 * MS, 60 * MS, 0),
    ],
    [Moment(Mark.FIRST_ROUND, 11 * MS, 4), Moment(Mark.NO_GAIN, 12 * MS, 4), Moment(Mark.HIT, 31 * MS, 4)],
)
DRAFT = (
    [
        Span(State.PROMOTE, 0, 1 * MS, 4),
        Span(State.DEPTH, 1 * MS, 20 * MS, 1),
        Span(State.DEPTH, 20 * MS, 32 * MS, 2),
        Span(State.PROMOTE, 32 * MS, 33 * MS, 4),
        Span(State.DEPTH, 33 * MS, 50 * MS, 1),
    ],
    list[Moment](),
)


def events(document: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in document["traceEvents"] if event["ph"] == phase]


def check_shape(document: dict[str, Any]) -> None:
    """As the Trace Event Format has it."""
    for event in document["traceEvents"]:
        assert {"ph", "name", "pid"} <= event.keys()
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
    for flow in {event["id"] for event in events(document, "s")}:
        phases = [
            event["ph"] for event in document["traceEvents"] if event.get("cat") == "round" and event["id"] == flow
        ]
        assert phases[0] == "s" and phases[-1] == "f" and set(phases[1:-1]) <= {"t"}


def test_trace_ring_look_ups_and_arrows() -> None:
    metrics = Metrics(time_to_first_token_ms=10.0, generation_time_ms=40.0)
    document = trace(
        {"target": TARGET, "draft": DRAFT}, [EndEvent(50 * MS, 4, 7, 3, "stop", metrics)], 0, {"model": "m"}
    )
    check_shape(json.loads(json.dumps(document)))
    assert [(e["pid"], e["name"], e["ts"], e["dur"]) for e in events(document, "X") if e["cat"] == "state"] == [
        (2, "prefill", 0, 10_000),
        (2, "other", 10_000, 2_000),
        (2, "verify", 12_000, 18_000),
        (2, "other", 30_000, 2_000),
        (2, "verify", 32_000, 18_000),
        (3, "promote", 0, 1_000),
        (3, "depth 1", 1_000, 19_000),
        (3, "depth 2", 20_000, 12_000),
        (3, "promote", 32_000, 1_000),
        (3, "depth 1", 33_000, 17_000),
    ]
    assert [(e["name"], e["ts"], e["args"]["request"]) for e in events(document, "i")] == [
        ("miss: first round", 11_000, 4),
        ("does not wait: no gain", 12_000, 4),
        ("hit", 31_000, 4),
    ]
    # The prefill's outcome leads to its look-up; the verification's on to the draft, which promotes what it had.
    rounds = [(e["id"], e["ph"], e["pid"], e["ts"]) for e in document["traceEvents"] if e.get("cat") == "round"]
    assert rounds == [
        (0, "s", 2, 5_000),
        (0, "f", 2, 11_000),
        (1, "s", 2, 21_000),
        (1, "t", 2, 31_000),
        (1, "f", 3, 32_000),
    ]
    assert [(e["ph"], e["ts"]) for e in document["traceEvents"] if e.get("cat") == "request"] == [
        ("b", 0),
        ("e", 50_000),
    ]
    assert document["otherData"] == {"model": "m"}


LATE = Moment(Mark.LATE, 51 * MS, 4, (0.0, 20.0))
WAITED = Moment(Mark.WAITED, 91 * MS, 1, (90.0, 0.0, 2.0, 40.0, 0.9, 10.0, 60.0, 5.0))
PLAN = Moment(Mark.PLAN, 92 * MS, 1, (88.0, 4.0, 3.0, 6.0, 66.0, 3.0, 2.0, 3.0))


def slow_round(wait: int) -> dict[str, Any]:
    """A document with four quick rounds, one that waits `wait` ms for the draft, and one whose forward takes long."""
    states, begin = list[Span](), 0
    for waits, verify in ((0, 20), (0, 20), (wait, 21), (0, 25), (0, 80), (0, 30)):
        for state, ms in ((State.OTHER, 5), (State.WAIT_FOR_DRAFT, waits), (State.VERIFY, verify)):
            if ms:
                states.append(Span(state, begin, begin := begin + ms * MS, 3 if state is State.VERIFY else 0))
    hit = Moment(Mark.HIT, 26 * MS, 4)
    draft = [Span(State.WAIT_FOR_TARGET, 0, 45 * MS, 0), Span(State.DEPTH, 45 * MS, begin, 2)]
    return trace({"target": (states, [hit, LATE, WAITED, PLAN]), "draft": (draft, [])}, [], 0, {})


def test_a_slow_round_says_what_took_long_and_why() -> None:
    document = slow_round(40)
    check_shape(json.loads(json.dumps(document)))
    found = [event for event in events(document, "X") if event["cat"] == "rounds"]
    assert [event["name"] for event in found] == ["round", "round", "slow round", "round", "slow round", "round"]
    waited = found[2]
    assert (waited["ts"], waited["dur"]) == (50_000, 66_000)
    assert waited["args"] == {
        "cause": f"waiting for the draft took 40.0 ms, usually 0.0; {LATE.line}; {WAITED.line}",
        "marks": [LATE.line, WAITED.line, PLAN.line],
        "usually, ms": 32.5,
        "target, ms": {"other": 5.0, "wait for draft": 40.0, "verify": 21.0},
        "draft, ms": {"depth 2": 66.0},
        "draft, whole ms": {"depth 2": 221.0},
    }
    assert found[0]["args"]["draft, ms"] == {"wait for target": 25.0} and found[0]["args"]["cause"] == ""


def test_the_slowest_rounds_are_told_with_their_causes() -> None:
    longest, waited, other = slowest(slow_round(40))
    forward = "the target's verification took 80.0 ms, usually 23.0 (tokens: 3, usually 3)"
    assert longest == (
        f"slow round: 85.0 ms at 0.146 s, usually 32.5. Cause: {forward}. "
        "Meanwhile the draft: depth 2 85.0 ms (of 221.0)."
    )
    assert waited.startswith("slow round: 66.0 ms at 0.050 s, usually 32.5. Cause: waiting for the draft took 40.0 ms")
    assert LATE.line in waited and WAITED.line in waited and PLAN.line not in waited
    assert other.startswith("slow round: 35.0 ms at 0.231 s")
    (*_, waited) = found = list(slowest(slow_round(3)))
    assert len(found) == 4 and waited.startswith(
        "round with the longest wait: 29.0 ms at 0.050 s, usually 29.5. Cause: waiting"
    )
    assert list(slowest(trace({"target": ([], []), "draft": ([], [])}, [], 0, {}))) == []


def test_steps_of_the_draft_that_took_far_longer_than_usual_are_told() -> None:
    """Not a long wait for the target, nor what the draft did before the target decoded."""
    draft, begin = [Span(State.OTHER, 0, 300 * MS, 0)], 300 * MS
    target = [Span(State.VERIFY, begin, begin + MS, 1)]
    for number in range(12):
        for state, ms in (
            (State.DEPTH, {5: 100, 8: 40}.get(number, 2)),
            (State.WAIT_FOR_TARGET, 1 + 90 * (number == 3)),
        ):
            draft.append(Span(state, begin, begin := begin + ms * MS, 1))
    lines = list(slowest(trace({"target": (target, []), "draft": (draft, [])}, [], 0, {})))
    assert len(lines) == 2 and lines[1].startswith(
        "longest steps of the draft: 100.0 ms at 0.405 s (depth 1, usually 2.0), 40.0 ms at 0.512 s (depth 1"
    ), lines


def test_a_record_is_the_same_sentence_in_the_trace_in_top_and_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    descriptor = memory_file("test", SIZE_BYTES)
    ring, reader = TraceRing(descriptor, "target"), TraceReader(descriptor, "target")
    ring.enter(State.VERIFY, 3)
    with caplog.at_level(logging.DEBUG, "ssd.target"):
        for moment in (LATE, WAITED, PLAN):
            ring.note(moment.mark, moment.detail, *moment.figures)
        ring.looked_up(4, "hit")
        ring.looked_up(5, "late", 1.0, 7.5)
    history, now = History(), time.monotonic_ns()
    news = TraceNews("target", reader.news().tobytes())
    history.add(Snapshot("e", now, "m", "d", Speculation("ar"), True, [], [news], []))
    document = trace({"target": history.traces["target"].since(0, now)}, [], 0, {})
    written = [event["args"] for event in events(document, "i") if event["name"] != "hit"]
    os.close(descriptor)
    lines = [LATE.line, WAITED.line, PLAN.line, Moment(Mark.LATE, 0, 5, (1.0, 7.5)).line]
    assert [args["line"] for args in written] == lines == caplog.messages
    assert [line for _, line in figures(history, 60).decisions] == lines[::-1]
    named = dict(zip(FIGURES[Mark.WAITED], WAITED.figures, strict=True))
    assert written[1] == {"rows": 1, "line": WAITED.line, **named}
    assert PLAN.line == "plan for 1 row: ssd, K 3, 6 chains, 88 tok/s expected; best of another mode: sd, K 2, 66 tok/s"


@pytest.mark.mock
def test_the_command_writes_the_past_and_what_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ROUND_VARIABLE, "2")
    with running_engine(load_format="mock") as engine, Client(engine.address) as client:
        (completion,) = client.generate([[1, 2]], SamplingParams(max_tokens=50, seed=3, ignore_eos=True))
        for name, asked in (("past.json", ["--last", "60"]), ("next.json", ["--next", "0.5"])):
            file = tmp_path / name
            done = CliRunner().invoke(main, ["trace", *asked, "--output", str(file), "--address", engine.address])
            assert done.exit_code == 0 and done.output.startswith(f"{file}: "), done.output
            document = json.loads(file.read_text())
            check_shape(document)
            verified = [event for event in events(document, "X") if event["name"] == "verify"]
            told = [line for line in done.output.splitlines() if line.startswith("slow round: ")]
            assert len(told) == (3 if name == "past.json" else 0)
            hits = [event for event in events(document, "i") if event["name"] == "hit"]
            expected = (completion.metrics.rounds + 1, completion.metrics.hits) if name == "past.json" else (0, 0)
            assert (len(verified), len(hits)) == expected
            assert document["otherData"]["model"] == engine.config.target_name


@pytest.mark.mock
def test_an_engine_that_goes_leaves_what_came_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The moments before its end are those that one wants to see."""
    monkeypatch.setattr(trace_command, "_PATIENCE_S", 1.0)
    file = tmp_path / "trace.json"
    with running_engine(load_format="mock") as engine:
        heard, receive = list[Snapshot](), Subscriber.receive

        def stopping(subscriber: Subscriber, timeout: float) -> Snapshot | None:
            snapshot = receive(subscriber, timeout)
            if snapshot is not None:
                heard.append(snapshot)
                if len(heard) == 3:
                    engine.stop(drain=0)
            return snapshot

        monkeypatch.setattr(Subscriber, "receive", stopping)
        asked = ["trace", "--next", "600", "--output", str(file), "--address", engine.address]
        done = CliRunner().invoke(main, asked)
    assert done.exit_code == 0 and "the engine has gone" in done.stderr, done.output
    check_shape(json.loads(file.read_text()))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--last", "1", "--next", "1"], "not both"),
        (["--address", "tcp://127.0.0.1:1"], "no engine on this machine"),
        (["--last", "nan"], "'nan' is not a number"),
        (["--next", "1", "--output", "nowhere/x.json"], "--output nowhere/x.json: nowhere is no folder"),
    ],
)
def test_what_cannot_be_is_refused(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(main, ["trace", *arguments])
    assert done.exit_code == 2 and done.output.startswith("error: ") and words in done.output
