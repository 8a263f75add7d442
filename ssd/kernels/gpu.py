"""Where Triton kernels of ours serve."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch


@cache
def fuses(device: torch.device) -> bool:
    """Whether what lies between products has kernels of ours on the device: a GPU with Triton."""
    return device.type != "cpu" and find_spec("triton") is not None


class RoundLayout(NamedTuple):
    """Where things lie in the words of a row: the key and the base, numbers, draft tokens, halves of the noise's keys;
    and in those of a board's entry."""

    numbers: int
    ids: int
    low: int
    high: int
    most: int
    """Draft tokens of a row."""
    key: int
    depth: int
    checksum: int
    entry_ids: int
    lookahead: int
    salt: int
