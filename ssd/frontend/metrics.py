"""Prometheus metrics: names of vLLM under the prefix `ssd:`, and what speculation adds (CONVENTIONS 3)."""

from __future__ import annotations

import re
import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from ssd.frontend.desk import Desk, Request
from ssd.ipc.messages import Emission, Load
from ssd.params import MAX_LOOKAHEAD

disable_created_metrics()  # a time stamp for every counter tells nothing that a scraper does not know

# Where the exposition has the name of a metric.
_NAMES = re.compile(rb"^((?:# (?:HELP|TYPE) )?)ssd:", re.MULTILINE)
# Seconds. Tokens that come several at a time have latencies under a millisecond.
_TOKEN = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_REQUEST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class _Clock:
    """When a request was accepted, and when it last got tokens; monotonic seconds."""

    __slots__ = ("accepted", "last")

    def __init__(self) -> None:
        self.accepted = time.monotonic()
        self.last: float | None = None


class Metrics:
    """The observer of a desk. `text` is the exposition of everything counted so far."""

    kind = CONTENT_TYPE_LATEST.encode()

    def __init__(self, desk: Desk, compatible: str) -> None:
        self._registry = CollectorRegistry()
        self._prefixes = ["ssd", *(["vllm"] if compatible == "vllm" else [])]
        self._label = desk.config.target_name
        self._clocks: dict[Request, _Clock] = {}
        self._desk = desk
        self._make()
        desk.observer = self

    def text(self) -> bytes:
        self._running.set(self._desk.load.running)
        self._waiting.set(max(0, self._desk.open_requests - self._desk.load.running))
        self._pages.set(self._desk.load.kv_cache_usage)
        self._draft_up.set(self._desk.load.draft_up)
        plain = generate_latest(self._registry)
        if self._prefixes == ["ssd"]:
            return plain
        return plain + _NAMES.sub(rb"\1vllm:", plain)

    # -- what the desk tells ----------------------------------------------------------------------------------------

    def opened(self, request: Request) -> None:
        self._clocks[request] = _Clock()
        self._prompt_tokens.inc(len(request.prompt))

    def emitted(self, request: Request, emission: Emission) -> None:
        count = len(emission.token_ids)
        clock = self._clocks[request]
        now = time.monotonic()
        if count:
            self._generated.inc(count)
            if clock.last is None:
                self._first_token.observe(now - clock.accepted)
            else:
                for _ in range(count):  # the gap of a chunk, divided over its tokens
                    self._between.observe((now - clock.last) / count)
                self._gap.observe(now - clock.last)
            clock.last = now
        if emission.drafted:
            self._drafts.inc()
            self._drafted.inc(emission.drafted)
            self._accepted.inc(emission.accepted)
            for position in range(min(emission.accepted, MAX_LOOKAHEAD)):
                self._positions[position].inc()
        if emission.cache == "hit":
            self._hits.inc()
        elif emission.cache:
            self._misses.labels(self._label, emission.cache).inc()

    def ended(self, request: Request, reason: str) -> None:
        clock = self._clocks.pop(request)
        self._whole.observe(time.monotonic() - clock.accepted)
        self._finished.labels(self._label, reason).inc()
        if reason != "abort" and request.metrics.queue_time_ms:
            self._queue.observe(request.metrics.queue_time_ms / 1e3)

    def stepped(self, load: Load) -> None:
        self._verify.observe(load.verify_seconds)
        self._wait.observe(load.wait_seconds)

    # -- what is counted --------------------------------------------------------------------------------------------

    def _make(self) -> None:
        self._running = self._gauge("num_requests_running", "Requests in the batch.")
        self._waiting = self._gauge("num_requests_waiting", "Requests that are open and not in the batch.")
        self._pages = self._gauge("kv_cache_usage_perc", "Part of the KV cache in use, 0 to 1.")
        self._draft_up = self._gauge("draft_up", "Whether a draft has joined the target.")
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of accepted prompts.")
        self._generated = self._counter("generation_tokens", "Tokens generated.")
        self._finished = Counter(
            "ssd:request_success", "Requests that ended.", ["model_name", "finished_reason"], registry=self._registry
        )
        self._first_token = self._histogram("time_to_first_token_seconds", "From admission.", _REQUEST)
        self._between = self._histogram("inter_token_latency_seconds", "A chunk's gap over its tokens.", _TOKEN)
        self._gap = self._histogram("inter_chunk_latency_seconds", "Between chunks of one request.", _TOKEN)
        self._whole = self._histogram("e2e_request_latency_seconds", "From admission to the end.", _REQUEST)
        self._queue = self._histogram("request_queue_time_seconds", "From the target's inbox to a slot.", _REQUEST)
        self._verify = self._histogram("verify_seconds", "Forward passes of the target.", _TOKEN)
        self._wait = self._histogram("draft_wait_seconds", "What the target waited for the draft in a step.", _TOKEN)
        self._drafts = self._counter("spec_decode_num_drafts", "Verifications with draft tokens.")
        self._drafted = self._counter("spec_decode_num_draft_tokens", "Draft tokens verified.")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        positions = Counter(
            "ssd:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position.",
            ["model_name", "position"],
            registry=self._registry,
        )
        self._positions = [positions.labels(self._label, str(position)) for position in range(MAX_LOOKAHEAD)]
        self._hits = self._counter("spec_decode_cache_hits", "Outcomes that the draft had prepared for.")
        self._misses = Counter(
            "ssd:spec_decode_cache_misses",
            "Outcomes that it had not, by reason.",
            ["model_name", "reason"],
            registry=self._registry,
        )

    def _counter(self, name: str, text: str) -> Any:
        return Counter(f"ssd:{name}", text, ["model_name"], registry=self._registry).labels(self._label)

    def _gauge(self, name: str, text: str) -> Any:
        return Gauge(f"ssd:{name}", text, ["model_name"], registry=self._registry).labels(self._label)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Any:
        named = Histogram(f"ssd:{name}", text, ["model_name"], buckets=buckets, registry=self._registry)
        return named.labels(self._label)
