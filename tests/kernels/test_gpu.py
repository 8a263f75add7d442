"""Kernels of a GPU are launched with the options that it takes."""

from __future__ import annotations

import pytest
import torch

from ssd.kernels.gpu import launch_options

CUDA = torch.device("cuda", 0)


def test_dependent_launches_are_for_newer_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert launch_options(CUDA) == {}
    monkeypatch.setenv("SSD_PDL", "1")
    assert launch_options(CUDA) == {"PDL": True, "launch_pdl": True}
    assert launch_options(torch.device("cpu")) == {}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert launch_options(CUDA) == {}
