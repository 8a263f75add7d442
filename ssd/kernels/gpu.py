"""Tells which devices our Triton kernels serve, and how to launch them."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch


@cache
def fuses(device: torch.device) -> bool:
    """Return True if our kernels do the work between products on the device: a GPU with Triton."""
    return device.type != "cpu" and find_spec("triton") is not None


def launch_options(device: torch.device) -> dict[str, bool]:
    """Return options for launching a kernel with `PDL`.

    With `SSD_PDL=1` the kernel starts before the last one ends, on GPUs that can."""
    return {"PDL": True, "launch_pdl": True} if os.environ.get("SSD_PDL") == "1" and _launches_early(device) else {}


def _launches_early(device: torch.device) -> bool:
    """Return True for a GPU of compute capability 9 or later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def processors_of(device: torch.device) -> int:
    """Return how many multiprocessors a GPU has; 1 for another device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


class RoundLayout(NamedTuple):
    """Offsets of fields in the words of a row, and in those of a board's entry.

    A row has the key and the base, then numbers, draft tokens, and the halves of its noise keys."""

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
