"""A target with a rank on another machine, but without Ray: a thread of this process is that machine."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from ssd import LLM, SamplingParams
from ssd.client import Client
from ssd.config.engine import EngineConfig
from ssd.config.params import Mode, Speculation
from ssd.errors import RequestError, UsageError
from ssd.ipc import meeting
from ssd.launch.executors import Loss
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.launch.supervisor import Engine
from ssd.plugins.ray.ranks import Follower
from ssd.system import registered
from tests.faults.engine import gone, shared_memory
from tests.models import tiny

PROMPTS = ["A tiny random checkpoint", "on two machines"]
PATIENCE_S = 60.0


class ThreadRanks:
    """Does what `RayRanks` does, for two ranks."""

    variables: dict[str, str] = {}  # noqa: RUF012
    follower: Follower

    def __init__(self, config: EngineConfig, held: ExitStack) -> None:
        self._config, self._threads = msgspec.json.encode(config), held.enter_context(ThreadPoolExecutor())
        held.callback(self.end)
        self._store, self.meeting = meeting.host("127.0.0.1")
        self._running: Future[tuple[str, int]] | None = None

    def begin(self, group: int) -> None:
        ThreadRanks.follower = Follower()
        self._running = self._threads.submit(self.follower.run, self._config, 1, group, self.meeting)

    def loss(self) -> Loss | None:
        return Loss(*self._running.result()) if self._running is not None and self._running.done() else None

    def end(self) -> None:
        if self._running is not None:
            self.follower.end()
            self._running.result(PATIENCE_S)
        self._running = None

    @classmethod
    def pid(cls) -> int:
        assert cls.follower._process is not None
        return cls.follower._process.pid


@pytest.fixture(autouse=True)
def _threads_for_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("ssd.plugins.ray.ranks.RayRanks", ThreadRanks)
    registered.load.cache_clear()
    yield
    registered.load.cache_clear()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("models")
    target = tiny.tokenizer(tiny.llama(folder / "target", vocab_size=300, max_position_embeddings=2048))
    draft = tiny.tokenizer(tiny.noisy_copy(target, folder / "draft", noise=0.01))
    return {"target": str(target), "draft": (str(draft),), "draft_dtype": "float32", "max_num_seqs": 4}


def config(models: dict[str, Any], **changes: Any) -> EngineConfig:
    return resolve(EngineOptions(**models | {"tensor_parallel_size": 2, "executor": "ray"} | changes))


def params(mode: Mode, tokens: int = 24) -> list[SamplingParams]:
    return [
        SamplingParams(t, seed=5, max_tokens=tokens, ignore_eos=True, speculation=Speculation(mode, 4, (3,), "jit"))
        for t in (0, 0.8)
    ]


def answers(client: Client, mode: Mode) -> list[list[int]]:
    """When the engine is there again, if it is away."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return [answer.token_ids for answer in client.generate(PROMPTS, params(mode))]
        except RequestError as error:
            assert error.code in ("engine_restarted", "restarting") and time.monotonic() < deadline
            time.sleep(0.05)


def test_a_rank_elsewhere_says_the_same_and_is_replaced_when_it_is_lost(models: dict[str, Any]) -> None:
    with LLM(**{**models, "draft": None}, mode="ar") as llm:
        expected = [answer.token_ids for answer in llm.generate(PROMPTS, params("ar"))]
    shm = shared_memory()
    with Engine(config(models)) as engine, Client(engine.address) as client:
        assert set(engine.pids) == {"target", "frontend", "draft"}
        modes: tuple[Mode, ...] = ("ar", "sd", "ssd")
        assert [answers(client, mode) for mode in modes] == [expected] * 3
        before = engine.pids | {"elsewhere": ThreadRanks.pid()}
        with pytest.raises(RequestError) as caught:
            for count, _ in enumerate(client.stream(PROMPTS[0], params("ar", tokens=1900)[0])):
                if count == 3:
                    os.kill(before["elsewhere"], signal.SIGKILL)
        assert caught.value.code == "engine_restarted"
        assert answers(client, "ssd") == expected
        assert engine.pids["target"] != before["target"] and gone(before["target"])
        there = ThreadRanks.pid()
    assert gone(there) and shared_memory() == shm


@pytest.mark.thorough
def test_what_a_rank_fails_of_at_the_start_is_the_cause_and_one_that_is_killed_is_replaced(
    models: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    alone = config(models, draft=(), mode="ar")
    with pytest.raises(UsageError, match="differs from the files there on the supervisor's machine"):
        Engine(replace(alone, digest="another")).start()
    failed = ThreadRanks.follower

    def kill() -> None:
        while ThreadRanks.follower is failed or ThreadRanks.follower._process is None:
            time.sleep(0.002)
        os.kill(ThreadRanks.pid(), signal.SIGKILL)

    killing = threading.Thread(target=kill)
    killing.start()
    with Engine(alone) as engine, Client(engine.address) as client:
        killing.join()
        assert "the target was lost (killed by SIGKILL), restarting it in 0.1 s" in caplog.text
        assert all(answers(client, "ar"))
