"""Ranks and replicas that Ray places, on a cluster of several raylets on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from random import choice
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from ssd import LLM, SamplingParams
from ssd.client import Client
from ssd.config.params import Mode, Speculation
from ssd.errors import RequestError
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.launch.supervisor import Engine
from tests.conformance.test_routers import free_port
from tests.faults.engine import gone
from tests.models import tiny
from tools.soak.processes import roles

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
os.environ |= {"RAY_health_check_period_ms": "500"}  # by default 3000: a dead machine is known after 15 s
from ray import cluster_utils  # reads the environment

PROMPTS = ["A tiny random checkpoint", "on two machines"]
PATIENCE_S = 120.0
_SMALL = {"object_store_memory": 80 * 2**20}
_RETRYABLE = {"engine_restarted", "restarting"}


def grow(cluster: Any) -> None:
    """Add two machines, each with room for one rank or replica."""
    for _ in range(2):
        cluster.add_node(wait=False, num_cpus=1, **_SMALL)
    cluster.wait_for_nodes()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Three machines: the first has room for supervisor, rank 0 and draft, each other one for one more rank."""
    cluster = cluster_utils.Cluster(True, head_node_args={"num_cpus": 2, "include_dashboard": False, **_SMALL})
    grow(cluster)
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
        SamplingParams(t, seed=5, max_tokens=tokens, ignore_eos=True, speculation=Speculation(mode, 4, (3,), "jit"))
        for t in (0, 0.8)
    ]


@pytest.fixture(scope="module")
def expected(models: dict[str, Any]) -> list[list[int]]:
    with LLM(**{**models, "draft": None}, mode="ar") as llm:
        return [answer.token_ids for answer in llm.generate(PROMPTS, params("ar"))]


@pytest.fixture(scope="module")
def engine(cluster: Any, models: dict[str, Any]) -> Iterator[Engine]:
    with Engine(resolve(EngineOptions(**models, tensor_parallel_size=2, executor="ray"))) as engine:
        yield engine


def actors(name: bytes) -> Iterator[tuple[int, int]]:
    """The pids of raylets and of their actors of that name."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if (stat.parent / "cmdline").read_bytes().startswith(name):
                yield int(stat.read_text().rpartition(")")[2].split()[1]), int(stat.parent.name)


def follower() -> tuple[int, int]:
    """The pids of the raylet that has placed rank 1, and of the rank."""
    for raylet, actor in actors(b"ray::Follower"):
        if there := roles(actor):
            return raylet, there["target"]
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


@contextmanager
def asking(ask: Callable[[], str], threads: int) -> Iterator[Counter[str]]:
    """Call `ask` again and again in so many threads, and count what it returns; every call must end."""
    ends: Counter[str] = Counter()
    stop = threading.Event()

    def again() -> None:
        while not stop.is_set():
            ends[ask()] += 1

    running = [threading.Thread(target=again, daemon=True) for _ in range(threads)]
    for thread in running:
        thread.start()
    try:
        yield ends
    finally:
        stop.set()
        for thread in running:
            thread.join(PATIENCE_S)
        assert not any(thread.is_alive() for thread in running), "a request has no end"


def test_ranks_on_two_machines_say_what_one_rank_says(engine: Engine, expected: list[list[int]]) -> None:
    assert set(engine.pids) == {"target", "frontend", "draft"}
    modes: tuple[Mode, ...] = ("ar", "sd", "ssd")
    with Client(engine.address) as client:
        assert [answers(client, mode) for mode in modes] == [expected] * 3


def test_what_a_rank_logs_is_in_the_log_of_the_supervisor(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    with Path(f"/proc/{follower()[1]}/fd/2").open("a") as log:
        print("said by rank 1", file=log)
    deadline, said = time.monotonic() + PATIENCE_S, ""
    while "said by rank 1" not in said:
        assert time.monotonic() < deadline
        time.sleep(0.1)
        said += capsys.readouterr().err


def test_the_loss_of_a_rank_is_that_of_the_target(engine: Engine, expected: list[list[int]]) -> None:
    _, rank = follower()
    with Client(engine.address) as client:
        with pytest.raises(RequestError) as caught:
            for count, _ in enumerate(client.stream(PROMPTS[0], params("ar", tokens=1900)[0])):
                if count == 3:
                    os.kill(rank, signal.SIGKILL)
        began = time.monotonic()
        assert caught.value.code == "engine_restarted"
        assert answers(client, "ssd") == expected
        print(f"\nrank killed: answers again after {time.monotonic() - began:.1f} s")
    assert follower()[1] != rank and gone(rank)


def test_a_machine_killed_under_load_loses_no_request_silently(
    cluster: Any, engine: Engine, expected: list[list[int]]
) -> None:
    raylet, rank = follower()
    (node,) = (n for n in cluster.worker_nodes if n.all_processes["raylet"][0].process.pid == raylet)
    times: list[float] = []

    def ask() -> str:
        with Client(engine.address) as client:
            try:
                answer = client.generate(PROMPTS[0], params("ssd")[0])
            except RequestError as error:
                time.sleep(0.05)
                return error.code
        times.append(time.monotonic())
        return "right" if answer.token_ids == expected[0] else "wrong"

    with asking(ask, 8) as ends:  # of which four run
        while ends["right"] < 20:
            time.sleep(0.01)
        cluster.remove_node(node, allow_graceful=False)
        killed = time.monotonic()
        while times[-1] < killed + 2 and time.monotonic() < killed + PATIENCE_S:
            time.sleep(0.05)
    gap = max(later - sooner for sooner, later in pairwise(sorted(times)))
    print(f"\nmachine killed: {dict(ends)}, nothing answered for {gap:.1f} s")
    # A request that had no token yet is begun again: on a busy machine that may be all four.
    assert times[-1] > killed + 2 and set(ends) <= {"right", *_RETRYABLE} and ends["engine_restarted"] <= 4
    assert follower()[0] != raylet and gone(rank)


class Replicas:
    """What `ssd serve-ray` started."""

    def __init__(self, cluster: Any, target: str, folder: Path) -> None:
        self._config, self._environment = folder / "ssd.toml", {**os.environ, "RAY_ADDRESS": cluster.address}
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.target = target

    def command(self, *arguments: str) -> str:
        replicas = "[replicas]\nmin = 2\nmax = 2\n"
        self._config.write_text(f'target = "{self.target}"\nmode = "ar"\nport = {self.port}\n{replicas}')
        code = "from ssd.cli.main import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code, "serve-ray", str(self._config), *arguments],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def post(self, prompt: str, **fields: Any) -> Any:
        """The body of the answer, decoded; of a stream, all events. Raises HTTPError."""
        body = {"model": Path(self.target).name, "prompt": prompt, "max_tokens": 16, "seed": 1, **fields}
        headers = {"Content-Type": "application/json"}
        with urlopen(Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers), timeout=60) as answer:
            found = answer.read()
        if not fields.get("stream"):
            return json.loads(found)
        *events, last = found.decode().removesuffix("\n\n").split("\n\n")
        assert last == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def end_of(self, prompt: str, expected: str) -> str:
        """How one request ends, a stream or not: right, wrong, or the code of an error that the client was told."""
        try:
            if prompt.endswith("?"):
                *chunks, last = self.post(prompt, stream=True)
                if "error" in last:
                    return str(last["error"]["code"])
                text = "".join(chunk["choices"][0]["text"] for chunk in [*chunks, last])
            else:
                text = self.post(prompt)["choices"][0]["text"]
        except HTTPError as error:
            return str(json.load(error)["error"]["code"])
        return "right" if text == expected else "wrong"


@pytest.fixture(scope="module")
def replicas(cluster: Any, engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    """Two replicas on machines of their own: the `engine` leaves no room on the first one."""
    grow(cluster)
    found = Replicas(cluster, engine.config.target, tmp_path_factory.mktemp("replicas"))
    assert found.command() == f"http: {found.url}\n"
    yield found
    found.command("--stop")


@pytest.fixture(scope="module")
def right(replicas: Replicas) -> dict[str, str]:
    """Prompts, half of which are asked for as streams, and their texts."""
    prompts = ["Who is there", "What is it?"]
    return {prompt: replicas.post(prompt)["choices"][0]["text"] for prompt in prompts}


def test_a_prompt_goes_where_its_beginning_is_known(replicas: Replicas) -> None:
    heads = [" ".join(f"{word} {number}" for number in range(12)) for word in ("stone", "river", "lamp", "cloud")]
    for head in heads:
        replicas.post(head)
    found = [replicas.post(f"{head} and {number}")["usage"] for head in heads for number in range(4)]
    assert all(usage["prompt_tokens_details"]["cached_tokens"] > 0 for usage in found)


def test_replicas_are_replaced_without_an_error(replicas: Replicas, right: dict[str, str]) -> None:
    with asking(lambda: replicas.end_of(*choice(list(right.items()))), 2) as ends:
        began = time.monotonic()
        replicas.command()
        print(f"\nreplicas replaced in {time.monotonic() - began:.1f} s: {dict(ends)}")
    assert set(ends) == {"right"} and ends["right"] > 20


def test_a_machine_with_a_replica_killed_under_load(cluster: Any, replicas: Replicas, right: dict[str, str]) -> None:
    nodes = {n.all_processes["raylet"][0].process.pid: n for n in cluster.worker_nodes}
    raylet = next(parent for parent, _ in actors(b"ray::ServeReplica:ssd:Replica") if parent in nodes)
    times: list[float] = []

    def ask() -> str:
        end = replicas.end_of(*choice(list(right.items())))
        times.append(time.monotonic())
        return end

    with asking(ask, 8) as ends:
        while ends["right"] < 50:
            time.sleep(0.01)
        cluster.remove_node(nodes[raylet], allow_graceful=False)
        killed = time.monotonic()
        while times[-1] < killed + 5 and time.monotonic() < killed + PATIENCE_S:
            time.sleep(0.05)
    gap = max(later - sooner for sooner, later in pairwise(sorted(times)))
    print(f"\nmachine of one of two replicas killed: {dict(ends)}, nothing ended for {gap:.1f} s")
    assert set(ends) <= {"right", "engine_restarted"} and times[-1] > killed + 5
