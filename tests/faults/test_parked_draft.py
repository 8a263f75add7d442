"""A draft that nobody uses ends and comes back: no token changes, and whoever dies meanwhile is replaced."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
from msgspec.structs import replace

from ssd.client import Client
from ssd.config.params import SamplingParams, Speculation
from ssd.errors import RequestError
from ssd.ipc.trace_ring import WORDS, State
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.launch.server import ServerOptions
from ssd.launch.supervisor import Engine
from tests.faults.engine import gone
from tests.monitor.watcher import Watcher
from tests.scripted_engine import PATIENCE_S
from tools.soak.processes import roles

PROMPT = "The capital of France is"
SOON_S = 0.3
LAUNCH = f"""
from msgspec.structs import replace
from ssd.cli import launch, main
resolve = launch.resolve
launch.resolve = lambda *options: replace(resolve(*options), idle_draft_s={SOON_S})
main.main()
"""


def params(mode: str) -> SamplingParams:
    speculation = Speculation(mode, 3, (3,), "jit")  # type: ignore[arg-type]
    return SamplingParams(max_tokens=96, ignore_eos=True, speculation=speculation, store=False)


@contextmanager
def running(**changes: Any) -> Iterator[Engine]:
    config = resolve(EngineOptions(), ServerOptions(port=0))
    with Engine(replace(config, idle_draft_s=SOON_S, **changes)) as engine:
        yield engine


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running() as engine:
        yield engine


@pytest.fixture
def client(engine: Engine) -> Iterator[Client]:
    with Client(engine.address) as client:
        yield client


@pytest.fixture
def expected(client: Client) -> list[int]:
    return client.generate(PROMPT, params("ar")).token_ids


def until(found: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def told(engine: Engine, path: str) -> str:
    with urlopen(f"{engine.url}/{path}") as answer:
        return str(answer.read().decode())


def state(engine: Engine) -> str:
    return str(json.loads(told(engine, "server_info"))["draft_state"])


def is_parked(engine: Engine) -> bool:
    return state(engine) == "parked" and "draft" not in engine.pids


def comes_back(client: Client, expected: list[int]) -> bool:
    """Whether requests that name ssd get the same tokens and hit in the end; a count and no clock."""
    for _ in range(400):
        completion = client.generate(PROMPT, params("ssd"))
        assert completion.token_ids == expected
        if completion.metrics.hits:
            return True
    return False


def test_an_unused_draft_ends_comes_back_for_a_request_that_names_it_and_ends_again(
    engine: Engine, client: Client, expected: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    until(lambda: is_parked(engine))
    assert client.generate(PROMPT, params("auto")).token_ids == expected
    assert comes_back(client, expected)
    until(lambda: is_parked(engine))
    assert engine._restarts["draft"].deaths == 0
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_parked_draft_is_told_as_such(engine: Engine) -> None:
    until(lambda: is_parked(engine))
    assert json.loads(told(engine, "server_info"))["state"] == "ready"
    metrics = told(engine, "metrics")
    assert 'state="parked"} 1.0\n' in metrics and 'state="down"} 0.0\n' in metrics
    assert f'draft_losses_total{{model_name="{engine.config.target_name}"}} 0.0\n' in metrics
    with closing(Watcher(engine)) as watcher:
        while (snapshot := watcher.receive(PATIENCE_S)) is None:
            pass
    assert {process.role: process.state for process in snapshot.processes}["draft"] == "parked"
    records = {trace.role: np.frombuffer(trace.records, np.int64).reshape(-1, WORDS) for trace in snapshot.traces}
    assert records["draft"][-1, 2] == State.IDLE


@pytest.mark.thorough
def test_a_draft_that_dies_before_it_has_left_is_replaced_and_the_next_one_leaves(
    engine: Engine, client: Client, expected: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    assert comes_back(client, expected)
    os.kill(draft := engine.pids["draft"], signal.SIGSTOP)
    until(lambda: state(engine) == "parked")
    os.kill(draft, signal.SIGKILL)
    until(lambda: "the draft was lost" in caplog.text)
    until(lambda: is_parked(engine))
    assert comes_back(client, expected)


@pytest.mark.thorough
def test_a_draft_wanted_before_it_has_left_has_a_successor(engine: Engine, client: Client, expected: list[int]) -> None:
    assert comes_back(client, expected)
    os.kill(draft := engine.pids["draft"], signal.SIGSTOP)
    until(lambda: state(engine) == "parked")
    assert client.generate(PROMPT, params("ssd")).token_ids == expected
    os.kill(draft, signal.SIGCONT)
    assert gone(draft)
    assert comes_back(client, expected)


def test_a_draft_that_dies_on_its_way_back_is_lost_like_any_other(
    engine: Engine, client: Client, expected: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    until(lambda: is_parked(engine))
    client.generate(PROMPT, params("ssd"))
    until(lambda: "draft" in engine.pids)
    os.kill(engine.pids["draft"], signal.SIGKILL)
    until(lambda: "the draft was lost" in caplog.text)
    assert comes_back(client, expected)
    assert "the draft is back" in caplog.text, "after a back-off, with a warning"


def test_a_target_that_dies_beside_a_parked_draft_returns(engine: Engine, client: Client, expected: list[int]) -> None:
    until(lambda: is_parked(engine))
    os.kill(target := engine.pids["target"], signal.SIGKILL)
    until(lambda: engine.pids.get("target", target) != target and "draft" in engine.pids)

    def answers() -> bool:
        try:
            return client.generate(PROMPT, params("auto")).token_ids == expected
        except RequestError as error:
            assert error.code in ("restarting", "engine_restarted")
            return False

    until(answers, 3 * PATIENCE_S)  # both processes begin anew, which took 7 to 17 s alone
    assert comes_back(client, expected)


def test_sigterm_while_the_draft_is_parked_ends_the_command_with_status_zero() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, "launch", "--no-http"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    line = next(line for line in process.stdout if line.startswith("ready"))
    until(lambda: "draft" not in roles(process.pid))
    pids = roles(process.pid)
    assert set(pids) == {"target", "frontend"}
    process.terminate()
    assert process.wait(PATIENCE_S) == 0
    assert all(gone(pid) for pid in pids.values())
    assert not Path(line.split()[-1].removeprefix("ipc://")).parent.exists()
