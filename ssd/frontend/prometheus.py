"""Prometheus metrics: vLLM's names under the prefix `ssd:`, and what speculation adds."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import get_args

from msgspec.structs import replace
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from ssd.config.params import MAX_LOOKAHEAD
from ssd.frontend.request_manager import Observer, Request, RequestManager
from ssd.ipc.messages import DraftState, Emission, Load

# Bounds in seconds. Tokens that come together have latencies under a millisecond.
_TOKEN = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_REQUEST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

_COUNTERS = {
    "bad_frames": "Frames over ZeroMQ that were no message, and were dropped.",
    "prompt_tokens": "Tokens of accepted prompts.",
    "generation_tokens": "Tokens generated.",
    "spec_decode_num_drafts": "Verifications with draft tokens.",
    "spec_decode_num_draft_tokens": "Draft tokens verified.",
    "spec_decode_num_accepted_tokens": "Draft tokens accepted.",
    "spec_decode_cache_hits": "Outcomes that the draft had prepared for.",
    "stale_speculations": "Look-ups that found nothing but what answers another outcome.",
    "rejected_speculations": "Entries of the board that were not sound, and were not used.",
    "target_losses": "Targets that have died.",
    "draft_losses": "Drafts that have left the target.",
    "draft_openings": "Times that the circuit breaker has given up a draft in use.",
}
# Counters with one more label.
_LABELLED = {
    "request_success": ("finished_reason", "Requests that ended."),
    "spec_decode_num_accepted_tokens_per_pos": ("position", "Draft tokens accepted, by position."),
    "spec_decode_cache_misses": ("reason", "Outcomes that the draft had not prepared for, by reason."),
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From admission.", _REQUEST),
    "inter_token_latency_seconds": ("A chunk's gap over its tokens.", _TOKEN),
    "inter_chunk_latency_seconds": ("Between chunks of one request.", _TOKEN),
    "e2e_request_latency_seconds": ("From admission to the end.", _REQUEST),
    "request_queue_time_seconds": ("From the target's inbox to a slot.", _REQUEST),
    "verify_seconds": ("Forward passes of the target.", _TOKEN),
    "draft_step_seconds": ("Tree steps of the draft, means over those of a step of the target.", _TOKEN),
    "draft_wait_seconds": ("What the target waited for the draft in a step.", _TOKEN),
}


class _Histogram:
    """Counts by bucket. The library's own takes a lock for each number, which costs more than a round's tokens do."""

    def __init__(self, text: str, bounds: tuple[float, ...]) -> None:
        self.text, self._bounds = text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self, name: str, model: str) -> Metric:
        found = HistogramMetricFamily(name, self.text, labels=["model_name"])
        buckets, below = [], 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            below += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), float(below)))
        found.add_metric([model], buckets, self._sum)
        return found


@dataclass(eq=False, slots=True)
class _Clock:
    """When a request was admitted, and when it last got tokens; monotonic seconds."""

    admitted: float = field(default_factory=time.monotonic)
    last: float | None = None


class PrometheusExporter(Collector, Observer):
    """Observes the request manager and counts. `text` is the exposition of everything so far."""

    kind = CONTENT_TYPE_LATEST.encode()

    def __init__(self, manager: RequestManager, compatible: str) -> None:
        self._manager, self._model = manager, manager.config.target_name
        self._prefixes = ["ssd", "vllm"] if compatible == "vllm" else ["ssd"]
        self._load = Load()
        self._clocks: dict[Request, _Clock] = {}
        self._counts = Counter[str]()
        self._labelled = {name: Counter[str]() for name in _LABELLED}
        self._positions = self._labelled["spec_decode_num_accepted_tokens_per_pos"]
        self._positions.update(dict.fromkeys(map(str, range(MAX_LOOKAHEAD)), 0))
        self._seconds = {name: _Histogram(*entry) for name, entry in _HISTOGRAMS.items()}
        self._registry = CollectorRegistry()
        self._registry.register(self)
        manager.observers.append(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        for prefix in self._prefixes:
            yield from self._families(prefix)

    # -- what the request manager tells -------------------------------------------------------------------------------

    def opened(self, request: Request) -> None:
        self._clocks[request] = _Clock()
        self._counts["prompt_tokens"] += len(request.prompt)

    def emitted(self, request: Request, emission: Emission) -> None:
        count = len(emission.token_ids)
        clock = self._clocks[request]
        now = time.monotonic()
        if count:
            self._counts["generation_tokens"] += count
            if clock.last is None:
                self._seconds["time_to_first_token_seconds"].observe(now - clock.admitted)
            else:
                self._seconds["inter_token_latency_seconds"].observe((now - clock.last) / count, count)
                self._seconds["inter_chunk_latency_seconds"].observe(now - clock.last)
            clock.last = now
        if emission.drafted:
            self._counts["spec_decode_num_drafts"] += 1
            self._counts["spec_decode_num_draft_tokens"] += emission.drafted
            self._counts["spec_decode_num_accepted_tokens"] += emission.accepted
            for position in range(min(emission.accepted, MAX_LOOKAHEAD)):
                self._positions[str(position)] += 1
        if emission.cache == "hit":
            self._counts["spec_decode_cache_hits"] += 1
        elif emission.cache:
            self._labelled["spec_decode_cache_misses"][emission.cache] += 1

    def ended(self, request: Request, reason: str) -> None:
        clock = self._clocks.pop(request)
        self._seconds["e2e_request_latency_seconds"].observe(time.monotonic() - clock.admitted)
        self._labelled["request_success"][reason] += 1
        if reason != "abort" and request.metrics.queue_time_ms:
            self._seconds["request_queue_time_seconds"].observe(request.metrics.queue_time_ms / 1e3)

    def dropped_frame(self) -> None:
        self._counts["bad_frames"] += 1

    def target_lost(self) -> None:
        self._counts["target_losses"] += 1
        self._load = replace(self._load, draft_state="down")  # it ended with the target: no loss of a draft

    def stepped(self, load: Load) -> None:
        self._counts["rejected_speculations"] = load.rejected_speculations
        self._seconds["verify_seconds"].observe(load.verify_seconds)
        self._seconds["draft_wait_seconds"].observe(load.wait_seconds)
        before, self._load = self._load, load
        self._counts["draft_losses"] += before.draft_state != "down" and load.draft_state == "down"
        self._counts["draft_openings"] += before.draft_state == "up" and load.draft_state == "open"
        # The target's totals begin again with a new target.
        self._counts["stale_speculations"] += max(0, load.stale_speculations - before.stale_speculations)
        steps = load.draft_steps - before.draft_steps
        if steps > 0:
            seconds = load.draft_step_seconds - before.draft_step_seconds
            self._seconds["draft_step_seconds"].observe(seconds / steps, steps)

    # -- what is told ------------------------------------------------------------------------------------------------

    def _families(self, prefix: str) -> Iterator[Metric]:
        load = self._manager.load
        for name, (text, value) in self._gauges(load).items():
            gauge = GaugeMetricFamily(f"{prefix}:{name}", text, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        states = GaugeMetricFamily(f"{prefix}:draft_state", "What the draft is: 1.", labels=["model_name", "state"])
        for state in get_args(DraftState):
            states.add_metric([self._model, state], load.draft_state == state)
        yield states
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(f"{prefix}:{name}", text, labels=["model_name"])
            counter.add_metric([self._model], self._counts[name])
            yield counter
        for name, (label, text) in _LABELLED.items():
            labelled = CounterMetricFamily(f"{prefix}:{name}", text, labels=["model_name", label])
            for kind, count in self._labelled[name].items():
                labelled.add_metric([self._model, kind], count)
            yield labelled
        for name, histogram in self._seconds.items():
            yield histogram.family(f"{prefix}:{name}", self._model)

    def _gauges(self, load: Load) -> dict[str, tuple[str, float]]:
        waiting = max(0, self._manager.open_requests - load.running)
        return {
            "num_requests_running": ("Requests in the batch.", load.running),
            "num_requests_waiting": ("Requests that are open and not in the batch.", waiting),
            "kv_cache_usage_perc": ("Part of the KV cache in use, 0 to 1.", load.kv_cache_usage),
            "draft_up": ("Whether a draft has joined the target and is used.", load.draft_state == "up"),
        }
