"""The target or the frontend dies, is stopped, or hangs: every request has one end, and the engine serves on."""

from __future__ import annotations

import asyncio
import gc
import http.client
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from ssd.client import AsyncClient, Client
from ssd.config.params import SamplingParams
from ssd.errors import EngineDeadError, RequestError
from ssd.launch import liveness
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.launch.server import ServerOptions
from ssd.launch.supervisor import Engine
from ssd.models.checkpoint import inspect, stop_token_ids
from tests.faults.engine import descriptors, gone
from tests.mock import ROUND_VARIABLE, oracle

pytestmark = pytest.mark.mock

PATIENCE_S = 30.0
AT_ONCE = 4
PROMPTS = [[5 * n + 1, n, 77] for n in range(3 * AT_ONCE)]


@contextmanager
def serving(round_ms: int, max_model_len: int) -> Iterator[Engine]:
    """The mock, which starts at once, with HTTP."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ROUND_VARIABLE, str(round_ms))
        options = EngineOptions(load_format="mock", max_num_seqs=AT_ONCE, max_model_len=max_model_len)
        engine = Engine(resolve(options, ServerOptions(port=0)))
        engine.start()
        yield engine
        engine.stop(drain=0)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """One whose answers last some seconds. It bears with a stopped process for a second, since tests wait for that."""
    monkeypatch.setattr(liveness, "_STOPPED_S", 1.0)
    with serving(round_ms=20, max_model_len=2048) as engine:
        yield engine


def params(tokens: int = 200) -> SamplingParams:
    return SamplingParams(seed=3, max_tokens=tokens, ignore_eos=True)


def expected(engine: Engine, prompt: list[int], asked: SamplingParams) -> list[int]:
    config = engine.config
    ends = stop_token_ids(inspect(Path(config.target), weights=False))
    ids: list[int] = oracle(prompt, asked, config.vocab_size, config.max_model_len, ends).whole()[0]
    return ids


def get(engine: Engine, path: str) -> tuple[int, bytes]:
    assert engine.url is not None
    connection = http.client.HTTPConnection(urlsplit(engine.url).netloc, timeout=PATIENCE_S)
    connection.request("GET", path)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


def running(engine: Engine) -> int:
    count: int = msgspec.json.decode(get(engine, "/server_info")[1])["requests"]["running"]
    return count


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


async def stream(client: AsyncClient, prompt: list[int], asked: SamplingParams, got: list[int]) -> str:
    """Read a whole stream into `got`; returns the code of its failure, or nothing."""
    try:
        async for chunk in client.stream(prompt, asked):
            got += chunk.token_ids
    except RequestError as error:
        return error.code
    return ""


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_what_a_lost_target_began_fails_and_the_next_answers_the_rest(engine: Engine, fault: signal.Signals) -> None:
    target = engine.pids["target"]

    async def ask() -> None:
        async with AsyncClient(engine.address) as client:
            got: list[list[int]] = [[] for _ in PROMPTS]
            tasks = [asyncio.create_task(stream(client, p, params(), got[n])) for n, p in enumerate(PROMPTS)]
            while sum(map(bool, got)) < AT_ONCE:
                await asyncio.sleep(0.005)
            begun = [bool(tokens) for tokens in got]
            os.kill(target, fault)
            codes = await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)
            assert codes == ["engine_restarted" if was else "" for was in begun]
            for prompt, tokens, was in zip(PROMPTS, got, begun, strict=True):
                whole = expected(engine, prompt, params())
                assert tokens == (whole[: len(tokens)] if was else whole)

    asyncio.run(ask())
    assert gone(target) and engine.pids["target"] != target
    until(lambda: running(engine) == 0)


def test_health_tells_of_the_restart_and_new_requests_can_be_tried_again(engine: Engine) -> None:
    assert get(engine, "/health")[0] == 200
    os.kill(engine.pids["target"], signal.SIGKILL)
    until(lambda: get(engine, "/health")[0] == 503)
    assert get(engine, "/health/live")[0] == 200
    with Client(engine.address) as client:
        with pytest.raises(RequestError) as caught:
            client.generate([PROMPTS[0]], params(4))
        assert caught.value.code == "restarting"
        until(lambda: get(engine, "/health")[0] == 200)
        assert client.generate([PROMPTS[0]], params(4))[0].token_ids == expected(engine, PROMPTS[0], params(4))


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_frontend_costs_its_clients_requests_and_nothing_more(engine: Engine, fault: signal.Signals) -> None:
    frontend, target = engine.pids["frontend"], engine.pids["target"]
    with Client(engine.address) as client:
        with pytest.raises(EngineDeadError):
            for count, _ in enumerate(client.stream(PROMPTS[0], params(2000))):
                if count == 3:
                    os.kill(frontend, fault)
        until(lambda: engine.pids.get("frontend", frontend) != frontend)
        # The same client: it connects again, and what it had asked for before runs no more.
        assert client.generate([PROMPTS[1]], params(20))[0].token_ids == expected(engine, PROMPTS[1], params(20))
    until(lambda: running(engine) == 0)
    assert engine.pids["target"] == target


@pytest.mark.parametrize(
    ("role", "seconds", "round_ms", "tokens"),
    [
        pytest.param("frontend", 1.0, 20, 200, marks=pytest.mark.thorough),
        ("frontend", 3.0, 1, 8000),
        ("target", 3.0, 20, 200),
    ],
    ids=["frontend", "frontend, until the target's queue to it is full", "target"],
)
def test_a_stop_of_some_seconds_costs_no_request(role: str, seconds: float, round_ms: int, tokens: int) -> None:
    with serving(round_ms, max_model_len=tokens + len(PROMPTS[0])) as engine, ThreadPoolExecutor(AT_ONCE) as pool:
        pids, asked, begun = engine.pids, params(tokens), threading.Semaphore(0)
        ways = [over_http, over_zeromq] * (AT_ONCE // 2)
        answers = [pool.submit(way, engine, PROMPTS[n], asked, begun) for n, way in enumerate(ways)]
        for _ in answers:
            assert begun.acquire(timeout=PATIENCE_S)
        os.kill(pids[role], signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pids[role], signal.SIGCONT)
        for prompt, answer in zip(PROMPTS, answers, strict=False):
            assert answer.result(PATIENCE_S) == expected(engine, prompt, asked)
        assert engine.pids == pids


def over_zeromq(engine: Engine, prompt: list[int], asked: SamplingParams, begun: threading.Semaphore) -> list[int]:
    """The tokens of a stream; tells when it has begun."""
    got: list[int] = []
    with Client(engine.address) as client:
        for chunk in client.stream(prompt, asked):
            if not got:
                begun.release()
            got += chunk.token_ids
    return got


def over_http(engine: Engine, prompt: list[int], asked: SamplingParams, begun: threading.Semaphore) -> list[int]:
    assert engine.url is not None
    connection = http.client.HTTPConnection(urlsplit(engine.url).netloc, timeout=PATIENCE_S)
    body = {"model": "smollm2", "prompt": prompt, "seed": asked.seed, "max_tokens": asked.max_tokens}
    body |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
    connection.request("POST", "/v1/completions", msgspec.json.encode(body), {"content-type": "application/json"})
    got: list[int] = []
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            if not got:
                begun.release()
            event = msgspec.json.decode(line.removeprefix(b"data: "))
            assert "choices" in event, event
            (choice,) = event["choices"]
            got += choice.get("token_ids") or []
    connection.close()
    return got


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGRTMIN + 3])
def test_any_signal_may_be_the_death_of_a_process(engine: Engine, number: int) -> None:
    target = engine.pids["target"]
    os.kill(target, number)
    until(lambda: engine.pids.get("target", target) != target)
    until(lambda: answers(engine))


def test_both_may_die_at_once(engine: Engine) -> None:
    for role in ("frontend", "target"):
        os.kill(engine.pids[role], signal.SIGKILL)
    until(lambda: get(engine, "/health")[0] == 200)
    with Client(engine.address) as client:
        assert client.generate([PROMPTS[2]], params(20))[0].token_ids == expected(engine, PROMPTS[2], params(20))


@pytest.mark.parametrize("role", ["target", pytest.param("frontend", marks=pytest.mark.thorough)])
def test_a_successor_that_is_stopped_while_it_loads_is_replaced_too(engine: Engine, role: str) -> None:
    first = engine.pids[role]
    os.kill(first, signal.SIGKILL)
    until(lambda: engine.pids.get(role, first) != first)
    os.kill(engine.pids[role], signal.SIGSTOP)
    until(lambda: answers(engine))


def answers(engine: Engine) -> bool:
    try:
        with Client(engine.address, timeout=1.0) as client:
            completion = client.generate([PROMPTS[2]], params(20))[0]
    except (EngineDeadError, RequestError):
        return False
    assert completion.token_ids == expected(engine, PROMPTS[2], params(20))
    return True


def test_a_frontend_that_was_away_while_the_target_was_replaced_finds_the_new_one(engine: Engine) -> None:
    """Its old connection may have found it before; the two must not be taken for one."""
    frontend, target = engine.pids["frontend"], engine.pids["target"]
    for _ in range(3):
        os.kill(frontend, signal.SIGSTOP)
        os.kill(target, signal.SIGKILL)
        until(lambda old=target: engine.pids.get("target", old) != old)
        target = engine.pids["target"]
        time.sleep(0.4)  # less than what counts as lost
        os.kill(frontend, signal.SIGCONT)
        until(lambda: answers(engine))
    assert engine.pids["frontend"] == frontend


@pytest.mark.parametrize("stream", [False, True])
def test_over_http_a_lost_target_is_one_error_that_says_to_try_again(engine: Engine, stream: bool) -> None:
    assert engine.url is not None
    connection = http.client.HTTPConnection(urlsplit(engine.url).netloc, timeout=PATIENCE_S)
    body = {"prompt": [[5, 6, 7]], "max_tokens": 1000, "ignore_eos": True, "n": 2, "stream": stream}
    head = {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", msgspec.json.encode(body | {"model": "smollm2"}), head)
    until(lambda: running(engine) == 2)
    if stream:
        answer = connection.getresponse()
        answer.readline()
    os.kill(engine.pids["target"], signal.SIGKILL)
    if not stream:
        answer = connection.getresponse()
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        assert msgspec.json.decode(answer.read())["error"]["code"] == "engine_restarted"
        return
    *events, error, done, rest = answer.read().decode().split("\n\n")
    assert msgspec.json.decode(error.removeprefix("data: "))["error"]["code"] == "engine_restarted"
    assert (done, rest) == ("data: [DONE]", "")
    assert not any("error" in event for event in events)


def test_a_target_that_always_dies_ends_the_engine_and_everyone_is_told(engine: Engine) -> None:
    ends: list[str] = []

    def ask() -> None:
        """Ask again whenever one is to, as clients do."""
        with Client(engine.address) as client:
            while True:
                try:
                    client.generate([PROMPTS[0]], params(2000))
                except RequestError as error:
                    ends.append(error.code)
                    time.sleep(0.02)
                except EngineDeadError:
                    return

    asking = threading.Thread(target=ask)
    asking.start()
    while not engine.wait(timeout=0.3):
        if "target" in engine.pids:
            os.kill(engine.pids["target"], signal.SIGKILL)
    asking.join(PATIENCE_S)
    assert not asking.is_alive()
    assert set(ends) <= {"engine_restarted", "restarting", "shutting_down"} and "engine_restarted" in ends
    assert isinstance(engine.failure, EngineDeadError)
    assert "target" in str(engine.failure) and "again and again" in str(engine.failure)


def test_restarts_leave_nothing_open(engine: Engine) -> None:
    """In the supervisor, which is this process, and where a test before may still close what it had open."""
    gc.collect()
    before = descriptors()
    for role in ("target", "frontend", "target", "frontend"):
        pid = engine.pids[role]
        os.kill(pid, signal.SIGKILL)
        until(lambda old=pid, role=role: engine.pids.get(role, old) != old)
        until(lambda: answers(engine))
    assert descriptors() <= before
    engine.stop(drain=0)


def test_a_target_lost_in_a_drain_is_told_to_everyone_and_not_replaced(engine: Engine) -> None:
    target = engine.pids["target"]
    got: list[int] = []

    async def ask() -> str:
        async with AsyncClient(engine.address) as client:
            return await stream(client, PROMPTS[0], params(2000), got)

    codes: list[str] = []
    asking = threading.Thread(target=lambda: codes.append(asyncio.run(ask())))
    asking.start()
    until(lambda: got)
    stopping = threading.Thread(target=engine.stop, args=(PATIENCE_S,))
    stopping.start()
    until(lambda: get(engine, "/health/ready")[0] == 503)
    os.kill(target, signal.SIGKILL)
    asking.join(PATIENCE_S)
    stopping.join(PATIENCE_S)
    assert not stopping.is_alive() and codes == ["engine_restarted"]
    assert isinstance(engine.failure, EngineDeadError)
