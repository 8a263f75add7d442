"""Spans of requests, as a collector of OpenTelemetry gets them over HTTP."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from ssd.config.engine import ServerConfig
from ssd.errors import UsageError
from ssd.frontend import tracing
from ssd.frontend.request_manager import RequestManager
from ssd.frontend.tracing import Tracing
from ssd.ipc.messages import Emission, Load, Step
from ssd.ipc.public import Generate, Message, Metrics
from ssd.launch.server import ServerOptions, resolve_server
from tests.frontend.http_engine import HttpEngine, http_engine
from tests.frontend.test_request_manager import with_manager

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PROMPT = [1, 2, 3]


@contextmanager
def collector(status: int = 200) -> Iterator[tuple[str, queue.Queue[Any]]]:
    """Its URL, and the spans that come."""
    spans: queue.Queue[Any] = queue.Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["content-length"]))
            for resource in ExportTraceServiceRequest.FromString(content).resource_spans:
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        spans.put(span)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def traced(url: str) -> Iterator[HttpEngine]:
    """A frontend that sends its spans there, all of them when it ends."""
    with http_engine(ServerConfig(names=("scripted",), port=0, otlp_traces_endpoint=url)) as engine:
        yield engine


def answered(engine: HttpEngine, headers: dict[str, str] | None = None) -> None:
    target = engine.engine.target
    connection = engine.begin("/v1/completions", headers, prompt=PROMPT, max_tokens=2, temperature=0.5)
    request = target.next_submit().request
    speculated = {"mode": "ssd", "rounds": 2, "drafted_tokens": 6, "accepted_tokens": 4, "hits": 1}
    told = Metrics(**speculated, queue_time_ms=1e-3, time_to_first_token_ms=2e-3)
    target._send(Step([Emission(request, [5, 6], finish_reason="length", metrics=told)], Load()))
    assert connection.getresponse().status == 200
    connection.close()


def test_a_request_is_a_span_with_its_phases_inside() -> None:
    with collector() as (url, spans):
        with traced(url) as engine:
            answered(engine, {"traceparent": f"00-{TRACE}-{PARENT}-01"})
        found = {span.name: span for span in (spans.get(timeout=10) for _ in range(4))}
    assert found.keys() == {"llm_request", "queue", "prefill", "decode"}
    whole = found["llm_request"]
    assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (TRACE, PARENT)
    phases = [found[name] for name in ("queue", "prefill", "decode")]
    assert {phase.parent_span_id for phase in phases} == {whole.span_id}
    times = [time for phase in phases for time in (phase.start_time_unix_nano, phase.end_time_unix_nano)]
    assert times[1:-1:2] == times[2::2], "one begins when the one before ends"
    assert (times[0], times[-1]) == (whole.start_time_unix_nano, whole.end_time_unix_nano)
    assert (times[1] - times[0], times[3] - times[2]) == (1000, 1000)
    attributes = {entry.key: entry.value for entry in whole.attributes}
    assert attributes["gen_ai.usage.input_tokens"].int_value == len(PROMPT)
    assert attributes["gen_ai.usage.output_tokens"].int_value == 2
    assert attributes["gen_ai.request.temperature"].double_value == 0.5
    assert attributes["gen_ai.response.finish_reasons"].array_value.values[0].string_value == "length"
    assert attributes["ssd.mode"].string_value == "ssd"
    assert [attributes[f"ssd.{name}"].int_value for name in ("rounds", "drafted_tokens", "hits")] == [2, 6, 1]


def test_a_header_that_names_no_trace_begins_one() -> None:
    headers = ["", "00-nonsense", f"00-{TRACE}-{PARENT}", "\xff" * 55]
    with collector() as (url, spans):
        with traced(url) as engine:
            for header in headers:
                answered(engine, {"traceparent": header})
        found = [spans.get(timeout=10) for _ in range(4 * len(headers))]
    wholes = [span for span in found if span.name == "llm_request"]
    assert not any(span.parent_span_id for span in wholes)
    assert len({span.trace_id for span in wholes}) == len(headers) and TRACE not in {s.trace_id.hex() for s in wholes}


def test_a_request_that_is_lost_with_its_target_is_an_error_without_phases() -> None:
    with collector() as (url, spans):

        async def body(manager: RequestManager, sent: list[Message]) -> None:
            tracing = Tracing(manager, url)
            request = manager.open(Generate(1, token_ids=PROMPT), lambda _: None)
            manager.step(Step([Emission(request.number, [5])], Load()))
            manager.target_lost()
            tracing.close()

        with_manager(body)
        span = spans.get(timeout=10)
    assert (span.name, span.status.code) == ("llm_request", 2)
    assert spans.empty()


def test_a_collector_that_is_gone_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_SEND_S", 0.2)
    with traced("http://127.0.0.1:9/v1/traces") as engine:
        answered(engine)


@pytest.mark.parametrize("url", ["localhost:4318", "http://", "ftp://a/b", "http://a /b", ""])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match=r"--otlp-traces-endpoint .*give the URL"):
        resolve_server(ServerOptions(otlp_traces_endpoint=url), "a")


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(UsageError, match=r"install ssd-engine\[otel\]"):
        resolve_server(ServerOptions(otlp_traces_endpoint="http://localhost:4318/v1/traces"), "a")
