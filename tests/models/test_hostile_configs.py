"""Configs that lie: each field of each family, set to what no model has, is refused with a message or does no harm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd.errors import UsageError
from ssd.models import registry
from ssd.models.checkpoint import inspect
from tests.models import tiny
from tests.models.knobs import FAMILIES, kinds

LIES: tuple[Any, ...] = (None, 0, -1, 2**40, 1e30, "x", ["x"], {}, True)


@pytest.mark.parametrize("kind", kinds(FAMILIES))
def test_a_field_that_lies_is_told_or_does_no_harm(kind: str, tmp_path: Path) -> None:
    check_lies(tiny.model(kind, tmp_path, **FAMILIES[kind][1]))


def check_lies(directory: Path) -> None:
    """Not by another exception, and not by memory for what the tensors do not have."""
    good = json.loads((directory / "config.json").read_text())
    told = 0
    for field in good:
        if field == "model_type":
            continue
        for lie in LIES:
            tiny.edit(directory, **good | {field: lie})
            try:
                model = registry.load(inspect(directory), torch.float32, tiny.CPU, 64, dummy=False)
            except UsageError as error:
                told += 1
                assert str(directory) in str(error)
            else:
                assert model.shape.vocab_size == good["vocab_size"], (field, lie)
    assert told > 50
