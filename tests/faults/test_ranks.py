"""A target over two ranks, each a process: the same tokens in every mode; the loss of one is that of the target."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from ssd import LLM, SamplingParams
from ssd.client import Client
from ssd.config.params import Mode, Speculation
from ssd.errors import RequestError, UsageError
from ssd.launch import liveness
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.launch.server import ServerOptions
from ssd.launch.supervisor import Engine
from tests.faults.engine import descriptors, gone, sending, shared_memory
from tests.models import tiny

PROMPTS = ["A tiny random checkpoint", "of two", "ranks, each of which is a process of its own"]
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A target and a draft that agrees with it now and then."""
    folder = tmp_path_factory.mktemp("models")
    target = tiny.tokenizer(tiny.llama(folder / "target", vocab_size=300, max_position_embeddings=2048))
    draft = tiny.tokenizer(tiny.noisy_copy(target, folder / "draft", noise=0.01))
    return {"target": str(target), "draft": (str(draft),), "draft_dtype": "float32", "max_num_seqs": 4}


@pytest.fixture(scope="module")
def engine(models: dict[str, Any]) -> Iterator[Engine]:
    engine = Engine(resolve(EngineOptions(**models, tensor_parallel_size=2), ServerOptions(port=0)))
    with engine:
        yield engine


@pytest.fixture(scope="module")
def whole(models: dict[str, Any]) -> Iterator[LLM]:
    """The target as one process."""
    with LLM(models["target"], mode="ar") as llm:
        yield llm


def listening(pid: int) -> list[str]:
    """Where a process listens for TCP connections: addresses and ports in hexadecimal, as the kernel writes them."""
    inodes = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()}
    tables = [Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]


def params(mode: Mode, tokens: int = 40, **law: Any) -> list[SamplingParams]:
    return [
        SamplingParams(
            seed=seed, max_tokens=tokens, ignore_eos=True, speculation=Speculation(mode, 4, (3,), "jit"), **law
        )
        for seed in range(len(PROMPTS))
    ]


def status(engine: Engine) -> int:
    try:
        with urlopen(f"{engine.url}/health") as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code


@pytest.mark.parametrize("law", [{}, {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.8}], ids=str)
def test_every_mode_says_the_same_and_what_one_rank_says(engine: Engine, whole: LLM, law: dict[str, Any]) -> None:
    modes: tuple[Mode, ...] = ("ar", "sd", "ssd")
    with Client(engine.address) as client:
        answers = {mode: client.generate(PROMPTS, params(mode, **law)) for mode in modes}
    expected = [answer.token_ids for answer in whole.generate(PROMPTS, params("ar", **law))]
    assert all([answer.token_ids for answer in answers[mode]] == expected for mode in modes)
    assert sum(answer.metrics.accepted_tokens for answer in answers["sd"]) > 0


def test_two_ranks_leave_nothing_behind_and_hear_nobody_from_outside(models: dict[str, Any]) -> None:
    gc.collect()
    shm, before = shared_memory(), descriptors()
    with LLM(models["target"], mode="ar", tensor_parallel_size=2) as llm:
        pids = llm.engine.pids
        assert set(pids) == {"target", "target-1", "frontend"}
        found = [listening(pids[role]) for role in ("target", "target-1")]
        assert all(found) and all(address.startswith("0100007F:") for addresses in found for address in addresses)
    assert all(gone(pid) for pid in pids.values())
    assert (shared_memory(), descriptors()) == (shm, before)


@pytest.mark.parametrize(("role", "fault"), [("target", signal.SIGKILL), ("target-1", signal.SIGSTOP)])
def test_the_loss_of_a_rank_is_that_of_the_target(
    engine: Engine, role: str, fault: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "_STOPPED_S", 1.0)  # the test waits for it
    with Client(engine.address) as client:
        expected = client.generate(PROMPTS[0], params("ar")[0]).token_ids
        before = engine.pids
        with pytest.raises(RequestError) as caught:
            for count, _ in enumerate(client.stream(PROMPTS[0], params("ar", tokens=1900)[0])):
                if count == 3:
                    os.kill(before[role], fault)
        assert caught.value.code == "engine_restarted"
        assert status(engine) == 503
        deadline = time.monotonic() + PATIENCE_S
        while status(engine) != 200:
            assert time.monotonic() < deadline, "the group does not come back"
            time.sleep(0.02)
        assert client.generate(PROMPTS[0], params("ssd")[0]).token_ids == expected
        now = engine.pids
        assert now["frontend"] == before["frontend"]
        assert not set(now.values()) & {before["target"], before["target-1"], before["draft"]}
        assert gone(before["target"]) and gone(before["target-1"])


def test_a_rank_that_is_killed_at_the_start_is_replaced_with_its_group(
    models: dict[str, Any], whole: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(resolve(EngineOptions(**models, mode="ar", tensor_parallel_size=2)))
    with sending(engine, "target-1", signal.SIGKILL, most=1), engine, Client(engine.address) as client:
        assert "the target-1 was lost (killed by SIGKILL), restarting it in 0.1 s" in caplog.text
        expected = whole.generate(PROMPTS[:1], params("ar")[:1])[0].token_ids
        assert client.generate(PROMPTS[0], params("ar")[0]).token_ids == expected


def test_what_cannot_be_split_is_a_usage_error(tmp_path: Path) -> None:
    odd = tiny.tokenizer(tiny.llama(tmp_path, vocab_size=300, intermediate_size=51))
    with pytest.raises(UsageError, match="intermediate_size 51 cannot be divided among 2 ranks"):
        LLM(str(odd), mode="ar", tensor_parallel_size=2)
