"""Finds a checkpoint's family by its `model_type` (entry points `ssd.models`), and builds the model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib.metadata import EntryPoint
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Protocol

from ssd.errors import UsageError
from ssd.models.draft_kinds import PLAIN, draft_kind, kind_named
from ssd.models.pairs import DRAFT_VOCAB, short_list
from ssd.system.allocator import give_back_freed
from ssd.system.registered import FALLBACKS, entries, load_all

if TYPE_CHECKING:
    import torch

    from ssd.layers.linear import Activations
    from ssd.layers.ranks import Ranks
    from ssd.models.checkpoint import Checkpoint, Translation
    from ssd.models.interface import Model
    from ssd.models.split import Splits
    from ssd.models.weights import Progress, Weights

GROUP = "ssd.models"


class Fallback(Protocol):
    """Builds models of families without a file: an object or module under `ssd.fallbacks`."""

    def build(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        max_position: int,
        dummy: bool,
        int8: bool,
        ranks: Ranks | None,
    ) -> Model:
        """Build the model of a checkpoint, as `load` does. Raises `UsageError`."""

    def family(self) -> str:
        """Return the words of `ssd models NAME` on the family of a checkpoint that no family takes."""

    def offer(self) -> str:
        """Return what `ssd models` says of these families."""


def fallback() -> Fallback | None:
    return next(iter(load_all(FALLBACKS).values()), None)


def unsupported(checkpoint: Checkpoint, cause: str) -> UsageError:
    kind, names = str(checkpoint.config.get("model_type")), ", ".join(sorted(_entries()))
    known = names or "none: is the package installed?"
    return UsageError(f"{checkpoint.directory}: model family {kind!r} is not supported (known: {known}): {cause}")


def families() -> dict[str, str]:
    """Return each family's name and its origin ("built in", or a distribution)."""
    return {name: _source(entry) for name, entry in sorted(_entries().items())}


def _entries() -> dict[str, EntryPoint]:
    # The built-in ones come last: plugins cannot replace them.
    found = sorted(entries(GROUP), key=lambda entry: _source(entry) == "built in")
    return {entry.name: entry for entry in found}


def _source(entry: EntryPoint) -> str:
    return "built in" if entry.value.startswith("ssd.") or entry.dist is None else entry.dist.name


def has_file(checkpoint: Checkpoint) -> bool:
    """Return True if a family, ours or a plugin's, takes the checkpoint; else a fallback must."""
    return str(checkpoint.config.get("model_type")) in _entries() or draft_kind(checkpoint) is not PLAIN


def own_draft(target: Checkpoint, name: str) -> Checkpoint:
    """Return the draft in a target's checkpoint, of the kind `name`. Raises UsageError without one."""
    kind = kind_named(name)
    found = kind.of_target(target)
    if found is None:
        raise UsageError(f"{target.directory} has no {kind.offer[0]}: give another --draft")
    if not has_file(target):
        raise UsageError(
            f"{target.directory}: {kind.name} needs a family with a file; {target.config['model_type']!r} has none"
        )
    return found


def load(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    max_position: int,
    *,
    dummy: bool = False,
    int8: bool = False,
    light: bool = False,
    activations: Activations = "float32",
    ranks: Ranks | None = None,
    progress: Progress | None = None,
) -> Model:
    """Build the model of a checkpoint. Raises `UsageError`.

    dummy: random weights.
    int8: linear layers in 8 bits, on a CPU in float32 only.
    light: with `int8` in 4 bits, and a head of the ids in `ssd.models.pairs.short_list`.
    activations: inputs of linear layers whose weights have few bits; with `int8` at most int16.
    ranks: build this rank's part, with logits of its part of the vocabulary.
    progress: called with the bytes read so far and in all."""
    from ssd.layers.int8 import Int8Linear
    from ssd.layers.linear import PARTS, Linear
    from ssd.models import weights
    from ssd.models.split import Share

    if not has_file(checkpoint):
        if (other := fallback()) is None:
            raise unsupported(checkpoint, f"nothing that is installed runs others (entry points `{FALLBACKS}`)")
        return other.build(checkpoint, dtype, device, max_position, dummy, int8, ranks)
    parts = PARTS[activations]
    linear = partial(Int8Linear, parts=parts or 2, light=light) if int8 else partial(Linear, parts=parts)
    kind = draft_kind(checkpoint)
    family: Any = None
    if kind is PLAIN or kind.in_family:
        family = _entries()[str(checkpoint.config.get("model_type"))].load()
    if kind is not PLAIN:
        own = resolve_name(kind.model)
        family = partial(own, family) if kind.in_family else own
    try:
        share = Share.of(family, checkpoint.config, ranks)
        if dummy:
            source = weights.dummy(dtype, device, linear, share)
        else:
            source = weights.from_checkpoint(checkpoint, dtype, device, linear, share, progress or weights.unseen)
        if checkpoint.translation is not None:
            source = _translated(checkpoint.translation, source, family)
        elif light and (ids := short_list(checkpoint)):
            checkpoint = replace(checkpoint, config=checkpoint.config | {DRAFT_VOCAB: len(ids)})
            source = source.predicting(ids)
        model: Model = family(checkpoint.config, source, dtype, device, max_position)
        if checkpoint.translation is not None:
            model.head.table = None  # type: ignore[attr-defined]  # its rows of ids that are not shared are other tokens'
    except UsageError as error:
        raise UsageError(f"{checkpoint.directory}: {error}") from error
    except (AttributeError, LookupError, TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        cause = f"lacks {error}" if isinstance(error, KeyError) else f"does not describe a model: {error}"
        raise UsageError(f"{checkpoint.directory / 'config.json'} {cause}") from error
    give_back_freed()
    return model


def _translated(ids: Translation, source: Weights, family: Any) -> Weights:
    splits: Splits = vars(family).get("splits", {})
    layers = {name for name, split in splits.items() if split.vocabulary}
    if not layers:
        raise UsageError(f"{family.__name__} has no table of splits: as a draft it needs its target's vocabulary")
    return source.translated(ids, layers)
