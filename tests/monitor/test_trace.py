"""The trace: its shape, what lies on which trace, and that arrows lead where a round went."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ssd.cli import trace as trace_command
from ssd.cli.main import main
from ssd.client import Client
from ssd.config.params import SamplingParams
from ssd.emulation.mock.process import ROUND_VARIABLE
from ssd.ipc.messages import EndEvent
from ssd.ipc.public import Metrics
from ssd.ipc.trace_ring import Mark, Moment, Span, State
from ssd.monitor.messages import Snapshot
from ssd.monitor.subscriber import Subscriber
from ssd.monitor.trace import trace
from tests.faults.engine import running_engine

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
    assert [(e["pid"], e["name"], e["ts"], e["dur"]) for e in events(document, "X")] == [
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
    assert [(e["name"], e["ts"], e["args"]) for e in events(document, "i")] == [
        ("miss: first round", 11_000, {"request": 4}),
        ("does not wait: no gain", 12_000, {"request": 4}),
        ("hit", 31_000, {"request": 4}),
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
            hits = [event for event in events(document, "i") if event["name"] == "hit"]
            expected = (completion.metrics.rounds + 1, completion.metrics.hits) if name == "past.json" else (0, 0)
            assert (len(verified), len(hits)) == expected
            assert document["otherData"]["model"] == engine.config.target_name


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
        (["--next", "1", "--output", "nowhere/x.json"], "--output nowhere/x.json: nowhere is no folder"),
    ],
)
def test_what_cannot_be_is_refused(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(main, ["trace", *arguments])
    assert done.exit_code == 2 and done.output.startswith("error: ") and words in done.output
