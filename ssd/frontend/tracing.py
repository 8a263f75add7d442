"""Spans of requests for OpenTelemetry: one a request, with queue, prefill and decode inside."""

from __future__ import annotations

import time

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ssd import __version__
from ssd.frontend.request import Observer, Request
from ssd.frontend.request_manager import RequestManager

_SEND_S = 2.0  # for a batch of spans to reach the collector, also at the end
_FIGURES = ("mode", "rounds", "drafted_tokens", "accepted_tokens", "hits", "misses", "mean_acceptance_length")
_TIMES = ("verify_ms", "draft_wait_ms", "draft_step_ms", "round_overhead_ms")


class Tracing(Observer):
    """Makes the spans of a request when it ends; a thread of the library sends them, or drops them with a warning."""

    def __init__(self, manager: RequestManager, endpoint: str) -> None:
        about = {"service.name": "ssd", "service.version": __version__}
        self._provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=_SEND_S)))
        self._tracer = self._provider.get_tracer("ssd", __version__)
        self._context = TraceContextTextMapPropagator()
        self._model = manager.config.target_name
        self._begun: dict[Request, int] = {}
        manager.observers.append(self)

    def opened(self, request: Request) -> None:
        self._begun[request] = time.time_ns()

    def ended(self, request: Request, reason: str) -> None:
        start, end = self._begun.pop(request), time.time_ns()
        metrics, params = request.metrics, request.params
        span = self._tracer.start_span(
            "llm_request", self._context.extract(request.trace), SpanKind.SERVER, start_time=start
        )
        span.set_attributes(
            {
                "gen_ai.request.model": self._model,
                "gen_ai.request.max_tokens": params.max_tokens,
                "gen_ai.request.temperature": params.temperature,
                "gen_ai.request.top_p": params.top_p,
                "gen_ai.usage.input_tokens": len(request.prompt),
                "gen_ai.usage.output_tokens": request.completion_tokens,
                "gen_ai.response.finish_reasons": [reason],
                "ssd.cached_tokens": metrics.cached_tokens,
                **{f"ssd.{name}": getattr(metrics, name) for name in (*_FIGURES, *_TIMES)},
            }
        )
        if reason == "error":
            span.set_status(StatusCode.ERROR)
        inside = set_span_in_context(span)
        for name, begin, over in self._phases(request, start, end):
            self._tracer.start_span(name, inside, start_time=begin).end(over)
        span.end(end)

    def close(self) -> None:
        """Send the spans that are left, for at most some seconds. Blocks."""
        self._provider.shutdown()

    def _phases(self, request: Request, start: int, end: int) -> list[tuple[str, int, int]]:
        """Return (name, begin, end) in ns of the phases that the target reported; [] for a request it did not end."""
        if not request.metrics.time_to_first_token_ms:
            return []
        taken = min(end, start + round(request.metrics.queue_time_ms * 1e6))
        first = min(end, start + round(request.metrics.time_to_first_token_ms * 1e6))
        return [("queue", start, taken), ("prefill", taken, first), ("decode", first, end)]
