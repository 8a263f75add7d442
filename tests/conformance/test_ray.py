"""A target whose ranks Ray places, on a cluster of several raylets on this machine."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ssd import LLM, SamplingParams
from ssd.client import Client
from ssd.config.params import Mode, Speculation
from ssd.errors import RequestError
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.launch.supervisor import Engine
from tests.cli.launched import children
from tests.faults.engine import gone
from tests.models import tiny

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
from ray import cluster_utils  # reads the environment

PROMPTS = ["A tiny random checkpoint", "on two machines"]
PATIENCE_S = 120.0
_SMALL = {"object_store_memory": 80 * 2**20}
_RETRYABLE = {"engine_restarted", "restarting"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Three machines: the first has room for supervisor, rank 0 and draft, each other one for one more rank."""
    cluster = cluster_utils.Cluster(True, head_node_args={"num_cpus": 2, "include_dashboard": False, **_SMALL})
    for name in ("a", "b"):
        cluster.add_node(num_cpus=1, resources={name: 1}, **_SMALL)
    os.environ["RAY_ADDRESS"] = cluster.address
    try:
        yield cluster
    finally:
        del os.environ["RAY_ADDRESS"]
        cluster.shutdown()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("models")
    target = tiny.tokenizer(tiny.llama(folder / "target", vocab_size=300, max_position_embeddings=2048))
    draft = tiny.tokenizer(tiny.noisy_copy(target, folder / "draft", noise=0.01))
    places = {"target_cpus": "0", "draft_cpus": "1"}
    return {"target": str(target), "draft": (str(draft),), "draft_dtype": "float32", "max_num_seqs": 4, **places}


def params(mode: Mode, tokens: int = 24) -> list[SamplingParams]:
    return [
        SamplingParams(t, seed=5, max_tokens=tokens, ignore_eos=True, speculation=Speculation(mode)) for t in (0, 0.8)
    ]


@pytest.fixture(scope="module")
def expected(models: dict[str, Any]) -> list[list[int]]:
    with LLM(**{**models, "draft": None}, mode="ar") as llm:
        return [answer.token_ids for answer in llm.generate(PROMPTS, params("ar"))]


@pytest.fixture(scope="module")
def engine(cluster: Any, models: dict[str, Any]) -> Iterator[Engine]:
    with Engine(resolve(EngineOptions(**models, tensor_parallel_size=2, executor="ray"))) as engine:
        yield engine


def follower() -> tuple[int, int, int]:
    """The pids of the raylet that has placed rank 1, of its actor, and of the rank itself."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            actor = int(stat.parent.name)
            if (stat.parent / "cmdline").read_bytes().startswith(b"ray::Follower") and (there := children(actor)):
                return int(stat.read_text().rpartition(")")[2].split()[1]), actor, there["target"]
    raise AssertionError("no rank runs on another machine")


def answers(client: Client, mode: Mode) -> list[list[int]]:
    """When the engine is there again, if it is away."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return [answer.token_ids for answer in client.generate(PROMPTS, params(mode))]
        except RequestError as error:
            assert error.code in _RETRYABLE and time.monotonic() < deadline
            time.sleep(0.1)


def test_ranks_on_two_machines_say_what_one_rank_says(engine: Engine, expected: list[list[int]]) -> None:
    assert set(engine.pids) == {"target", "frontend", "draft"}
    assert follower()[0] != follower()[1]
    modes: tuple[Mode, ...] = ("ar", "sd", "ssd")
    with Client(engine.address) as client:
        assert [answers(client, mode) for mode in modes] == [expected] * 3


def test_what_a_rank_logs_is_in_the_log_of_the_supervisor(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    with Path(f"/proc/{follower()[2]}/fd/2").open("a") as log:
        print("said by rank 1", file=log)
    deadline, said = time.monotonic() + PATIENCE_S, ""
    while "said by rank 1" not in said:
        assert time.monotonic() < deadline
        time.sleep(0.1)
        said += capsys.readouterr().err


def test_the_loss_of_a_rank_is_that_of_the_target(engine: Engine, expected: list[list[int]]) -> None:
    _, _, rank = follower()
    with Client(engine.address) as client:
        with pytest.raises(RequestError) as caught:
            for count, _ in enumerate(client.stream(PROMPTS[0], params("ar", tokens=1900)[0])):
                if count == 3:
                    os.kill(rank, signal.SIGKILL)
        began = time.monotonic()
        assert caught.value.code == "engine_restarted"
        assert answers(client, "ssd") == expected
        print(f"\nrank killed: answers again after {time.monotonic() - began:.1f} s")
    assert follower()[2] != rank and gone(rank, within_s=2)


def test_a_machine_killed_under_load_loses_no_request_silently(
    cluster: Any, engine: Engine, expected: list[list[int]]
) -> None:
    raylet, _, rank = follower()
    (node,) = (n for n in cluster.worker_nodes if n.all_processes["raylet"][0].process.pid == raylet)
    ends: Counter[str] = Counter()
    recovered: list[float] = []
    stop = threading.Event()

    def ask() -> None:
        with Client(engine.address) as client:
            while not stop.is_set():
                try:
                    answer = client.generate(PROMPTS[0], params("ssd")[0])
                    ends["right" if answer.token_ids == expected[0] else "wrong"] += 1
                    recovered.append(time.monotonic())
                except RequestError as error:
                    ends[error.code] += 1
                    time.sleep(0.05)

    threads = [threading.Thread(target=ask) for _ in range(8)]  # of which four run
    for thread in threads:
        thread.start()
    while ends["right"] < 20:
        time.sleep(0.01)
    cluster.remove_node(node, allow_graceful=False)
    killed, before = time.monotonic(), ends["right"]
    while (ends["right"] < before + 20 or time.monotonic() < killed + 2) and time.monotonic() < killed + PATIENCE_S:
        time.sleep(0.05)
    stop.set()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a request has no end"
    gap, back = max((later - sooner, later) for sooner, later in pairwise(sorted(recovered)))
    print(f"\nmachine killed: {dict(ends)}, nothing answered for {gap:.1f} s")
    assert back > killed and set(ends) <= {"right", *_RETRYABLE} and 0 < ends["engine_restarted"] <= 4
    assert follower()[0] != raylet and gone(rank, within_s=2)
