from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ssd.errors import UsageError
from ssd.execution.batch import Row
from ssd.execution.runner import Runner, device_of
from ssd.models import registry
from ssd.models.checkpoint import inspect
from tests.models import tiny


@pytest.mark.usefixtures("either_way")
def test_a_context_may_be_shorter_than_a_batch_that_warms_up(tmp_path: Path) -> None:
    model = registry.load(inspect(tiny.llama(tmp_path)), torch.float32, tiny.CPU, 2)
    runner = Runner(model, 1, 16)
    runner.warm_up(9)
    assert runner.forward([Row([1, 2], 0, [0], 2)]).shape == (2, tiny.SIZES["vocab_size"])


def test_devices_are_those_of_this_machine_and_have_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_of("cpu") == tiny.CPU
    with pytest.raises(UsageError, match="unknown device 'gpu'"):
        device_of("gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="device cuda:1: torch finds no GPU"):
        device_of("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [device_of(name).index for name in ("cuda", "cuda:0", "cuda:3")] == [0, 0, 3]
