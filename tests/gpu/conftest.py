"""Tests that need a GPU: `python -m pytest tests/gpu`, which fails at once without one. With SSD_TEST_DEVICE=cpu those
that are not about a GPU's kernels run without one, to try the tests."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ssd.execution.graphs import GraphPool, once
from ssd.execution.runner import device_of
from tests.models import tiny

# The kernels themselves, not their interpreter (tests/conftest.py).
os.environ.pop("TRITON_INTERPRET", None)

DEVICE = os.environ.get("SSD_TEST_DEVICE", "cuda")
collect_ignore = ["test_attention.py", "test_static.py"] if DEVICE == "cpu" else []


def pytest_sessionstart() -> None:
    if DEVICE != "cpu" and not torch.cuda.is_available():
        pytest.exit("tests/gpu needs a CUDA device, and torch finds none", returncode=1)


@pytest.fixture
def alone() -> None:
    """A test that takes this has the device to itself (`turn`)."""


@pytest.fixture(autouse=True)
def turn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Share the device with the tests of other processes (`pytest -n`), or wait for them and have it `alone`."""
    folder = tmp_path_factory.getbasetemp().parent
    with open(folder / "queue", "w") as queue, open(folder / "device", "w") as device:
        fcntl.flock(queue, fcntl.LOCK_EX)  # first come, first served: a test that wants it alone waits for few
        fcntl.flock(device, fcntl.LOCK_EX if "alone" in request.fixturenames else fcntl.LOCK_SH)
        fcntl.flock(queue, fcntl.LOCK_UN)
        yield


@pytest.fixture(autouse=True)
def plain_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is captured where torch keeps no memory, as under the memory checker: a graph's memory must stay."""
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        monkeypatch.setattr(GraphPool, "capture", lambda _, function: once(function))


@pytest.fixture(autouse=True)
def exact_products() -> None:
    """Products in 32 bits are of 32 bits, as the references have them."""
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(scope="session")
def device() -> torch.device:
    return device_of(DEVICE)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a draft that agrees with it now and then."""
    folder = tmp_path_factory.mktemp("pair")
    target = tiny.llama(folder / "target", vocab_size=300, max_position_embeddings=1024)
    return target, tiny.noisy_copy(target, folder / "draft", noise=0.01)
