"""Time work on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from ssd.execution.graphs import GraphPool
from ssd.execution.runner import device_of


def wait(device: torch.device) -> None:
    """Wait until the device has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(work: Callable[[], object], device: torch.device, repeats: int) -> tuple[float, float]:
    """Return medians: seconds until the device is done, and until the call returns. The first call is not counted."""
    whole, called = [], []
    for turn in range(repeats + 2):
        wait(device)
        began = time.perf_counter()
        work()
        returned = time.perf_counter() - began
        wait(device)
        if turn >= 2:
            called.append(returned)
            whole.append(time.perf_counter() - began)
    return statistics.median(whole), statistics.median(called)


def in_a_row(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the seconds of a call, of `repeats` that follow each other without waiting for the device."""
    work()
    wait(device)
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    wait(device)
    return (time.perf_counter() - began) / repeats


def device_seconds(work: Callable[[], object], repeats: int) -> float:
    """Return the median seconds between events of the device around `work`."""
    found = []
    for turn in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        if turn >= 2:
            found.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(found)


def captured(work: Callable[[], None]) -> Callable[[], None]:
    """Return the replay of `work` as a CUDA graph, captured as the engine captures its own."""
    return GraphPool(device_of("cuda")).capture(work)


def copy_bandwidth(device: torch.device, size: int, repeats: int) -> float:
    """Return bytes a second of a copy of `size` bytes on the device, counting both reads and writes."""
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds, _ = timed(lambda: target.copy_(source), device, repeats)
    return 2 * size / seconds
