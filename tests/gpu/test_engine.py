"""The engine's processes on a device: the ids of all modes, wherever the draft is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ssd import LLM, SamplingParams
from ssd.config.params import Mode, Speculation

PROMPTS = [[1, 2, 3, 4], [200, 7], [9] * 20]
MODES: tuple[Mode, ...] = ("ar", "sd", "ssd")


@pytest.mark.parametrize("draft_device", ["beside", "cpu"])
def test_every_mode_says_the_same(draft_device: str, device: torch.device, pair: tuple[Path, Path]) -> None:
    target, draft = map(str, pair)
    places = {"device": str(device), "draft_device": str(device) if draft_device == "beside" else "cpu"}
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
