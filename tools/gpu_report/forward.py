"""Measures how near verification comes to the memory's speed, with random weights of known shapes."""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from ssd.execution.batch import Row as Tokens
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.models.checkpoint import Checkpoint, inspect
from ssd.models.sizes import ModelSizes, weights
from ssd.target.loading import load
from tools.gpu_report.job import Job, Row, config_folder
from tools.inflate.sizes import LIKE, Like, Sizes

TINY = Like("llama", 1100, Sizes(64, 2, 4, 2, 16, 128))
_LOOKAHEAD = 7


class _Extent(NamedTuple):
    shapes: dict[str, Like]
    batches: tuple[int, ...]
    context: int
    copied: int
    repeats: int


def rows(job: Job) -> Iterator[Row]:
    """Yield the copy bandwidth, then a verification of K = 7 for every shape and batch.

    `of_copy`: the share of that bandwidth at which it reads its weights and keys. `host_ms`: when the call returned."""
    known = {name: LIKE[name] for name in ("llama-1b", "llama-8b", "qwen3-32b")}
    extent = _Extent(known, (1, 4, 16), 1024, 2**32, 20)
    if job.tiny:
        extent = _Extent({"tiny": TINY}, (1, 4), 64, 2**24, 3)
    bandwidth = copy_bandwidth(torch.device(job.device), extent.copied, extent.repeats)
    yield {"name": "copy", "gb_s": bandwidth / 1e9, "bytes": extent.copied}
    for name, like in extent.shapes.items():
        if job.left() > 0:
            yield from _verified(job, name, like, extent, bandwidth)


def copy_bandwidth(device: torch.device, size: int, repeats: int) -> float:
    """Return bytes a second of a copy of `size` bytes on the device, counting both reads and writes."""
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds, _ = timed(lambda: target.copy_(source), device, repeats)
    return 2 * size / seconds


def timed(work: Callable[[], object], device: torch.device, repeats: int) -> tuple[float, float]:
    """Return medians: seconds until the device is done, and until the call returns. The first call is not counted."""
    whole, called = [], []
    for turn in range(repeats + 2):
        _wait(device)
        began = time.perf_counter()
        work()
        returned = time.perf_counter() - began
        _wait(device)
        if turn >= 2:
            called.append(returned)
            whole.append(time.perf_counter() - began)
    return statistics.median(whole), statistics.median(called)


def read_once(checkpoint: Checkpoint) -> int:
    """Return how many numbers every forward reads: all weights, but not an embedding that is not the head."""
    sizes = ModelSizes.of(checkpoint)
    return weights(checkpoint) - (0 if sizes.tied else sizes.vocab_size * sizes.width)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _verified(job: Job, name: str, like: Like, extent: _Extent, bandwidth: float) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        directory = config_folder(Path(folder), name, like.config(2 * extent.context))
        options = EngineOptions(
            target=directory,
            mode="ar",
            load_format="dummy",
            device=job.device,
            dtype="bfloat16",
            max_num_seqs=max(extent.batches),
            max_model_len=2 * extent.context,
            num_speculative_tokens=_LOOKAHEAD,
        )
        config = resolve(options)
        runner, _ = load(config)
        checkpoint = inspect(Path(directory), weights=False)
    sizes = ModelSizes.of(checkpoint)
    pages = -(-extent.context // config.page_size)
    for batch in extent.batches:
        tokens = [
            Tokens(
                list(range(1, 2 + _LOOKAHEAD)),
                extent.context - 1 - _LOOKAHEAD,
                range(pages * index, pages * (index + 1)),
                1 + _LOOKAHEAD,
                index,
            )
            for index in range(batch)
        ]
        seconds, called = timed(partial(runner.forward, tokens), torch.device(job.device), extent.repeats)
        read = 2 * (read_once(checkpoint) + batch * extent.context * sizes.kv_values_per_token)
        yield {
            "name": f"{name}, batch {batch}, K = {_LOOKAHEAD}",
            "ms": 1e3 * seconds,
            "host_ms": 1e3 * called,
            "gb": read / 1e9,
            "gb_s": read / seconds / 1e9,
            "of_copy": read / seconds / bandwidth,
        }
    del runner
    gc.collect()
    if job.device != "cpu":
        torch.cuda.empty_cache()
