"""The measuring tool's profile, with an engine that only has figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import compare_modes
import pytest
from click.testing import CliRunner, Result

from ssd import SamplingParams
from ssd.client import Completion
from ssd.ipc.messages import Metrics, Usage
from ssd.profile import read

HITS = {(1,): 60, (2,): 70, (4,): 80}


class _Llm:
    """Answers as `ar` does, with the figures of its mode and fan-out."""

    def __init__(self, *models: object, **options: object) -> None:
        pass

    def __enter__(self) -> _Llm:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def generate(self, prompt: str, params: SamplingParams, **options: Any) -> list[Completion]:
        assert params.speculation is not None
        mode, k = params.speculation.mode, params.speculation.num_speculative_tokens
        hits = HITS.get(params.speculation.fan_out, 60) if mode == "ssd" else 0
        metrics = Metrics(
            mode,
            rounds=100,
            drafted_tokens=0 if mode == "ar" else 100 * k,
            accepted_tokens=0 if mode == "ar" else 150,
            hits=hits,
            misses=100 - hits if mode == "ssd" else 0,
            mean_acceptance_length=2.5,
            mean_acceptance_length_on_hit=2.6,
            mean_acceptance_length_on_miss=2.2,
            tokens_per_second=20.0,
            verify_ms=20.0 if mode == "ar" else 22.0,
            draft_step_ms=3.0,
        )
        return [Completion("", [1], [1], "length", Usage(1, 1), metrics)]


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(compare_modes, "LLM", _Llm)
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in "abc"))
    return file


def compare(*arguments: object) -> Result:
    return CliRunner().invoke(compare_modes.main, [str(argument) for argument in arguments])


def test_a_profile_is_written_from_what_was_measured(prompts: Path, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    result = compare(prompts, "--prompts", 3, "-k", 4, "--temperature", 0, "--profile", file)
    assert result.exit_code == 0, (result.output, result.exception)
    found = read(file)
    assert found.verify.line.at(1) == pytest.approx(0.020) and found.verify.line.at(5) == pytest.approx(0.022)
    assert found.step.line.fixed == pytest.approx(0.003)
    assert (found.misses.c, found.misses.r) == pytest.approx((0.4, 0.5), rel=0.02)
    assert found.source["k"] == "4" and found.source["prompts"] == "3 of prompts.jsonl"


@pytest.mark.parametrize("arguments", [("--temperature", 0), ("-k", 4)], ids=["no K", "two temperatures"])
def test_a_profile_needs_one_k_and_one_temperature(prompts: Path, tmp_path: Path, arguments: tuple[object]) -> None:
    result = compare(prompts, "--profile", tmp_path / "p.json", *arguments)
    assert result.exit_code == 2 and "-k 4 --temperature 0" in result.output


def test_a_profile_that_cannot_be_written_is_named(prompts: Path, tmp_path: Path) -> None:
    result = compare(prompts, "--prompts", 3, "-k", 4, "--temperature", 0, "--profile", tmp_path)
    assert result.exit_code == 1 and f"cannot write {tmp_path}" in result.output
