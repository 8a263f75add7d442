"""Prometheus metrics: vLLM's names, and further ones for speculation, under the prefixes `ssd:` and `vllm:`."""

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
from ssd.frontend.request import Observer, Request
from ssd.frontend.request_manager import RequestManager
from ssd.ipc.messages import DraftState, Emission, Load
from ssd.ipc.public import Source

# Bounds in seconds. Tokens that come together have latencies under a millisecond.
_TOKEN = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_REQUEST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
# Bounds in tokens.
_LENGTH = tuple(float(n * 10**power) for power in range(6) for n in (1, 2, 5))
_STEP = tuple(float(2**power) for power in range(17))

_COUNTERS = {
    "bad_frames": "Frames over ZeroMQ that were no message, and were dropped.",
    "prompt_tokens": "Tokens of accepted prompts.",
    "generation_tokens": "Tokens generated.",
    "prefix_cache_queries": "Tokens of prompts that were looked for in the prefix cache; of requests that ended.",
    "prefix_cache_hits": "Tokens of these that were found.",
    "spec_decode_num_drafts": "Verifications with draft tokens.",
    "spec_decode_num_draft_tokens": "Draft tokens verified.",
    "spec_decode_num_accepted_tokens": "Draft tokens accepted.",
    "spec_decode_cache_hits": "Outcomes that the draft had prepared for.",
    "num_preemptions": "Times that a request lost its pages to others, to be computed again.",
    "stale_speculations": "Look-ups that found nothing but what answers another outcome.",
    "rejected_speculations": "Entries of the board that were not sound, and were not used.",
    "target_losses": "Targets that have died.",
    "draft_losses": "Drafts that have left the target.",
    "draft_openings": "Times that the circuit breaker left a draft in use alone.",
}
# Counters with one more label.
_LABELLED = {
    "request_success": ("finished_reason", "Requests that ended."),
    "spec_decode_num_accepted_tokens_per_pos": ("position", "Draft tokens accepted, by position."),
    "spec_decode_num_accepted_tokens_per_source": ("source", "Draft tokens accepted, by source."),
    "spec_decode_cache_misses": ("reason", "Outcomes that the draft had not prepared for, by reason."),
    "late_compiles": ("process", "Kernels compiled for a GPU, or loaded, after the start: answers may wait."),
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From admission.", _REQUEST),
    "inter_token_latency_seconds": ("A chunk's gap over its tokens.", _TOKEN),
    "inter_chunk_latency_seconds": ("Between chunks of one request.", _TOKEN),
    "e2e_request_latency_seconds": ("From admission to the end.", _REQUEST),
    "request_queue_time_seconds": ("From the target's inbox to a slot.", _REQUEST),
    "request_prefill_time_seconds": ("From a slot to the first token.", _REQUEST),
    "request_decode_time_seconds": ("From the first token to the last.", _REQUEST),
    "request_inference_time_seconds": ("From a slot to the last token.", _REQUEST),
    "request_time_per_output_token_seconds": ("Mean over a request's tokens after the first.", _TOKEN),
    "request_prompt_tokens": ("Tokens of a request's prompt.", _LENGTH),
    "request_generation_tokens": ("Tokens of a request's output.", _LENGTH),
    "request_params_max_tokens": ("What requests asked for at most.", _LENGTH),
    "iteration_tokens_total": ("Tokens of a step of the target.", _STEP),
    "verify_seconds": ("Forward passes of the target.", _TOKEN),
    "draft_step_seconds": ("Tree steps of the draft, means over those of a step of the target.", _TOKEN),
    "draft_wait_seconds": ("What the target waited for the draft in a step.", _TOKEN),
}


class _Histogram:
    """Counts values by bucket. The library's own takes a lock for each value, which is too slow for each round."""

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
    """Times of one request in monotonic seconds: its admission, its first tokens and its last ones."""

    admitted: float = field(default_factory=time.monotonic)
    first: float | None = None
    last: float = 0.0


class PrometheusExporter(Collector, Observer):
    """Observes the request manager and counts; `text` returns the exposition."""

    kind = CONTENT_TYPE_LATEST.encode()

    def __init__(self, manager: RequestManager) -> None:
        self._manager, self._model = manager, manager.config.target_name
        self._load = Load()
        self._clocks: dict[Request, _Clock] = {}
        self._counts = Counter[str]()
        self._labelled = {name: Counter[str]() for name in _LABELLED}
        self._positions = self._labelled["spec_decode_num_accepted_tokens_per_pos"]
        self._positions.update(dict.fromkeys(map(str, range(MAX_LOOKAHEAD)), 0))
        self._sources = self._labelled["spec_decode_num_accepted_tokens_per_source"]
        self._sources.update(dict.fromkeys(get_args(Source), 0))
        self._late_compiles = self._labelled["late_compiles"]
        self._late_compiles.update(target=0, draft=0)
        self._histograms = {name: _Histogram(*entry) for name, entry in _HISTOGRAMS.items()}
        self._registry = CollectorRegistry()
        self._registry.register(self)
        manager.observers.append(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        for prefix in ("ssd", "vllm"):
            yield from self._families(prefix)

    # -- called by the request manager --------------------------------------------------------------------------------

    def opened(self, request: Request) -> None:
        self._clocks[request] = _Clock()
        self._counts["prompt_tokens"] += len(request.prompt)

    def emitted(self, request: Request, emission: Emission) -> None:
        count = len(emission.token_ids)
        clock = self._clocks[request]
        now = time.monotonic()
        if count:
            self._counts["generation_tokens"] += count
            if clock.first is None:
                clock.first = now
                self._observe("time_to_first_token_seconds", now - clock.admitted)
            else:
                self._histograms["inter_token_latency_seconds"].observe((now - clock.last) / count, count)
                self._observe("inter_chunk_latency_seconds", now - clock.last)
            clock.last = now
        if emission.drafted:
            self._counts["spec_decode_num_drafts"] += 1
            self._counts["spec_decode_num_draft_tokens"] += emission.drafted
            self._counts["spec_decode_num_accepted_tokens"] += emission.accepted
            if emission.source:
                self._sources[emission.source] += emission.accepted
            for position in range(min(emission.accepted, MAX_LOOKAHEAD)):
                self._positions[str(position)] += 1
        if emission.cache == "hit":
            self._counts["spec_decode_cache_hits"] += 1
        elif emission.cache:
            self._labelled["spec_decode_cache_misses"][emission.cache] += 1

    def ended(self, request: Request, reason: str) -> None:
        clock = self._clocks.pop(request)
        self._observe("e2e_request_latency_seconds", time.monotonic() - clock.admitted)
        self._labelled["request_success"][reason] += 1
        self._observe("request_prompt_tokens", len(request.prompt))
        self._observe("request_generation_tokens", request.completion_tokens)
        self._observe("request_params_max_tokens", request.params.max_tokens)
        if clock.first is None:
            return
        decode = clock.last - clock.first
        self._observe("request_decode_time_seconds", decode)
        if request.completion_tokens > 1:
            self._observe("request_time_per_output_token_seconds", decode / (request.completion_tokens - 1))
        if request.metrics.time_to_first_token_ms:  # the target has reported its figures
            self._ended_at_target(request, decode)

    def _ended_at_target(self, request: Request, decode: float) -> None:
        queue, first = request.metrics.queue_time_ms / 1e3, request.metrics.time_to_first_token_ms / 1e3
        self._observe("request_queue_time_seconds", queue)
        self._observe("request_prefill_time_seconds", first - queue)
        self._observe("request_inference_time_seconds", first - queue + decode)
        self._counts["prefix_cache_queries"] += len(request.prompt)
        self._counts["prefix_cache_hits"] += request.metrics.cached_tokens

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def dropped_frame(self) -> None:
        self._counts["bad_frames"] += 1

    def target_lost(self) -> None:
        self._counts["target_losses"] += 1
        self._load = replace(self._load, draft_state="down")  # the draft ended with the target: not a loss of its own

    def stepped(self, load: Load) -> None:
        self._counts["rejected_speculations"] = load.rejected_speculations
        self._observe("iteration_tokens_total", load.batched_tokens)
        self._observe("verify_seconds", load.verify_seconds)
        self._observe("draft_wait_seconds", load.wait_seconds)
        before, self._load = self._load, load
        self._counts["draft_losses"] += before.draft_state != "down" and load.draft_state == "down"
        self._counts["draft_openings"] += before.draft_state == "up" and load.draft_state == "open"
        # A new target's totals begin at zero.
        self._counts["stale_speculations"] += max(0, load.stale_speculations - before.stale_speculations)
        self._counts["num_preemptions"] += max(0, load.preemptions - before.preemptions)
        self._late_compiles["target"] += max(0, load.late_compiles - before.late_compiles)
        self._late_compiles["draft"] += max(0, load.draft_late_compiles - before.draft_late_compiles)
        steps = load.draft_steps - before.draft_steps
        if steps > 0:
            seconds = load.draft_step_seconds - before.draft_step_seconds
            self._histograms["draft_step_seconds"].observe(seconds / steps, steps)

    # -- exposition --------------------------------------------------------------------------------------------------

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
        yield self._cache_config(prefix)
        for name, (label, text) in _LABELLED.items():
            labelled = CounterMetricFamily(f"{prefix}:{name}", text, labels=["model_name", label])
            for kind, count in self._labelled[name].items():
                labelled.add_metric([self._model, kind], count)
            yield labelled
        for name, histogram in self._histograms.items():
            yield histogram.family(f"{prefix}:{name}", self._model)
        if prefix == "vllm":  # vLLM's older name, which dashboards still query
            older = self._histograms["inter_token_latency_seconds"]
            yield older.family("vllm:time_per_output_token_seconds", self._model)

    def _cache_config(self, prefix: str) -> Metric:
        config = self._manager.config
        shown = {
            "model_name": self._model,
            "block_size": str(config.page_size),
            "num_gpu_blocks": str(config.num_pages),  # vLLM's name, on a CPU too
            "cache_dtype": config.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
            "enable_prefix_caching": "True",
        }
        info = GaugeMetricFamily(f"{prefix}:cache_config_info", "The target's KV cache.", labels=list(shown))
        info.add_metric(list(shown.values()), 1)
        return info

    def _gauges(self, load: Load) -> dict[str, tuple[str, float]]:
        waiting = max(0, self._manager.open_requests - load.running)
        return {
            "num_requests_running": ("Requests in the batch.", load.running),
            "num_requests_waiting": ("Requests that are open and not in the batch.", waiting),
            "kv_cache_usage_perc": ("Part of the KV cache in use, 0 to 1.", load.kv_cache_usage),
            "compiled_kernels": (
                "Whether CPUs compute by compiled kernels; without, much slower.",
                self._manager.kernels,
            ),
            "draft_up": ("Whether a draft has joined the target and is used.", load.draft_state == "up"),
        }
