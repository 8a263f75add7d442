from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ssd.execution.batch import Row
from ssd.execution.runner import Runner
from ssd.models import registry
from ssd.models.checkpoint import inspect
from tests.models import tiny


@pytest.mark.usefixtures("either_way")
def test_a_context_may_be_shorter_than_a_batch_that_warms_up(tmp_path: Path) -> None:
    model = registry.load(inspect(tiny.llama(tmp_path)), torch.float32, tiny.CPU, 2)
    runner = Runner(model, 1, 16)
    runner.warm_up(9)
    assert runner.forward([Row([1, 2], 0, [0], 2)]).shape == (2, tiny.SIZES["vocab_size"])
