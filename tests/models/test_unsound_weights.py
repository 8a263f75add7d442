"""Weights that are no numbers are found when they are read, by name; no request has to fail for it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ssd import LLM
from ssd.errors import UsageError
from ssd.models import registry
from ssd.models.checkpoint import inspect
from tests.models import tiny

LAST, EMBEDDING = "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"


def spoiled(source: Path, directory: Path, name: str, value: float) -> Path:
    """The checkpoint with one number of one tensor replaced."""
    shutil.copytree(source, directory)
    tensors = load_file(source / "model.safetensors")
    tensors[name][-1, 3] = value
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.llama(tmp_path_factory.mktemp("models") / "good")


SPOILED = [
    (LAST, float("nan"), torch.float32),
    (EMBEDDING, float("-inf"), torch.float32),  # of a token that no warm-up meets
    (LAST, 1e30, torch.float16),  # a number, but not in the type it is used in
    (LAST, float("nan"), torch.bfloat16),
]


@pytest.mark.parametrize(("name", "value", "dtype"), SPOILED)
def test_the_tensor_is_named(good: Path, tmp_path: Path, name: str, value: float, dtype: torch.dtype) -> None:
    check_named(spoiled(good, tmp_path / "bad", name, value), name, dtype)


def check_named(folder: Path, name: str, dtype: torch.dtype) -> None:
    kind = str(dtype).removeprefix("torch.")
    with pytest.raises(UsageError, match=rf"bad: .*tensor {name} holds numbers that are not finite in {kind}"):
        registry.load(inspect(folder), dtype, tiny.CPU, 64)


@pytest.mark.parametrize("role", [pytest.param("target", marks=pytest.mark.thorough), "draft"])
def test_an_engine_with_such_a_model_does_not_start(good: Path, tmp_path: Path, role: str) -> None:
    bad = spoiled(good, tmp_path / "bad", LAST, float("nan"))
    with pytest.raises(UsageError, match=f"bad: tensor {LAST} holds numbers that are not finite"):
        LLM(**{"target": str(good), "draft": str(good), role: str(bad)})


def test_what_the_library_cannot_read_is_one_line(good: Path, tmp_path: Path) -> None:
    """JSON that Python reads, and safetensors does not."""
    bad = shutil.copytree(good, tmp_path / "bad")
    content = (bad / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].replace(b'"format":"pt"', rb'"format":"\ud800"').rstrip()
    (bad / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    with pytest.raises(UsageError, match=r"cannot read .*bad/model\.safetensors") as caught:
        registry.load(inspect(bad), torch.float32, tiny.CPU, 64)
    assert "\n" not in str(caught.value)
