"""Model families by the `model_type` of a checkpoint's config (contract C6).

A family is a class `Family(config, weights, options)` registered under the entry-point group `ssd.models`. The built-in
ones are entry points of this package, a plugin's are those of its own: there is no second way in. What no family takes
goes to transformers (`ssd.models.fallback`).
"""

from __future__ import annotations

from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from ssd.errors import UsageError
from ssd.models import heads

if TYPE_CHECKING:
    import torch

    from ssd.layers.ranks import Ranks
    from ssd.models.checkpoint import Checkpoint
    from ssd.models.interface import Model
    from ssd.models.weights import Progress

GROUP = "ssd.models"


def families() -> dict[str, str]:
    """Family name -> where it comes from ("built in", or the distribution that adds it)."""
    return {name: _source(entry) for name, entry in sorted(_entries().items())}


def _entries() -> dict[str, EntryPoint]:
    found = sorted(entry_points(group=GROUP), key=lambda entry: _source(entry) == "built in")  # nothing replaces these
    return {entry.name: entry for entry in found}


def _source(entry: EntryPoint) -> str:
    return "built in" if entry.value.startswith("ssd.models.") or entry.dist is None else entry.dist.name


def has_file(checkpoint: Checkpoint) -> bool:
    """Whether a family of ours or of a plugin takes it, and not transformers."""
    return str(checkpoint.config.get("model_type")) in _entries() or heads.is_head(checkpoint)


def load(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    max_position: int,
    *,
    dummy: bool = False,
    int8: bool = False,
    advice: bool = False,
    ranks: Ranks | None = None,
    progress: Progress | None = None,
) -> Model:
    """Build the checkpoint's model. `max_position` bounds the positions it will ever see; `dummy`: with random weights;
    `int8`: with linear layers in 8 bits, in float32 on a CPU only, which see their inputs in 16 bits, or in 8 if the
    model gives `advice`, as a draft; `ranks`: this rank's part of it, whose logits are those of its part of the
    vocabulary; `progress` hears how much has been read. Raises `UsageError`."""
    from ssd.layers.int8 import Int8Linear
    from ssd.layers.linear import Linear
    from ssd.models import fallback, weights
    from ssd.models.split import Share

    kind, known = str(checkpoint.config.get("model_type")), _entries()
    if not has_file(checkpoint):
        if ranks is not None and ranks.size > 1:
            raise UsageError(
                f"{checkpoint.directory}: model family {kind!r} runs through transformers, which is not split over "
                "ranks: use --tensor-parallel-size 1"
            )
        if int8:
            raise UsageError(f"{checkpoint.directory}: int8 needs a family with a file of its own; {kind!r} has none")
        try:
            return fallback.load(checkpoint, dtype, device, max_position, dummy)
        except UsageError as error:
            names = ", ".join(sorted(known)) or "none: is the package installed?"
            raise UsageError(
                f"{checkpoint.directory}: model family {kind!r} is not supported (known: {names}): {error}"
            ) from error
    linear = partial(Int8Linear, coarse=advice) if int8 else Linear
    family = _head_family() if heads.is_head(checkpoint) else known[kind].load()
    try:
        share = Share.of(family, checkpoint.config, ranks)
        if dummy:
            source = weights.dummy(dtype, device, linear, share)
        else:
            source = weights.from_checkpoint(checkpoint, dtype, device, linear, share, progress or weights.unseen)
        model: Model = family(checkpoint.config, source, dtype, device, max_position)
    except UsageError as error:
        raise UsageError(f"{checkpoint.directory}: {error}") from error
    except (AttributeError, LookupError, TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        cause = f"lacks {error}" if isinstance(error, KeyError) else f"does not describe a model: {error}"
        raise UsageError(f"{checkpoint.directory / 'config.json'} {cause}") from error
    return model


def _head_family() -> Any:
    from ssd.models.eagle3 import Eagle3

    return Eagle3
