"""The target's model, or one rank's part of it, ready to run."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ssd.config.engine import EngineConfig
from ssd.config.params import DRAFTED, MAX_LOOKAHEAD, TARGET_REACH
from ssd.errors import UsageError
from ssd.execution.batch import Row
from ssd.execution.runner import Runner, device_of
from ssd.execution.shards import ShardRunner, StaticShardRunner, Tell
from ssd.execution.states import StateRoom
from ssd.execution.static import StaticRunner
from ssd.layers.ranks import SINGLE, Ranks
from ssd.models import registry
from ssd.models.checkpoint import inspect, stop_token_ids
from ssd.models.head import with_list
from ssd.models.interface import Model
from ssd.models.pairs import SHARED, borrowed, check_pair
from ssd.models.weights import Progress, unseen
from ssd.speculation import sampling
from ssd.system import failpoints, registered
from ssd.verifier.inline_draft import InlineRunner

log = logging.getLogger("ssd.target")


def load(
    config: EngineConfig, ranks: Ranks = SINGLE, tell: Tell | None = None, progress: Progress = unseen
) -> tuple[Runner, frozenset[int]]:
    """Load the model with its cache; return its runner and its end-of-sequence ids.

    Rank 0 warms the runner up; other ranks run what rank 0 tells them, or capture the same graphs. Raises UsageError
    for a model that cannot be run as configured."""
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
        activations=config.activations,
        ranks=ranks,
        progress=progress,
    )
    if cause := model.shape.no_rollback:
        _check_plain(config, cause)
    if config.synthetic is not None:
        model = registered.emulation("model")(model, config.synthetic, "target", ranks)
    longest, layers = 1 + config.speculation.longest, () if config.features is None else config.features.layers
    runner = _runner(config, model, ranks, tell, longest, layers)
    if ranks.rank == 0 or isinstance(runner, StaticShardRunner):
        try:
            sampling.warm_up(device)
            runner.warm_up(longest)
        except UsageError as error:
            raise UsageError(f"the target {config.target}: {error}") from error
    if ranks.rank == 0 and layers and not _shows(runner, layers):
        raise UsageError(f"{config.target} shows no hidden states, which the draft {config.draft} reads")
    return runner, stop_token_ids(checkpoint)


def _runner(
    config: EngineConfig, model: Model, ranks: Ranks, tell: Tell | None, longest: int, layers: tuple[int, ...]
) -> Runner:
    sizes = config.num_pages, config.page_size, config.deterministic, config.attention
    cuda, cache_dtype = model.device.type == "cuda", config.kv_cache_dtype
    static: dict[str, Any] = {"most_rows": config.max_num_seqs, "longest": longest, "layers": layers}
    static |= {"capture": not config.enforce_eager, "cache_dtype": cache_dtype}
    if ranks.size > 1 and cuda:
        return StaticShardRunner(model, *sizes, ranks=ranks, tell=tell, **static)
    if ranks.size > 1:
        return ShardRunner(model, *sizes, ranks=ranks, tell=tell, cache_dtype=cache_dtype)
    if (cuda or config.inline_draft) and config.emulate is None and not model.shape.states:
        return StaticRunner(model, *sizes, **static)
    runs = Runner if config.emulate is None else partial(registered.emulation("runner"), config.emulate.verify)
    return runs(model, *sizes, cache_dtype=cache_dtype, state_room=StateRoom(config.max_num_seqs, TARGET_REACH))


def load_draft(config: EngineConfig) -> InlineRunner:
    """Load a draft into the target's process. Raises UsageError for a model that cannot draft for it."""
    assert config.draft is not None
    failpoints.reach("draft.load")
    dummy, longest = config.load_format == "dummy", config.max_model_len + 2 * (MAX_LOOKAHEAD + 1)
    checkpoint = inspect(Path(config.draft), weights=not dummy)
    target = inspect(Path(config.target), weights=SHARED in checkpoint.config and not dummy)
    checkpoint = check_pair(target, checkpoint if dummy else with_list(borrowed(checkpoint, target)))
    dtype = getattr(torch, config.dtype if config.drafts_apart else config.draft_formats[0].dtype)
    model = registry.load(checkpoint, dtype, device_of(config.device), longest, dummy=dummy)
    if cause := model.shape.no_rollback:
        raise UsageError(f"it cannot draft, as it cannot be rolled back: {cause}")
    if config.synthetic is not None:
        model = registered.emulation("model")(model, config.synthetic, "draft")
    runner = InlineRunner(model, config)
    runner.warm_up(1)
    return runner


def _check_plain(config: EngineConfig, cause: str) -> None:
    """Log why a target is served with `ar`; raise UsageError where more was asked for explicitly."""
    if config.kv_cache_dtype != "auto" or config.deterministic:
        option = "--deterministic" if config.deterministic else f"--kv-cache-dtype {config.kv_cache_dtype}"
        raise UsageError(f"{config.target} has no paged keys and values, which {option} needs: {cause}")
    if config.has_draft or config.speculation.mode in DRAFTED:
        raise UsageError(f"{config.target} cannot be rolled back: use --mode ar, without --draft: {cause}")
    if config.speculation.mode != "ar":
        log.warning("%s is served with `ar`, as it cannot be rolled back: %s", config.target, cause)


def _shows(runner: Runner, layers: tuple[int, ...]) -> bool:
    rows = [Row([0], 0, range(1))]
    context = runner.prepare(rows, layers)
    runner.forward(rows, context)
    return context.hidden.keys() == set(layers)


def device_of_rank(config: EngineConfig, rank: int) -> torch.device:
    """Return the device of a rank: the CPU, or neighbouring GPUs from the configured one on.

    Where ranks are on other machines, a process sees only its GPU."""
    device, place = device_of(config.device), rank if rank in config.ranks else 0
    return device_of(f"cuda:{(device.index or 0) + place}") if place and device.type == "cuda" else device
