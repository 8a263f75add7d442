"""Which ways of a GPU are on trial, and how its kernels are launched."""

from __future__ import annotations

import pytest
import torch

from ssd.errors import UsageError
from ssd.kernels.gpu import launch_options, trial

CUDA = torch.device("cuda", 0)


def test_unknown_trials_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not trial("splitk")
    monkeypatch.setenv("SSD_GPU_TRIALS", " pdl,splitk,")
    assert trial("splitk") and trial("pdl")
    monkeypatch.setenv("SSD_GPU_TRIALS", "splitk,fast")
    with pytest.raises(UsageError, match="SSD_GPU_TRIALS has unknown names: fast; there are: splitk, "):
        trial("splitk")


def test_dependent_launches_are_for_newer_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert launch_options(CUDA) == {}
    monkeypatch.setenv("SSD_GPU_TRIALS", "pdl")
    assert launch_options(CUDA) == {"PDL": True, "launch_pdl": True}
    assert launch_options(torch.device("cpu")) == {}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert launch_options(CUDA) == {}
