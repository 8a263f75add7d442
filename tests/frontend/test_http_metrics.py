"""`/metrics`: everything is counted once, by the names that the documentation gives."""

from __future__ import annotations

import json
import re
import time
from http.client import HTTPConnection
from pathlib import Path

from msgspec.structs import replace

from ssd.frontend.prometheus import PrometheusExporter
from ssd.frontend.request_manager import RequestManager
from ssd.ipc.messages import Emission, Load, Step
from ssd.ipc.public import Message, Metrics
from tests.frontend.http_engine import HttpEngine, answering, http_engine
from tests.frontend.test_gateway import TOKENIZER
from tests.frontend.test_request_manager import with_manager
from tests.scripted_engine import PATIENCE_S


def begin(engine: HttpEngine, **more: object) -> HTTPConnection:
    return engine.begin("/v1/completions", prompt=[5, 6, 7], max_tokens=9, **more)


def exposition(engine: HttpEngine) -> str:
    return engine.ask("GET", "/metrics")[2].decode()


def test_metrics_count_what_happened() -> None:
    with http_engine() as engine:
        target = engine.engine.target
        connection = begin(engine)
        request = target.next_submit().request
        load = Load(running=1, kv_cache_usage=0.25, draft_state="up", verify_seconds=0.01, wait_seconds=0.002)
        load = replace(load, batched_tokens=7)
        target._send(Step([Emission(request, [28120])], load))
        load = replace(load, draft_steps=4, draft_step_seconds=0.02, stale_speculations=3, preemptions=2)
        hit = Emission(request, [28120] * 3, drafted=4, accepted=2, cache="hit", source="lookup")
        target._send(Step([hit], load))
        last = Emission(
            request,
            [28120],
            finish_reason="stop",
            metrics=Metrics(queue_time_ms=250.0, time_to_first_token_ms=1000.0, cached_tokens=2),
            drafted=4,
            accepted=0,
            cache="token_not_covered",
            source="draft",
        )
        target._send(Step([last], replace(load, late_compiles=2, draft_late_compiles=1)))
        connection.getresponse().read()
        found = exposition(engine)
        for line in (Path(__file__).parent / "metrics.txt").read_text().splitlines():
            prefix, _, told = line.partition(":")
            for name in ("ssd", "vllm") if prefix == "both" else (prefix,):
                assert f"{name}:{told}\n" in found, line
        assert 'vllm:time_per_output_token_seconds_count{model_name="scripted"} 4.0\n' in found
        (about,) = re.findall(r"^vllm:cache_config_info\{(.*)\} 1\.0$", found, re.MULTILINE)
        assert 'block_size="16"' in about and 'num_gpu_blocks="1024"' in about and 'cache_dtype="float32"' in about


def test_an_aborted_request_counts_where_it_can() -> None:
    """The target tells no figures of it."""
    with http_engine() as engine:
        target, connection = engine.engine.target, begin(engine)
        request = target.next_submit().request
        target.step(Emission(request, [5]))
        deadline = time.monotonic() + PATIENCE_S
        while 'ssd:generation_tokens_total{model_name="scripted"} 1.0\n' not in exposition(engine):
            assert time.monotonic() < deadline
        connection.close()
        target.wait_abort(request)
        check(engine, request_prompt_tokens_sum=3, request_prefill_time_seconds_count=0, prefix_cache_queries_total=0)


def test_a_request_that_meets_a_stop_string_counts_everywhere() -> None:
    """The target tells its figures with every token."""
    metrics = Metrics(rounds=1, queue_time_ms=1.0, time_to_first_token_ms=3.0, cached_tokens=1)
    with http_engine() as engine:
        connection = begin(engine, stop=TOKENIZER.decode([28120]))
        engine.engine.target.step(Emission(engine.engine.target.next_submit().request, [28120] * 2, metrics=metrics))
        assert json.loads(connection.getresponse().read())["choices"][0]["finish_reason"] == "stop"
        connection.close()
        check(engine, request_prompt_tokens_sum=3, request_prefill_time_seconds_count=1, prefix_cache_queries_total=3)
        check(engine, prefix_cache_hits_total=1)


def check(engine: HttpEngine, **expected: int) -> None:
    found = exposition(engine)
    for name, value in expected.items():
        assert f'ssd:{name}{{model_name="scripted"}} {float(value)}\n' in found, name


def test_what_runs_and_what_waits() -> None:
    with http_engine() as engine:
        target = engine.engine.target
        first, second = begin(engine), begin(engine)
        requests = [target.next_submit().request for _ in range(2)]
        target._send(Step([Emission(requests[0], [5], finish_reason=None)], Load(running=1, waiting=1)))
        deadline = time.monotonic() + PATIENCE_S
        while 'ssd:num_requests_running{model_name="scripted"} 1.0\n' not in (found := exposition(engine)):
            assert time.monotonic() < deadline
        assert 'ssd:num_requests_waiting{model_name="scripted"} 1.0\n' in found
        first.close()
        second.close()
        for request in requests:
            target.wait_abort(request)
        assert 'request_success_total{finished_reason="abort",model_name="scripted"} 2.0\n' in exposition(engine)


def test_names_of_models_are_left_alone() -> None:
    with http_engine(target_name="ssd:a model") as engine, answering(engine, [5]):
        engine.post("/v1/completions", model="scripted", prompt="a", max_tokens=1)
        found = exposition(engine)
    for prefix in ("ssd", "vllm"):
        assert f'{prefix}:generation_tokens_total{{model_name="ssd:a model"}} 1.0\n' in found
        assert f"# TYPE {prefix}:generation_tokens_total counter\n" in found


def test_losses_are_counted_once() -> None:
    async def body(manager: RequestManager, sent: list[Message]) -> None:
        metrics = PrometheusExporter(manager)
        for state in ("up", "parked", "up", "down", "down", "half_open", "open", "half_open", "up", "open", "open"):
            manager.step(Step([], Load(draft_state=state)))
        manager.target_lost()
        manager.target_lost()  # that of one which never said hello
        manager.target_back()
        manager.step(Step([], Load(draft_state="down")))
        text = metrics.text().decode()
        for lost in ("draft", "target"):
            assert f'ssd:{lost}_losses_total{{model_name="{manager.config.target_name}"}} 1.0\n' in text
        assert f'ssd:draft_openings_total{{model_name="{manager.config.target_name}"}} 1.0\n' in text

    with_manager(body)
