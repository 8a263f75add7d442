"""Measure how near verification comes to the memory's speed, with random weights of known shapes."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ssd.execution.batch import Row as Tokens
from ssd.execution.runner import Runner, device_of
from ssd.execution.static import StaticRunner
from ssd.kernels.groups import Grouped, Groups
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.layers.linear import Linear
from ssd.models import registry, weights
from ssd.models.checkpoint import Checkpoint, inspect
from ssd.models.sizes import ModelSizes
from ssd.models.sizes import weights as weights_of
from ssd.system.registered import entries
from ssd.verifier.loading import load
from tools.gpu_report.gemm import BITS, GROUP
from tools.gpu_report.job import TINY, Job, Row, config_folder
from tools.gpu_report.timing import copy_bandwidth, in_a_row, timed
from tools.inflate.sizes import LIKE, Like

_LOOKAHEAD = 7


def rows(
    job: Job,
    *,
    models: Sequence[str] = ("llama-1b", "llama-8b", "qwen3-32b"),
    kinds: Sequence[str] = ("bf16",),
    batches: Sequence[int] = (1, 4, 16),
    contexts: Sequence[int] = (1024,),
    cache: str = "auto",
) -> Iterator[Row]:
    """Yield the copy bandwidth, then a verification of K = 7 for every model, kind of weights, context and batch.

    `of_copy`: the share of that bandwidth at which it reads its weights and keys. `host_ms`: when the call returned.
    `ms_in_a_row`: for one of several that are launched without waiting, as with overlap scheduling.
    `cache`: the KV cache's type."""
    likes, copied, repeats = {name: LIKE[name] for name in models}, 2**32, 20
    if job.tiny:
        likes, batches, contexts, copied, repeats = {"tiny": TINY}, (1, 4), (64,), 2**24, 3
    device = torch.device(job.device)
    bandwidth = copy_bandwidth(device, copied, repeats)
    yield {"name": "copy", "gb_s": bandwidth / 1e9, "bytes": copied}
    for name, like in likes.items():
        for kind in kinds:
            if job.left() <= 0:
                return
            runner, checkpoint, page = _runner(job, like, kind, max(batches), max(contexts), cache)
            sizes, bits = ModelSizes.of(checkpoint), BITS[kind]
            for context in contexts:
                for batch in batches:
                    tokens = _batch(batch, context, page)
                    seconds, called = timed(partial(runner.forward, tokens), device, repeats)
                    stored = 1 if cache == "fp8" else 2
                    keys = stored * batch * context * sizes.kv_values_per_token
                    read = _read_bytes(checkpoint, bits) + keys
                    yield {
                        "name": f"{name}, {kind}, context {context}, batch {batch}, K = {_LOOKAHEAD}",
                        "ms": 1e3 * seconds,
                        "ms_in_a_row": 1e3 * in_a_row(partial(runner.forward, tokens), device, repeats),
                        "host_ms": 1e3 * called,
                        "gb": read / 1e9,
                        "gb_s": read / seconds / 1e9,
                        "of_copy": read / seconds / bandwidth,
                    }
            del runner
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


def read_once(checkpoint: Checkpoint) -> int:
    """Return how many numbers every forward reads: all weights, but not an embedding that is not the head."""
    sizes = ModelSizes.of(checkpoint)
    return weights_of(checkpoint) - (0 if sizes.tied else sizes.vocab_size * sizes.width)


def _read_bytes(checkpoint: Checkpoint, bits: int) -> float:
    """Return the bytes of the weights that a forward reads; the head has 16 bits."""
    sizes = ModelSizes.of(checkpoint)
    head = sizes.vocab_size * sizes.width
    return 2 * head + (read_once(checkpoint) - head) * bits / 8


def _batch(batch: int, context: int, page: int) -> list[Tokens]:
    pages = -(-context // page)
    begun, outputs = context - 1 - _LOOKAHEAD, 1 + _LOOKAHEAD
    ids = list(range(1, 1 + outputs))
    return [Tokens(ids, begun, range(pages * n, pages * (n + 1)), outputs, n) for n in range(batch)]


def _runner(job: Job, like: Like, kind: str, batch: int, context: int, cache: str) -> tuple[Runner, Checkpoint, int]:
    """Return a runner as the target has it, of random weights; and its page size."""
    with tempfile.TemporaryDirectory() as folder:
        directory = config_folder(Path(folder), "model", like.config(2 * context))
        checkpoint = inspect(Path(directory), weights=False)
        options: dict[str, Any] = {"kv_cache_dtype": cache} if cache != "auto" else {}
        config = resolve(
            EngineOptions(
                target=directory,
                mode="ar",
                load_format="dummy",
                device=job.device,
                dtype="bfloat16",
                max_num_seqs=batch,
                max_model_len=2 * context,
                num_speculative_tokens=_LOOKAHEAD,
                **options,
            )
        )
        if kind == "bf16":
            return load(config)[0], checkpoint, config.page_size
    device, dtype = device_of(job.device), torch.bfloat16
    (family,) = [entry.load() for entry in entries(registry.GROUP) if entry.name == like.model_type]
    source = weights.dummy(dtype, device, partial(_packed, kind))
    runner = StaticRunner(
        family(checkpoint.config, source, dtype, device, config.max_model_len),
        -(-batch * context // config.page_size),
        config.page_size,
        most_rows=batch,
        longest=1 + _LOOKAHEAD,
        cache_dtype="fp8" if cache == "fp8" else "auto",
    )
    runner.warm_up(1 + _LOOKAHEAD)
    return runner, checkpoint, config.page_size


def _packed(kind: str, weight: Tensor | Grouped, bias: Tensor | None) -> Linear:
    """Return a linear layer with the weight rounded to FP8 numbers or to 4 bits, in groups."""
    assert isinstance(weight, Tensor)
    grouped = weight.float().unflatten(1, (-1, GROUP))
    largest = grouped.abs().amax(-1)
    steps = largest / (448.0 if kind == "fp8" else 7.0)
    scaled = (grouped / steps[..., None]).flatten(1)
    if kind == "fp8":
        codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
        return Linear(Groups(codes, steps, None, e4m3=True, dtype=weight.dtype), bias)
    codes = (scaled.round() + 8).to(torch.uint8)
    return Linear(Groups(codes, steps, None, zero=8, dtype=weight.dtype), bias)
