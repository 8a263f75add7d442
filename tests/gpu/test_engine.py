"""The engine's processes on a device: the ids of all modes, wherever the draft is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ssd import LLM, SamplingParams
from ssd.config.params import Mode, Speculation
from tests.models import tiny

PROMPTS = [[1, 2, 3, 4], [200, 7], [9] * 20]
MODES: tuple[Mode, ...] = ("ar", "sd", "ssd")


@pytest.mark.parametrize("place", ["beside", "cpu", "both"])
def test_every_mode_says_the_same(place: str, device: torch.device, pair: tuple[Path, Path]) -> None:
    """With a draft beside the target or on the host, or with one in the target's process and one on the host."""
    target, draft = map(str, pair)
    places = {"device": str(device), "draft_device": "cpu" if place == "cpu" else str(device)}
    places |= {"inline_draft": "off" if place == "beside" else "auto"}
    sizes = {"max_num_seqs": 4, "max_model_len": 256, "gpu_memory_utilization": 0.5}
    with LLM(target, draft, **places, **sizes, draft_dtype="float32", deterministic=True) as llm:
        found = {
            mode: [
                answer.token_ids
                for temperature in (0.0, 0.8)
                for answer in llm.generate(
                    PROMPTS,
                    SamplingParams(
                        temperature,
                        seed=4,
                        max_tokens=48,
                        ignore_eos=True,
                        speculation=Speculation(mode, 4, (3,), "jit"),
                    ),
                )
            ]
            for mode in MODES
        }
    assert found["sd"] == found["ssd"] == found["ar"]


def test_an_engine_without_a_draft_says_the_same_with_and_without_overlap(
    device: torch.device, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"max_num_seqs": 4, "max_model_len": 256, "gpu_memory_utilization": 0.5}
    asked = SamplingParams(0.8, seed=4, max_tokens=48, ignore_eos=True)
    found = []
    for overlap in ("1", "0"):
        monkeypatch.setenv("SSD_OVERLAP", overlap)
        with LLM(str(pair[0]), mode="ar", device=str(device), **sizes) as llm:
            found.append([answer.token_ids for answer in llm.generate(PROMPTS, asked)])
    assert found[0] == found[1]


def check_family(kind: str, knobs: dict[str, Any], device: torch.device, folder: Path) -> None:
    target = tiny.model(kind, folder / "target", **knobs | {"vocab_size": 300, "max_position_embeddings": 512})
    draft = tiny.noisy_copy(target, folder / "draft", noise=0.003)
    room = {"max_num_seqs": 4, "max_model_len": 256, "gpu_memory_utilization": 0.5, "dtype": "float32"}
    room |= {"enforce_eager": "num_experts" in knobs}  # which experts run is read by the host
    places = {"device": str(device), "draft_device": str(device), "draft_dtype": "float32"}
    found = []
    with LLM(str(target), str(draft), **places, **room, deterministic=True) as llm:
        for mode in MODES:
            asked = SamplingParams(0.8, seed=4, max_tokens=48, ignore_eos=True, speculation=Speculation(mode, 4, (3,)))
            found.append([answer.token_ids for answer in llm.generate(PROMPTS, asked)])
    with LLM(str(target), mode="ar", device="cpu", max_num_seqs=4, max_model_len=256) as llm:
        asked = SamplingParams(0.8, seed=4, max_tokens=48, ignore_eos=True)
        found.append([answer.token_ids for answer in llm.generate(PROMPTS, asked)])
    assert all(ids == found[0] for ids in found)


def test_what_was_said_before_is_guessed_beside_overlap(device: torch.device, pair: tuple[Path, Path]) -> None:
    """The second time most tokens come from the memory, in the mode in which verifications overlap."""
    target, draft = map(str, pair)
    sizes = {"max_num_seqs": 4, "max_model_len": 512, "gpu_memory_utilization": 0.5}
    places = {"device": str(device), "draft_device": str(device), "draft_dtype": "float32"}
    with LLM(target, draft, **places, **sizes, deterministic=True) as llm:
        plain = SamplingParams(seed=4, max_tokens=200, ignore_eos=True, speculation=Speculation("ar"), store=False)
        expected = [answer.token_ids for answer in llm.generate(PROMPTS, plain)]
        for mode in ("ngram", "ssd"):
            asked = SamplingParams(seed=4, max_tokens=200, ignore_eos=True, speculation=Speculation(mode, 4))
            answers = [llm.generate(PROMPTS, asked) for _ in range(2)]
            assert all([answer.token_ids for answer in some] == expected for some in answers)
            assert sum(answer.metrics.accepted_by_source["memory"] for answer in answers[1]) > 100
