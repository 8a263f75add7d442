"""Where Triton kernels of ours serve, and how they are launched."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch


@cache
def fuses(device: torch.device) -> bool:
    """Whether what lies between products has kernels of ours on the device: a GPU with Triton."""
    return device.type != "cpu" and find_spec("triton") is not None


def launch_options(device: torch.device) -> dict[str, bool]:
    """Return what a launch of a kernel with `PDL` is given: with `SSD_PDL=1` it starts before the last one ends."""
    return {"PDL": True, "launch_pdl": True} if os.environ.get("SSD_PDL") == "1" and _launches_early(device) else {}


def _launches_early(device: torch.device) -> bool:
    """Return true for a GPU of compute capability 9 or later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def processors_of(device: torch.device) -> int:
    """Return how many multiprocessors a GPU has; 1 for another device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


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
