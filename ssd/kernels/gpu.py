"""Where Triton kernels of ours serve."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch


@cache
def fuses(device: torch.device) -> bool:
    """Whether what lies between products has kernels of ours on the device: a GPU with Triton."""
    return device.type != "cpu" and find_spec("triton") is not None
