"""Turns a history into figures.

Acceptance length = 1 + accepted / rounds. The hit rate is per round of a sequence, without the first round after its
prefill. Inter-token latency = the gap before a chunk / its tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from statistics import median
from typing import get_args

import msgspec

from ssd.config.params import Speculation
from ssd.ipc.messages import EndEvent, LinkLoad, RoundEvent
from ssd.ipc.public import Source
from ssd.ipc.trace_ring import TRACED, Mark, Span, State
from ssd.monitor.messages import Process
from ssd.plugins.monitor.history import History
from ssd.plugins.monitor.stalls import Pipeline, causes

STALE_S = 2.0
SPARKS = 60  # seconds that the sparkline shows
_SPEED_S, _SHARES_S = 2.0, 10.0
_SHOWN_REQUESTS, _SHOWN_DECISIONS = 20, 12


class Percentiles(msgspec.Struct, frozen=True):
    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    count: int = 0


class ProcessFigures(msgspec.Struct, frozen=True):
    """Figures of one process. `state` is STARTING, UP, STALE (no heartbeat), DOWN or PARKED."""

    role: str
    pid: int
    state: str
    rss_bytes: int
    beat_age: float


class SpeculationFigures(msgspec.Struct, frozen=True):
    """`per_position[i]`: of the rounds that verified more than i draft tokens, the share that accepted more than i.

    `misses` counts by reason, first rounds included. `accepted_by_source` counts accepted draft tokens."""

    rounds: int
    acceptance_length: float
    acceptance_rate: float
    per_position: list[float]
    hit_rate: float
    length_on_hit: float
    length_on_miss: float
    misses: dict[str, int]
    accepted_by_source: dict[Source, int]


class RequestFigures(msgspec.Struct, frozen=True):
    request: int
    prompt_tokens: int
    completion_tokens: int
    reason: str
    age: float
    time_to_first_token: float
    tokens_per_second: float
    acceptance_length: float
    hit_rate: float


class Figures(msgspec.Struct, frozen=True):
    """Everything that `ssd top` shows, over the last `window` seconds unless it says otherwise. Times in seconds.

    `decisions`: the last misses, waits, gates and plans in words, each with its age, the newest first."""

    model: str
    draft: str
    speculation: Speculation
    state: str
    window: float
    processes: list[ProcessFigures]
    tokens_per_second: float
    per_second: list[float]
    ended_per_second: float
    time_to_first_token: Percentiles
    inter_token_latency: Percentiles
    end_to_end: Percentiles
    speculating: SpeculationFigures
    pipeline: Pipeline
    stalls: list[str]
    running: int
    waiting: int
    kv_cache_usage: float
    plan: str
    link: LinkLoad | None
    requests: list[RequestFigures]
    decisions: list[tuple[float, str]]
    dropped: int


def figures(history: History, window: float) -> Figures:
    """Return the figures of a history that has at least one snapshot, over the last `window` seconds."""
    last = history.last
    assert last is not None, "it has begun"
    known = min(window, max(1.0, (last.at - history.began) / 1e9))
    begin = last.at - int(window * 1e9)
    rounds = [round for round in history.rounds if round.at >= begin]
    ended = [end for end in history.ended if end.at >= begin]
    finished = [end.metrics for end in ended if end.metrics.time_to_first_token_ms > 0]  # the target reported these
    pipeline = state_shares(history)
    speculating = speculation_figures(rounds)
    processes = [_process(process) for process in last.processes]
    return Figures(
        model=last.model,
        draft=last.draft,
        speculation=last.speculation,
        state=history.state,
        window=window,
        processes=processes,
        tokens_per_second=_speed(history),
        per_second=per_second(history),
        ended_per_second=len(ended) / known,
        time_to_first_token=percentiles([(m.time_to_first_token_ms / 1e3, 1) for m in finished]),
        inter_token_latency=percentiles(gaps(rounds)),
        end_to_end=percentiles([((m.time_to_first_token_ms + m.generation_time_ms) / 1e3, 1) for m in finished]),
        speculating=speculating,
        pipeline=pipeline,
        stalls=causes(
            pipeline, speculating.misses, speculating.rounds, {p.role: p.state for p in processes}, last.kernels
        ),
        running=history.load.running,
        waiting=max(0, history.open_requests - history.load.running),
        kv_cache_usage=history.load.kv_cache_usage,
        plan=history.load.plan,
        link=history.load.link,
        requests=[_request(end, last.at) for end in list(history.ended)[: -_SHOWN_REQUESTS - 1 : -1]],
        decisions=decisions(history),
        dropped=history.dropped,
    )


def percentiles(values: Iterable[tuple[float, int]]) -> Percentiles:
    """Return the percentiles of (value, how often it counts) pairs, by nearest rank."""
    ordered = sorted(values)
    below = list(accumulate(times for _, times in ordered))
    if not below:
        return Percentiles()
    p50, p95, p99 = (ordered[bisect_left(below, part * below[-1])][0] for part in (0.5, 0.95, 0.99))
    return Percentiles(p50, p95, p99, below[-1])


def gaps(rounds: Sequence[RoundEvent]) -> list[tuple[float, int]]:
    """Return (seconds per token, tokens) of every round except each request's first known one."""
    before: dict[int, int] = {}
    found = []
    for round in rounds:
        if round.tokens:
            if round.request in before:
                found.append(((round.at - before[round.request]) / 1e9 / round.tokens, round.tokens))
            before[round.request] = round.at
    return found


def speculation_figures(rounds: Iterable[RoundEvent]) -> SpeculationFigures:
    rounds = [round for round in rounds if not round.first]
    drafted, accepted = sum(round.drafted for round in rounds), sum(round.accepted for round in rounds)
    hit = [round.accepted for round in rounds if round.cache == "hit"]
    miss = [round.accepted for round in rounds if round.cache not in ("", "hit", "first_round")]
    by_source = Counter[str]()
    for round in rounds:
        by_source[round.source] += round.accepted
    longest = max((round.drafted for round in rounds), default=0)
    tried = [sum(round.drafted > index for round in rounds) for index in range(longest)]
    right = [sum(round.accepted > index for round in rounds) for index in range(longest)]
    return SpeculationFigures(
        rounds=len(rounds),
        acceptance_length=_length([round.accepted for round in rounds]),
        acceptance_rate=accepted / drafted if drafted else 0.0,
        per_position=[some / all_ for some, all_ in zip(right, tried, strict=True)],
        hit_rate=len(hit) / (len(hit) + len(miss)) if hit or miss else 0.0,
        length_on_hit=_length(hit),
        length_on_miss=_length(miss),
        misses=dict(Counter(round.cache for round in rounds if round.cache not in ("", "hit")).most_common()),
        accepted_by_source={source: by_source[source] for source in get_args(Source) if by_source[source]},
    )


def per_second(history: History) -> list[float]:
    """Return the tokens of each of the last `SPARKS` seconds, the oldest first."""
    found = [0.0] * SPARKS
    for round in reversed(history.rounds):
        age = int((history.now - round.at) // 1e9)
        if age >= SPARKS:
            break
        found[SPARKS - 1 - max(0, age)] += round.tokens
    return found


def state_shares(history: History) -> Pipeline:
    begin = history.now - int(_SHARES_S * 1e9)
    traces: dict[str, list[Span]] = {role: history.traces[role].since(begin, history.now)[0] for role in TRACED}
    verified = [span.begin for span in traces["target"] if span.state is State.VERIFY]
    steps = [(later - one) / 1e9 for one, later in pairwise(verified)]
    waits = [(span.end - span.begin) / 1e9 for span in traces["target"] if span.state is State.WAIT_FOR_DRAFT]
    shares = {role: _shares(spans) for role, spans in traces.items() if spans}
    return Pipeline(_SHARES_S, shares, median(steps) if steps else 0.0, max(waits, default=0.0))


def decisions(history: History) -> list[tuple[float, str]]:
    moments = history.traces["target"].since(history.now - int(_SHARES_S * 1e9), history.now)[1]
    said = [moment for moment in reversed(moments) if moment.mark is not Mark.HIT]
    return [((history.now - moment.at) / 1e9, moment.line) for moment in said[:_SHOWN_DECISIONS]]


def _shares(spans: Iterable[Span]) -> dict[str, float]:
    sums = Counter[str]()
    for span in spans:
        name = span.state.name.lower()
        sums[f"{name} {span.detail}" if span.state is State.DEPTH else name] += span.end - span.begin
    total = max(1, sums.total())
    return {name: sums[name] / total for name in sorted(sums)}


def _process(process: Process) -> ProcessFigures:
    stale = process.state == "up" and process.beat_age > STALE_S
    state = "STALE" if stale else process.state.upper()
    return ProcessFigures(process.role, process.pid, state, process.rss_bytes, process.beat_age)


def _speed(history: History) -> float:
    # The newest rounds may not have been reported yet.
    begin = max(history.began, history.now - int(_SPEED_S * 1e9))
    return sum(round.tokens for round in history.rounds if round.at > begin) / max(1e-3, (history.now - begin) / 1e9)


def _length(accepted: Sequence[int]) -> float:
    return 1 + sum(accepted) / len(accepted) if accepted else 0.0


def _request(end: EndEvent, now: int) -> RequestFigures:
    metrics = end.metrics
    return RequestFigures(
        request=end.request,
        prompt_tokens=end.prompt_tokens,
        completion_tokens=end.completion_tokens,
        reason=end.reason,
        age=max(0, now - end.at) / 1e9,
        time_to_first_token=metrics.time_to_first_token_ms / 1e3,
        tokens_per_second=metrics.tokens_per_second,
        acceptance_length=metrics.mean_acceptance_length,
        hit_rate=metrics.hit_rate,
    )
