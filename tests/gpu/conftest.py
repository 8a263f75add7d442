"""What needs a GPU: `pytest tests/gpu`. With SSD_TEST_DEVICE=cpu the same runs without one, to try the tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.models import tiny

DEVICE = os.environ.get("SSD_TEST_DEVICE", "cuda")


def pytest_sessionstart() -> None:
    if DEVICE != "cpu" and not torch.cuda.is_available():
        pytest.exit("tests/gpu needs a CUDA device, and torch finds none", returncode=1)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device(DEVICE)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a draft that agrees with it now and then."""
    folder = tmp_path_factory.mktemp("pair")
    target = tiny.llama(folder / "target", vocab_size=300, max_position_embeddings=1024)
    return target, tiny.noisy_copy(target, folder / "draft", noise=0.01)
