"""The built-in pair, speculating: its traces, its figures and its requests' metrics tell the same story."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from ssd.cli.main import main
from ssd.client import Client, Completion
from ssd.config.params import SamplingParams
from ssd.ipc.trace_ring import Mark, Span, State
from ssd.launch.supervisor import Engine
from ssd.plugins.monitor.history import History
from ssd.plugins.monitor.statistics import figures
from ssd.plugins.monitor.subscriber import Subscriber
from tests.faults.engine import running_engine
from tests.scripted_engine import PATIENCE_S

K = 3


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running_engine(mode="ssd", num_speculative_tokens=K, fan_out=(2,), backup="jit") as engine:
        yield engine


@pytest.fixture(scope="module")
def watched(engine: Engine) -> tuple[History, Completion]:
    """One request, from before its begin to after its end."""
    subscriber, history = Subscriber(engine.address), History()

    def hear() -> None:
        snapshot = subscriber.receive(0.1)
        if snapshot is not None:
            history.add(snapshot)

    deadline = time.monotonic() + PATIENCE_S
    while not history.began:
        hear()
        assert time.monotonic() < deadline
    with Client(engine.address) as client:
        asked = SamplingParams(max_tokens=60, ignore_eos=True, store=False)  # the memory would take the place of hits
        completion = client.generate("The sea is", asked)
    while not history.ended:
        hear()
        assert time.monotonic() < deadline + PATIENCE_S
    subscriber.close()
    return history, completion


def trace(history: History, role: str) -> list[Span]:
    return history.traces[role].since(0, history.now)[0]


def test_every_round_is_a_verification_with_its_look_up(watched: tuple[History, Completion]) -> None:
    history, completion = watched
    metrics = completion.metrics
    states = Counter(span.state for span in trace(history, "target"))
    # The prompt is one chunk, and the last round has no look-up.
    assert (states[State.PREFILL], states[State.VERIFY]) == (1, metrics.rounds)
    moments = history.traces["target"].since(0, history.now)[1]
    marks = Counter(moment.mark.name.lower() for moment in moments if moment.mark.of_look_up)
    waits, reasons = states[State.WAIT_FOR_DRAFT], sum(Mark.HOPELESS <= moment.mark < Mark.WAITED for moment in moments)
    found = figures(history, 300).speculating
    assert found.rounds == metrics.rounds
    assert found.acceptance_length == pytest.approx(metrics.mean_acceptance_length)
    assert found.hit_rate == pytest.approx(metrics.hit_rate)
    assert marks["hit"] - metrics.hits in (0, 1)  # the last look-up may be of a round that never came
    assert sum(marks.values()) - marks["first_round"] - metrics.hits - metrics.misses in (0, 1)
    assert waits + reasons >= metrics.misses, "a row that misses waits, or says why not"


def test_no_time_is_without_a_state(watched: tuple[History, Completion]) -> None:
    history, _ = watched
    for role in ("target", "draft"):
        spans = trace(history, role)
        assert all(one.end == other.begin for one, other in pairwise(spans))
        assert State.LOST not in {span.state for span in spans}


def test_the_draft_promotes_and_deepens(watched: tuple[History, Completion]) -> None:
    history, completion = watched
    spans = trace(history, "draft")
    states = Counter(span.state for span in spans)
    # Where the machine is so busy that the draft does not pay, the target leaves it alone for a while.
    assert 0 < states[State.PROMOTE] <= completion.metrics.rounds
    depths = {span.detail for span in spans if span.state is State.DEPTH}
    # A chain that has won may be a trunk of K + 1 tokens, and the last one's guess is computed once it is the path's.
    assert {1} <= depths <= set(range(1, K + 3))
    assert spans[-1].state is State.IDLE


def test_arrows_lead_to_the_draft(engine: Engine, watched: tuple[History, Completion], tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    done = CliRunner().invoke(main, ["trace", "--last", "600", "--output", str(file), "--address", engine.address])
    assert done.exit_code == 0, done.output
    events = json.loads(file.read_text())["traceEvents"]
    arrows = [event for event in events if event.get("cat") == "round"]
    assert sum(event["ph"] == "f" and event["pid"] == 3 for event in arrows) > 0
    assert {event["name"] for event in events if event["ph"] == "X"} >= {"verify", "prefill", "depth 1", "promote"}
