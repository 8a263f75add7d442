"""The target's model, or one rank's part of it, ready to run."""

from __future__ import annotations

from pathlib import Path

import torch

from ssd.config import EngineConfig
from ssd.emulation import pacing, synthetic
from ssd.errors import UsageError
from ssd.execution.batch import Row
from ssd.execution.runner import Runner, device_of
from ssd.execution.shards import ShardRunner, Tell
from ssd.execution.static import StaticRunner
from ssd.layers.ranks import SINGLE, Ranks
from ssd.models import registry
from ssd.models.checkpoint import inspect
from ssd.models.interface import Model
from ssd.models.stopping import stop_token_ids
from ssd.models.weights import Progress, unseen


def load(
    config: EngineConfig, ranks: Ranks = SINGLE, tell: Tell | None = None, progress: Progress = unseen
) -> tuple[Runner, frozenset[int]]:
    """The model with its cache, and its end-of-sequence ids; at rank 0 warmed up for the first request, which the
    others are by what they are told meanwhile. `progress` hears how much of the weights has been read."""
    dummy = config.load_format == "dummy"
    checkpoint = inspect(Path(config.target), weights=not dummy)
    dtype, device = getattr(torch, config.dtype), device_of_rank(config, ranks.rank)
    model = registry.load(
        checkpoint,
        dtype,
        device,
        config.max_model_len,
        dummy=dummy,
        int8=config.quantize == "int8",
        ranks=ranks,
        progress=progress,
    )
    if config.synthetic is not None:
        model = synthetic.scripted(model, config.synthetic, "target", ranks)
    sizes = config.num_pages, config.page_size, config.deterministic
    if ranks.size > 1:
        runner: Runner = ShardRunner(model, *sizes, config.attention, ranks=ranks, tell=tell)
    elif device.type == "cuda" and config.emulate is None:
        runner = static_runner(model, config)
    else:
        runner = pacing.runner(
            model, *sizes, None if config.emulate is None else config.emulate.verify, config.attention
        )
    if ranks.rank == 0:
        try:
            runner.warm_up(1 + config.speculation.longest)
        except UsageError as error:
            raise UsageError(f"the target {config.target}: {error}") from error
        if config.features is not None:
            _check_shown(runner, config)
    return runner, stop_token_ids(checkpoint)


def static_runner(model: Model, config: EngineConfig) -> StaticRunner:
    """A runner whose verifications have static shapes."""
    return StaticRunner(
        model,
        config.num_pages,
        config.page_size,
        config.deterministic,
        config.attention,
        most_rows=config.max_num_seqs,
        longest=1 + config.speculation.longest,
        layers=() if config.features is None else config.features.layers,
        capture=not config.enforce_eager,
    )


def _check_shown(runner: Runner, config: EngineConfig) -> None:
    """UsageError where the target's family does not show the hidden states that the draft reads."""
    assert config.features is not None
    rows = [Row([0], 0, range(1))]
    plan = runner.prepare(rows, config.features.layers)
    runner.forward(rows, plan)
    if plan.shown.keys() != set(config.features.layers):
        raise UsageError(f"{config.target} shows no hidden states, which the EAGLE-3 head {config.draft} reads")


def device_of_rank(config: EngineConfig, rank: int) -> torch.device:
    """The device of a rank: the CPU for all of them, or neighbouring GPUs, from the configured one on."""
    device, place = device_of(config.device), rank - config.ranks.start
    return device_of(f"cuda:{(device.index or 0) + place}") if place and device.type == "cuda" else device
