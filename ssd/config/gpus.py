"""The GPUs of this machine, read from nvidia-smi without loading a library."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from typing import NamedTuple

from ssd.errors import UsageError

_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,memory.total,memory.free,compute_cap", "--format=csv,noheader,nounits")
_TIMEOUT_S = 30.0
_MIB = 2**20


class Gpu(NamedTuple):
    """The memory of a GPU in bytes, and its compute capability."""

    total: int
    free: int
    capability: tuple[int, int] = (9, 0)


def present() -> list[Gpu] | None:
    """Return the GPUs that a child would see as cuda:0, cuda:1, ...; None: unknown."""
    if shutil.which(_QUERY[0]) is None:
        return None
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return None
    return parsed(done.stdout, os.environ.get("CUDA_VISIBLE_DEVICES")) if done.returncode == 0 else None


def parsed(table: str, visible: str | None) -> list[Gpu] | None:
    """Return the GPUs in nvidia-smi's `table` that CUDA_VISIBLE_DEVICES shows; None for other text."""
    rows = [[cell.strip() for cell in line.split(",")] for line in table.splitlines() if line.strip()]
    try:
        found = {(row[0], row[1]): _gpu(*row[2:]) for row in rows}
    except (IndexError, TypeError, ValueError):
        return None
    return [found[key] for key in _seen(list(found), visible)]


def _gpu(total: str, free: str, capability: str) -> Gpu:
    major, minor = capability.split(".")
    return Gpu(int(total) * _MIB, int(free) * _MIB, (int(major), int(minor)))


def _seen(keys: Sequence[tuple[str, str]], visible: str | None) -> list[tuple[str, str]]:
    """Return the keys in `visible` as CUDA reads it, up to the first name without a GPU."""
    if visible is None:
        return list(keys)
    chosen: list[tuple[str, str]] = []
    for name in filter(None, (part.strip() for part in visible.split(","))):
        match = [key for key in keys if name == key[0] or (not name.isdigit() and key[1].startswith(name))]
        if len(match) != 1:
            break
        chosen += match
    return chosen


def number(device: str) -> int | None:
    """Return the number of a device's GPU; None for the CPU. Raises UsageError for any other device."""
    found = re.fullmatch(r"cpu|cuda(?::(\d{1,4}))?", device)
    if found is None:
        raise UsageError(f"no device {device!r}; give cpu, cuda or cuda:N")
    return None if device == "cpu" else int(found[1] or 0)


def of_ranks(device: str, count: int) -> range:
    """Return the GPUs of `count` ranks: `device` and the ones after it; none on a CPU."""
    first = number(device)
    return range(0) if first is None else range(first, first + count)
