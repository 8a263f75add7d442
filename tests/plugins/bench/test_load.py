"""Arrivals, and what is made of when tokens came."""

from __future__ import annotations

import asyncio
import math
import time

import pytest

from ssd.client import Prompt
from ssd.config.params import SamplingParams
from ssd.ipc.public import Metrics
from ssd.plugins.bench.load import Pass, TimedAnswer, drive, equal_answers, load_figures, most_open, poisson


def test_arrivals_have_the_rate_and_the_spread_of_a_poisson_process() -> None:
    arrivals = poisson(20_000, 50.0, seed=3)
    gaps = [after - before for before, after in zip([0.0, *arrivals], arrivals, strict=False)]
    assert min(gaps) > 0 and sum(gaps) / len(gaps) == pytest.approx(1 / 50, rel=0.03)
    assert sum(gap > 1 / 50 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), rel=0.03)
    assert arrivals == poisson(20_000, 50.0, seed=3) != poisson(20_000, 50.0, seed=4)
    assert poisson(3, math.inf, seed=0) == [0, 0, 0]


class Echo:
    """Answers each request after a moment, and counts how many are open."""

    def __init__(self) -> None:
        self.open = self.most = 0

    async def __call__(self, prompt: Prompt, params: SamplingParams) -> TimedAnswer:
        answer = TimedAnswer(time.perf_counter())
        self.open += 1
        self.most = max(self.most, self.open)
        await asyncio.sleep(0.005)
        self.open -= 1
        answer.ended = time.perf_counter()
        answer.token_ids = [len(prompt)]
        return answer


@pytest.mark.parametrize("concurrency, most", [(None, 12), (3, 3)])
def test_requests_wait_for_a_place_and_answers_come_in_order(concurrency: int | None, most: int) -> None:
    echo = Echo()
    requests = [("x" * count, SamplingParams()) for count in range(12)]
    load = asyncio.run(drive(echo, requests, [0.0] * 12, concurrency, "echo"))
    assert [answer.token_ids for answer in load.answers] == [[count] for count in range(12)]
    assert echo.most == most == most_open(load.answers)


def test_a_request_is_not_sent_before_it_arrives() -> None:
    requests = [("x", SamplingParams())] * 3
    began = time.perf_counter()
    load = asyncio.run(drive(Echo(), requests, [0.0, 0.02, 0.06], None, "echo"))
    assert [answer.sent - began >= at for answer, at in zip(load.answers, (0, 0.02, 0.06), strict=True)] == [True] * 3
    assert load.seconds >= 0.06


def answer(*arrivals: tuple[float, int], sent: float = 1.0, ended: float, **more: object) -> TimedAnswer:
    tokens = sum(count for _, count in arrivals)
    return TimedAnswer(sent, list(arrivals), ended, [7] * tokens, 10, completion_tokens=tokens, **more)  # type: ignore[arg-type]


ONE = answer((1.1, 1), (1.3, 4), (1.4, 1), ended=1.4, cached_tokens=8, metrics=Metrics(rounds=3, accepted_tokens=3))
TWO = answer((1.3, 1), ended=1.3)


def test_latencies_are_those_of_vllm_and_a_gap_is_divided_over_its_tokens() -> None:
    failed = TimedAnswer(1.0, ended=1.2, error="overloaded")
    row = load_figures([Pass([ONE, TWO, failed], 2.0)])
    assert (row["num_prompts"], row["completed"], row["failed"], row["errors"]) == (3, 2, 1, {"overloaded": 1})
    assert (row["total_input_tokens"], row["total_output_tokens"], row["cached_input_tokens"]) == (20, 7, 8)
    assert (row["request_throughput"], row["output_throughput"], row["total_token_throughput"]) == (1, 3.5, 13.5)
    expected = {
        "mean_ttft_ms": 200,
        "std_ttft_ms": 100,
        "p99_ttft_ms": 298,
        "mean_tpot_ms": 60,  # 300 ms for five tokens after the first; a single token has none
        "median_itl_ms": 50,  # four times 50, once 100
        "mean_itl_ms": 60,
        "mean_chunk_gap_ms": 150,
        "median_e2el_ms": 350,
        "acceptance_length": 2,
    }
    assert {key: row[key] for key in expected} == pytest.approx(expected)
    assert row["max_concurrent_requests"] == 3


def test_passes_are_one_after_the_other() -> None:
    row = load_figures([Pass([ONE], 2.0), Pass([TWO], 1.0)])
    assert (row["duration"], row["completed"], row["max_concurrent_requests"]) == (3.0, 2, 1)


def test_where_nothing_was_completed_there_are_no_latencies() -> None:
    row = load_figures([Pass([TimedAnswer(1.0, ended=2.0, error="overloaded")], 1.0)])
    assert row["completed"] == 0 and not [key for key in row if key.endswith("_ms")]


def test_ids_are_compared_where_both_were_completed() -> None:
    other = answer((1.1, 2), ended=1.2)
    failed = TimedAnswer(1.0, ended=1.2, error="overloaded")
    found = equal_answers([Pass([ONE, other, ONE], 1.0)], [Pass([ONE, TWO, failed], 1.0)])
    assert found == {"answers": 2, "equal_to_ar": 1}


def test_percentiles_lie_between_values() -> None:
    assert load_figures([Pass([ONE, TWO], 1.0)])["p99_ttft_ms"] == pytest.approx(100 + 0.99 * 200)
    assert load_figures([Pass([TWO], 1.0)])["p99_ttft_ms"] == pytest.approx(300)
