"""Figures from scripted histories, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from ssd.config.params import Speculation
from ssd.ipc.messages import EndEvent, FrontendReport, Load, RoundEvent
from ssd.ipc.public import Metrics, Source
from ssd.ipc.trace_ring import WORDS, Mark, State
from ssd.monitor.messages import Process, Snapshot, TraceNews
from ssd.plugins.monitor.history import History, TraceHistory
from ssd.plugins.monitor.stalls import Pipeline, causes
from ssd.plugins.monitor.statistics import figures, gaps, percentiles, speculation_figures

S, MS = 10**9, 10**6


def trace(*records: tuple[int, int, int], first: int = 0) -> bytes:
    """(time, code, detail) as records."""
    plain = [(first + i, *record) for i, record in enumerate(records)]
    return np.pad(np.array(plain, np.int64), ((0, 0), (0, WORDS - 4))).tobytes()


def snapshot(at: int, engine: str = "e", traces: dict[str, bytes] | None = None, *reports: FrontendReport) -> Snapshot:
    news = [TraceNews(role, records) for role, records in (traces or {}).items()]  # type: ignore[arg-type]
    processes = [Process("target", 5, "up", 2**20, 0.0), Process("draft", 6, "up", 2**20, 9.0), Process("x", 0, "down")]
    return Snapshot(
        engine,
        at,
        "model",
        "draft",
        Speculation(num_speculative_tokens=4, fan_out=(3,), backup="jit"),
        True,
        processes,
        news,
        list(reports),
    )


def round_(
    at: int,
    tokens: int = 1,
    drafted: int = 0,
    cache: str = "",
    first: bool = False,
    request: int = 1,
    source: Source = "draft",
) -> RoundEvent:
    return RoundEvent(at, request, tokens, drafted, max(0, tokens - 1), cache, first, source if drafted else "")


def test_acceptance_and_hits() -> None:
    found = speculation_figures(
        [
            round_(0, first=True),
            round_(1, 3, 2, "first_round"),
            round_(2, 3, 4, "hit"),
            round_(3, 1, 4, "hit"),
            round_(4, 2, 1, "late", source="lookup"),
            round_(5, 1, 0, "token_not_covered"),
        ]
    )
    assert found.rounds == 5
    assert found.acceptance_length == 1 + 5 / 5
    assert found.acceptance_rate == 5 / 11
    assert found.per_position == [3 / 4, 2 / 3, 0.0, 0.0]
    assert found.hit_rate == 2 / 4
    assert (found.length_on_hit, found.length_on_miss) == (2.0, 1.5)
    assert found.misses == {"first_round": 1, "late": 1, "token_not_covered": 1}
    assert found.accepted_by_source == {"draft": 4, "lookup": 1}


def test_nothing_yet_is_zero_and_no_error() -> None:
    found = speculation_figures([])
    assert (found.rounds, found.acceptance_length, found.hit_rate, found.per_position) == (0, 0.0, 0.0, [])
    assert percentiles([]).count == 0
    history = History()
    history.add(snapshot(S))
    assert figures(history, 60).tokens_per_second == 0


def test_percentiles_by_nearest_rank_with_weights() -> None:
    found = percentiles([(float(n), 1) for n in range(1, 101)])
    assert (found.p50, found.p95, found.p99, found.count) == (50, 95, 99, 100)
    found = percentiles([(1.0, 98), (9.0, 2)])
    assert (found.p50, found.p95, found.p99) == (1.0, 1.0, 9.0)


def test_a_gap_is_divided_over_the_tokens_of_its_chunk() -> None:
    rounds = [round_(0), round_(S, request=2), round_(2 * S, 4), round_(3 * S, 1)]
    assert gaps(rounds) == [(0.5, 4), (1.0, 1)]


def test_figures_of_a_history() -> None:
    history = History()
    target = trace((0, State.IDLE, 0), (8 * S, State.VERIFY, 5), (10 * S, Mark.HIT, 1), (11 * S, State.IDLE, 0))
    metrics = Metrics(time_to_first_token_ms=500.0, generation_time_ms=1500.0, tokens_per_second=3.0)
    ended = [EndEvent(10 * S, 1, 7, 5, "stop", metrics), EndEvent(10 * S, 2, 7, 0, "abort", Metrics())]
    report = FrontendReport(
        Load(running=2, kv_cache_usage=0.5, plan="sd, K 3"), 5, "ready", [round_(9 * S), round_(11 * S, 5)], ended
    )
    history.add(snapshot(S))
    history.add(snapshot(12 * S, "e", {"target": target}, report))
    found = figures(history, 60)
    assert found.tokens_per_second == 5 / 2
    assert found.per_second[-4:] == [1.0, 0.0, 5.0, 0.0]
    assert (found.running, found.waiting, found.kv_cache_usage, found.plan) == (2, 3, 0.5, "sd, K 3")
    assert found.end_to_end.p50 == 2.0 and found.end_to_end.count == 1
    assert found.inter_token_latency.p50 == 2 / 5
    assert found.pipeline.shares == {"target": {"idle": 0.7, "verify": 0.3}}
    assert [process.state for process in found.processes] == ["UP", "STALE", "DOWN"]
    assert [(request.request, request.age) for request in found.requests] == [(2, 2.0), (1, 2.0)]


def test_records_count_once_however_often_they_are_told() -> None:
    kept = TraceHistory(most=100)
    kept.add(trace((0, State.IDLE, 0), (10, State.VERIFY, 1)))
    kept.add(trace((0, State.IDLE, 0), (10, State.VERIFY, 1), (20, State.SAMPLE, 0)))
    states = [(State.VERIFY, 10, 20), (State.SAMPLE, 20, 30)]
    assert [span[:3] for span in kept.since(-1, 30)[0]] == [(State.IDLE, 0, 10), *states]
    assert [span[:3] for span in kept.since(5, 30)[0]] == [(State.IDLE, 5, 10), *states]
    assert [span[:3] for span in kept.since(10, 15)[0]] == [(State.VERIFY, 10, 15)]


def test_old_records_are_let_go() -> None:
    kept = TraceHistory(most=10)
    for number in range(100):
        kept.add(trace((number, State.DEPTH, 1 + number), first=number))
    spans, _ = kept.since(0, 100)
    assert 10 <= len(spans) <= 11 and spans[-1].detail == 100


def test_another_engine_begins_another_history() -> None:
    history = History()
    history.add(snapshot(S, "e", {"target": trace((0, State.IDLE, 0), (5, State.IDLE, 1))}))
    history.add(snapshot(2 * S, "f", {"target": trace((S, State.VERIFY, 2))}))
    spans, _ = history.traces["target"].since(0, 2 * S)
    assert [span.state for span in spans] == [State.VERIFY]


@pytest.mark.parametrize(
    ("shares", "misses", "words"),
    [
        ({"target": {"wait_for_draft": 0.1}}, {"late": 3}, ["waited 10%", "draft too slow"]),
        ({"target": {"prefill": 0.4}}, {}, ["40% on prompts"]),
        ({"target": {"other": 0.1, "idle": 0.5}}, {}, ["20% of its busy time"]),
        ({"draft": {"wait_for_target": 0.5}, "target": {"verify": 1.0}}, {}, ["room for a larger K"]),
        ({"target": {"verify": 1.0}}, {"token_not_covered": 50}, ["larger fan-out"]),
        ({"target": {"verify": 1.0}}, {}, []),
    ],
)
def test_a_stall_has_a_cause(shares: dict[str, dict[str, float]], misses: dict[str, int], words: list[str]) -> None:
    found = causes(Pipeline(10.0, shares), misses, 100, {"target": "UP"})
    assert len(found) == min(1, len(words))
    assert all(word in found[0] for word in words)


def test_a_parked_draft_is_no_stall() -> None:
    history = History()
    history.add(replace(snapshot(S), processes=[Process("target", 5, "up"), Process("draft", 0, "parked")]))
    found = figures(history, 60)
    assert [process.state for process in found.processes] == ["UP", "PARKED"]
    assert not any("down" in stall for stall in found.stalls)


def test_who_is_away_is_said_first() -> None:
    found = causes(Pipeline(10.0, {"target": {"prefill": 0.9}}), {}, 0, {"draft": "DOWN", "frontend": "STALE"})
    assert found[:2] == ["the draft is down; decoding goes on without it", "the frontend shows no sign of life"]
    assert "no compiled kernels" in causes(Pipeline(10.0, {}), {}, 0, {}, kernels=False)[0]
