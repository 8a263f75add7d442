"""Trace rounds of one engine: where target and draft spend their time, and why look-ups miss."""

from __future__ import annotations

import json
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ssd.bench.datasets import random_ids
from ssd.client import Client, Prompt
from ssd.config.params import Mode, SamplingParams, Speculation
from ssd.ipc.trace_ring import Moment, Span
from ssd.launch.resolve import resolve
from ssd.llm import running
from ssd.monitor.history import History
from ssd.monitor.subscriber import Subscriber
from ssd.monitor.trace import trace
from tools.gpu_report.job import Job, Row
from tools.gpu_report.modes import cases

_PAIR = "llama-8b small"
_WARM_TOKENS, _TOKENS, _SETTLES_S = 64, 256, 0.3


def rows(
    job: Job,
    *,
    modes: Sequence[Mode] = ("ar", "sd", "ssd"),
    batches: Sequence[int] = (1,),
    options: Mapping[str, Any] | None = None,
) -> Iterator[Row]:
    """Yield a row for each mode and batch: speed, look-ups by result, and shares of time by role and state.

    A run comes after another one that warms up: kernels are compiled, and a draft that was left alone is taken again.
    The trace of the last one is in `out`, for Perfetto."""
    tokens = 32 if job.tiny else _TOKENS
    with tempfile.TemporaryDirectory() as folder:
        (case,) = cases(job, Path(folder), max(batches), [_PAIR], job.draft_devices[:1], options or {})
        config = msgspec.structs.replace(resolve(case.options), synthetic=case.synthetic)
        with running(config) as (engine, client):
            listener = _Listener(engine.address)
            for batch in batches:
                prompts: list[Prompt] = list(random_ids(batch, 32, config.vocab_size, seed=batch))
                for mode in modes:
                    _run(client, prompts, mode, _WARM_TOKENS)
                    begin = time.monotonic_ns()
                    found = _run(client, prompts, mode, tokens)
                    end = time.monotonic_ns()
                    time.sleep(_SETTLES_S)
                    traces = listener.between(begin, end)
                    yield {"name": f"{case.name}, batch {batch}, {mode}", **found, **_summary(traces)}
            listener.close()
    file = Path(job.out) / f"trace-{re.sub('[^a-z0-9]+', '-', job.step)}.json"
    file.write_text(json.dumps(trace(traces, (), begin, {"mode": mode})))


def _run(client: Client, prompts: Sequence[Prompt], mode: Mode, tokens: int) -> Row:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, speculation=Speculation(mode, 5, (3,), "jit"))
    began = time.perf_counter()
    metrics = [answer.metrics for answer in client.generate(prompts, params)]
    seconds = time.perf_counter() - began
    return {
        "tok_s": len(prompts) * tokens / seconds,
        "a_round": sum(m.mean_acceptance_length for m in metrics) / len(metrics),
        "drafted": sum(m.drafted_tokens for m in metrics),
        "rounds": sum(m.rounds for m in metrics),
        "verify_ms": sum(m.verify_ms for m in metrics) / len(metrics),
        "wait_ms": sum(m.draft_wait_ms for m in metrics) / len(metrics),
        "depth_ms": metrics[-1].draft_step_ms,
    }


def _summary(traces: Mapping[str, tuple[list[Span], list[Moment]]]) -> Row:
    """Return look-ups by result, and for each role the share of time and the median milliseconds of its states."""
    seen = (moment.mark for _, moments in traces.values() for moment in moments)
    marks = Counter(mark.name.lower() for mark in seen if mark.of_look_up)
    found: Row = {"look_ups": " ".join(f"{name}={count}" for name, count in marks.most_common())}
    for role, (states, _) in traces.items():
        spans: dict[str, list[int]] = {}
        for span in states:
            spans.setdefault(span.state.name.lower(), []).append(span.end - span.begin)
        whole = sum(map(sum, spans.values())) or 1
        said = {name: f"{sum(own) / whole:.0%}*{sorted(own)[len(own) // 2] / 1e6:.2f}" for name, own in spans.items()}
        found[role] = " ".join(f"{name}={share}" for name, share in said.items())
    return found


class _Listener:
    """Hears an engine's traces in a thread of its own."""

    def __init__(self, address: str) -> None:
        self._subscriber, self._history, self._over = Subscriber(address), History(), threading.Event()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        while not self._over.is_set():
            snapshot = self._subscriber.receive(0.1)
            if snapshot is not None:
                self._history.add(snapshot)
        self._subscriber.close()

    def between(self, begin: int, end: int) -> dict[str, tuple[list[Span], list[Moment]]]:
        return {role: kept.since(begin, end) for role, kept in self._history.traces.items()}

    def close(self) -> None:
        self._over.set()
        self._thread.join()
