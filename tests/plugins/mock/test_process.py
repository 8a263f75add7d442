"""The mock as an engine: its own process behind the real frontend, asked by real clients."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ssd.client import Client
from ssd.config.params import SamplingParams
from ssd.errors import UsageError
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.launch.supervisor import Engine
from ssd.models.checkpoint import inspect, stop_token_ids
from ssd.plugins.mock.oracle import LOOKAHEAD, ScriptedAnswer
from ssd.plugins.mock.process import ROUND_VARIABLE
from tests.faults.engine import running_engine

VOCAB, CONTEXT = 49152, 512


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running_engine(load_format="mock", max_model_len=CONTEXT, max_num_seqs=16) as engine:
        yield engine


@pytest.fixture
def client(engine: Engine) -> Iterator[Client]:
    with Client(engine.address) as client:
        yield client


def expected(engine: Engine, prompt: list[int], params: SamplingParams) -> tuple[list[int], str]:
    ends = stop_token_ids(inspect(Path(engine.config.target), weights=False))
    return ScriptedAnswer(prompt, params, VOCAB, CONTEXT, ends).whole()


def test_no_draft_runs_and_no_process_has_loaded_torch(engine: Engine) -> None:
    assert set(engine.pids) == {"target", "frontend"}
    for pid in engine.pids.values():
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()


def test_every_answer_is_the_oracles(engine: Engine, client: Client) -> None:
    prompts = [[n + 1, 3 * n, 77] for n in range(60)]
    asked = [SamplingParams(seed=n, max_tokens=1 + 7 * n % 200, ignore_eos=n % 2 == 0) for n in range(60)]
    asked[7] = SamplingParams(seed=7, max_tokens=50, stop_token_ids=(expected(engine, prompts[7], asked[7])[0][11],))
    completions = client.generate(prompts, asked)
    for prompt, params, completion in zip(prompts, asked, completions, strict=True):
        assert (completion.token_ids, completion.finish_reason) == expected(engine, prompt, params)
    assert (len(completions[7].token_ids), completions[7].finish_reason) == (12, "stop")


def test_rounds_bring_several_tokens_and_are_counted(client: Client) -> None:
    *chunks, last = client.stream([1, 2], SamplingParams(seed=3, max_tokens=200, ignore_eos=True))
    assert last.completion is not None
    metrics = last.completion.metrics
    assert max(len(chunk.token_ids) for chunk in chunks) > 1
    assert sum(metrics.acceptance_histogram) == metrics.rounds > 200 / (LOOKAHEAD + 1) - 1
    assert sum(n * count for n, count in enumerate(metrics.acceptance_histogram)) == metrics.accepted_tokens
    assert metrics.hits + metrics.misses == metrics.rounds - 1
    assert metrics.mode == "ar"


def test_a_round_time_paces_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ROUND_VARIABLE, "20")
    with running_engine(load_format="mock") as engine, Client(engine.address) as client:
        completion = client.generate("hello", SamplingParams(max_tokens=20, ignore_eos=True))
        assert completion.metrics.generation_time_ms >= 20 * completion.metrics.rounds


@pytest.mark.parametrize("text", ["", "soon", "nan", "-1", "1e9"])
def test_a_round_time_that_is_none_is_the_cause_of_the_failure(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ROUND_VARIABLE, text)
    with pytest.raises(UsageError, match=ROUND_VARIABLE):
        Engine(resolve(EngineOptions(load_format="mock"))).start()


@pytest.mark.parametrize("options", [{}, {"mode": "ssd", "draft": ("smollm2-draft",)}])
def test_the_mode_is_plain_decoding_and_no_draft_is_looked_for(options: dict[str, Any]) -> None:
    config = resolve(EngineOptions(load_format="mock", **options))
    assert (config.speculation.mode, config.draft, config.load_format) == ("ar", None, "mock")


def test_the_weights_are_not_needed(tmp_path: Path, engine: Engine) -> None:
    for file in Path(engine.config.target).iterdir():
        if file.suffix != ".safetensors":
            os.symlink(file, tmp_path / file.name)
    with running_engine(load_format="mock", target=str(tmp_path)) as bare, Client(bare.address) as client:
        assert client.generate("hello", SamplingParams(seed=1, max_tokens=2)).usage.completion_tokens == 2
