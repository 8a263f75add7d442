"""The ids of all modes on a device, of families with keys of two sizes, with sinks and with states."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.gpu.test_engine import check_family
from tests.gpu.test_states import check_modes
from tests.plugins.families.knobs import GEMMA4, GPT_OSS, LFM2


def test_keys_of_two_sizes(device: torch.device, tmp_path: Path) -> None:
    check_family("gemma4_text", GEMMA4 | {"vocab_size_per_layer_input": 300}, device, tmp_path)


def test_sinks_beside_windows(device: torch.device, tmp_path: Path) -> None:
    """In the target's verifications and in the draft's tree."""
    check_family("gpt_oss", GPT_OSS, device, tmp_path)


def test_states(device: torch.device, tmp_path: Path) -> None:
    check_modes("lfm2", LFM2, device, tmp_path)
