"""A target over two nodes, on one machine: what one says, and how it ends when one of them does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from ssd import LLM, SamplingParams, failpoints
from ssd.client import Client
from ssd.config.engine import EngineConfig, Nodes
from ssd.config.params import Mode, Speculation
from ssd.errors import EngineDeadError, RequestError, UsageError
from ssd.launch.follower_node import merged
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.launch.server import ServerOptions
from ssd.launch.supervisor import Engine
from tests.cli.launched import children
from tests.faults.engine import gone, shared_memory
from tests.models import tiny

PROMPTS = ["A tiny random checkpoint", "on two machines"]
PATIENCE_S = 240.0
TWO = {"tensor_parallel_size": 2, "nnodes": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("models")
    target = tiny.tokenizer(tiny.llama(folder / "target", vocab_size=300, max_position_embeddings=2048))
    draft = tiny.tokenizer(tiny.noisy_copy(target, folder / "draft", noise=0.01))
    return {"target": str(target), "draft": (str(draft),), "draft_dtype": "float32", "max_num_seqs": 4}


@pytest.fixture
def endpoint() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@contextmanager
def node(rank: int, endpoint: str, target: str, *flags: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """`ssd launch` of a node."""
    here = ("--nnodes", "2", "--node-rank", str(rank), "--rdzv-endpoint", endpoint, "-tp", "2", "--target", target)
    process = subprocess.Popen(
        [sys.executable, "-c", "from ssd.cli.main import main; main()", "launch", *here, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def said(process: subprocess.Popen[str], word: str) -> str:
    """The line of stdout that begins with `word`."""
    assert process.stdout is not None and process.stderr is not None
    while line := process.stdout.readline():
        if line.startswith(word):
            return line.strip()
    raise AssertionError(process.stderr.read())


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Its exit status and what it said on stderr."""
    _, errors = process.communicate(timeout=PATIENCE_S)
    return process.returncode, errors


def params(mode: Mode, tokens: int = 24) -> list[SamplingParams]:
    return [
        SamplingParams(t, seed=5, max_tokens=tokens, ignore_eos=True, speculation=Speculation(mode)) for t in (0, 0.8)
    ]


def answers(client: Client, mode: Mode) -> list[list[int]]:
    """When the engine is there again, if it is away."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return [answer.token_ids for answer in client.generate(PROMPTS, params(mode))]
        except RequestError as error:
            assert error.code in ("engine_restarted", "restarting") and time.monotonic() < deadline
            time.sleep(0.1)


@pytest.mark.timeout(600)
def test_two_nodes_say_what_one_says_and_go_on_when_the_second_is_lost(models: dict[str, Any], endpoint: str) -> None:
    with LLM(**{**models, "draft": None}, mode="ar") as llm:
        expected = [answer.token_ids for answer in llm.generate(PROMPTS, params("ar"))]
    shm = shared_memory()
    first = Engine(resolve(EngineOptions(**models, **TWO, rdzv_endpoint=endpoint)))
    second_node = node(1, endpoint, models["target"])  # which begins before there is anything to meet
    with second_node as second, first, Client(first.address) as client:
        assert said(second, "ready") == "ready: node 1 of 2, ranks 1 to 1"
        assert set(first.pids) == {"target", "frontend", "draft"} and set(children(second.pid)) == {"target"}
        modes: tuple[Mode, ...] = ("ar", "sd", "ssd")
        assert [answers(client, mode) for mode in modes] == [expected] * 3
        # A rank of the second node dies in the middle of an answer: all ranks begin again.
        before = first.pids | {"there": children(second.pid)["target"]}
        with pytest.raises(RequestError) as caught:
            for count, _ in enumerate(client.stream(PROMPTS[0], params("ar", tokens=1900)[0])):
                if count == 3:
                    os.kill(before["there"], signal.SIGKILL)
        assert caught.value.code == "engine_restarted"
        assert answers(client, "ssd") == expected
        assert first.pids["target"] != before["target"] and children(second.pid)["target"] != before["there"]
        # The whole node goes, and another one comes in its place.
        there = children(second.pid)["target"]
        second.terminate()
        assert ended(second)[0] == 143 and gone(there, within_s=2)
        with node(1, endpoint, models["target"]) as third:
            assert answers(client, "ssd") == expected
            there = children(third.pid)["target"]
            first.stop()
            status, errors = ended(third)
            assert status == 0 and "node 0 has ended" in errors and gone(there, within_s=2)
    assert first.failure is None and shared_memory() == shm


@pytest.mark.timeout(600)
def test_a_node_dies_with_node_0(models: dict[str, Any], endpoint: str) -> None:
    flags = ["--mode", "ar", "--no-http"]
    with node(0, endpoint, models["target"], *flags) as first, node(1, endpoint, models["target"]) as second:
        said(first, "ready")
        said(second, "ready")
        pids = [*children(first.pid).values(), *children(second.pid).values()]
        assert len(pids) == 3
        first.kill()
        status, errors = ended(second)
        assert status == 1 and f"node 0 at {endpoint} is gone" in errors
        assert all(gone(pid, within_s=2) for pid in pids)


@pytest.mark.timeout(600)
def test_what_a_node_dies_of_at_the_start_is_the_message_of_node_0(models: dict[str, Any], endpoint: str) -> None:
    config = resolve(EngineOptions(**{**models, "draft": ()}, mode="ar", **TWO, rdzv_endpoint=endpoint))
    with node(1, endpoint, models["target"], **{failpoints.VARIABLE: "rank.step=kill"}) as second:
        with pytest.raises(EngineDeadError, match="node 1: the target-1 process ended: killed by SIGKILL"):
            Engine(replace(config, failpoints=True)).start()
        status, errors = ended(second)
        assert status == 1 and "the target-1 process ended: killed by SIGKILL" in errors


def test_an_endpoint_that_is_taken_is_said_at_once(models: dict[str, Any]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        config = resolve(EngineOptions(**{**models, "draft": ()}, mode="ar", **TWO, rdzv_endpoint=endpoint))
        with pytest.raises(UsageError, match=f"cannot listen on {endpoint}"):
            Engine(config).start()


def test_a_node_that_follows_is_no_engine(models: dict[str, Any]) -> None:
    config = resolve(EngineOptions(**models, **TWO, node_rank=1, rdzv_endpoint="127.0.0.1:1"))
    assert (config.draft, config.speculation.mode, config.ranks) == (None, "ar", range(1, 2))
    with pytest.raises(UsageError, match="node 1 only follows: it is for `ssd launch`"):
        Engine(config)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"rdzv_endpoint": None}, "--nnodes 2 needs --rdzv-endpoint HOST:PORT"),
        ({"nnodes": 1}, "are for several nodes: give --nnodes"),
        ({"nnodes": 1, "node_rank": 1, "rdzv_endpoint": None}, "are for several nodes: give --nnodes"),
        ({"rdzv_endpoint": "somewhere"}, "--rdzv-endpoint somewhere: give HOST:PORT"),
        ({"rdzv_endpoint": "10.1.2.3:29400"}, "neither encrypted nor signed: give --insecure"),
        ({"node_rank": 2}, "--node-rank 2: of --nnodes 2 the last is 1"),
        ({"tensor_parallel_size": 1}, "--tensor-parallel-size 1 cannot be divided among --nnodes 2"),
        ({"load_format": "mock"}, "neither the mock nor emulated times are split over ranks"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(models: dict[str, Any], asked: dict[str, Any], message: str) -> None:
    given = {**models, **TWO, "node_rank": 0, "rdzv_endpoint": "127.0.0.1:29400"} | asked
    with pytest.raises(UsageError, match=message):
        resolve(EngineOptions(**given))


def test_other_machines_may_be_let_in(models: dict[str, Any]) -> None:
    options = EngineOptions(**models, **TWO, rdzv_endpoint="10.1.2.3:29400")
    assert resolve(options, ServerOptions(http=False, insecure=True)).nodes == Nodes(
        count=2, rank=0, endpoint="10.1.2.3:29400"
    )


def test_a_node_takes_from_node_0_all_but_its_place() -> None:
    nodes = [Nodes(count=2, rank=rank, endpoint="127.0.0.1:1") for rank in (0, 1)]
    same: dict[str, Any] = {"tensor_parallel_size": 2, "digest": "d", "speculation": Speculation("ar")}
    theirs = EngineConfig(target="/there", nodes=nodes[0], num_pages=500, dtype="bfloat16", **same)
    own = EngineConfig(target="/here", nodes=nodes[1], device="cuda:1", **same)
    found = merged(own, theirs, nodes[1])
    assert (found.target, found.device, found.nodes) == ("/here", "cuda:1", nodes[1])
    assert (found.num_pages, found.dtype) == (500, "bfloat16")
    for change, message in (
        ({"digest": "e"}, "/here is not the target of node 0"),
        ({"tensor_parallel_size": 4}, "--tensor-parallel-size 4: node 0 has 2"),
    ):
        with pytest.raises(UsageError, match=message):
            merged(replace(own, **change), theirs, nodes[1])
    with pytest.raises(UsageError, match="--nnodes 2: node 0 has 1"):
        merged(own, replace(theirs, nodes=None), nodes[1])
