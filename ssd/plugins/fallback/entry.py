"""Builds models through transformers; see `ssd.models.registry.Fallback`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ssd.errors import UsageError
from ssd.models import registry
from ssd.plugins.fallback.installed import HOW_TO_INSTALL, installed_transformers

if TYPE_CHECKING:
    import torch

    from ssd.layers.ranks import Ranks
    from ssd.models.checkpoint import Checkpoint
    from ssd.models.interface import Model


def build(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    max_position: int,
    dummy: bool,
    int8: bool,
    ranks: Ranks | None,
) -> Model:
    from ssd.plugins.fallback import paged, whole

    kind = str(checkpoint.config.get("model_type"))
    if checkpoint.translation is not None:
        raise UsageError(
            f"{checkpoint.directory}: model family {kind!r} runs through transformers, where a draft needs its "
            "target's vocabulary"
        )
    if ranks is not None and ranks.size > 1:
        raise UsageError(
            f"{checkpoint.directory}: model family {kind!r} runs through transformers, which is not split over "
            "ranks: use --tensor-parallel-size 1"
        )
    if int8:
        raise UsageError(f"{checkpoint.directory}: int8 needs a family with a file of its own; {kind!r} has none")
    try:
        try:
            return paged.load(checkpoint, dtype, device, max_position, dummy)
        except paged.Unpaged as error:
            cause = str(error)  # the error itself may hold a model in memory
        return whole.load(checkpoint, dtype, device, max_position, dummy, cause)
    except UsageError as error:
        raise registry.unsupported(checkpoint, str(error)) from error


def family() -> str:
    found = installed_transformers()
    return f"fallback, if transformers {found} runs it" if found else f"not supported: {HOW_TO_INSTALL}"


def offer() -> str:
    found = installed_transformers()
    return f"fallback: transformers {found}, slower, some only with ar" if found else f"fallback: {HOW_TO_INSTALL}"
