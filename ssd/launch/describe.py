"""The description of a checkpoint for `ssd models NAME`, from its config and headers alone: no weights, no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ssd.config.engine import WeightFormat
from ssd.errors import UsageError
from ssd.launch import memory
from ssd.launch.options import EngineOptions, chosen
from ssd.models import hub, pairs, registry, sizes
from ssd.models.checkpoint import Checkpoint, has_chat_template, inspect
from ssd.system.version import HOW_TO_INSTALL, installed_transformers


def describe(options: EngineOptions) -> dict[str, Any]:
    """Return the description of `options.target` as JSON: its model, its memory, and if the draft fits it.

    Memory is in bytes, in the types that `ssd launch` takes by default on this machine's CPU, for `max_num_seqs`
    sequences of `max_model_len` tokens, by default of the model's context. Raises UsageError for a checkpoint that
    cannot be read."""
    options = chosen(options)
    model = inspect(hub.resolve(options.target))
    found, count = sizes.ModelSizes.of(model), sizes.weights(model)
    tokens = options.max_model_len or found.context
    types = Counter(info.dtype for info in model.tensors.values())
    draft, why_not = options.draft[0] if options.draft else None, None
    if draft is not None:
        why_not = _why_not(model, inspect(hub.resolve(draft)))
    return {
        "directory": str(model.directory),
        "model_type": str(model.config.get("model_type")),
        "family": _family(model),
        "parameters": count,
        "layers": found.layers,
        "width": found.width,
        "heads": found.heads,
        "key_heads": found.kv_heads,
        "head_dim": found.head_dim,
        "vocabulary": found.vocab_size,
        "tensors": dict(types.most_common()),
        "bits_per_weight": round(8 * model.nbytes / count, 2),
        "disk_bytes": model.nbytes,
        "context": found.context,
        "rope": _rope(model.config),
        "chat_template": has_chat_template(model.directory),
        "dtype": options.dtype,
        "weight_bytes": memory.host_weights(options, memory.Sized(model, options.dtype), [], [WeightFormat()]),
        "sequences": options.max_num_seqs,
        "tokens": tokens,
        "cache_bytes": options.max_num_seqs
        * tokens
        * found.kv_values_per_token
        * memory.cache_item_bytes(options, options.dtype),
        "draft": draft,
        "draft_fits": None if draft is None else why_not is None,
        "draft_why_not": why_not,
    }


def _family(model: Checkpoint) -> str:
    """Return the source of the model's family, or why it is not supported."""
    if pairs.is_head(model):
        return "EAGLE-3 head: a draft only"
    known = registry.families().get(str(model.config.get("model_type")))
    if known is not None:
        return known
    found = installed_transformers()
    return f"fallback, if transformers {found} runs it" if found else f"not supported: {HOW_TO_INSTALL}"


def _rope(config: Mapping[str, Any]) -> str:
    """Return the kind of rope scaling and its factor; for each kind of layer if they differ."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        return "unknown"
    nested = {kind: part for kind, part in scaling.items() if isinstance(part, Mapping)}
    if nested:
        return ", ".join(f"{kind}: {_rope({'rope_parameters': part})}" for kind, part in nested.items())
    kind, factor = str(scaling.get("rope_type", scaling.get("type", "default"))), scaling.get("factor")
    return kind if factor is None else f"{kind}, factor {factor}"


def _why_not(target: Checkpoint, draft: Checkpoint) -> str | None:
    """Return why `draft` cannot draft for `target`; None if it can."""
    try:
        if pairs.is_head(target) or target.config.get(pairs.SHARED) or target.config.get(pairs.DRAFT_VOCAB):
            raise UsageError(f"{target.directory} can only be a draft: part of it is left to a target")
        pairs.check_pair(target, draft)
        pairs.borrowed(draft, target)
        if pairs.is_head(draft):
            pairs.check_head(draft, target)
    except UsageError as error:
        return str(error)
    return None
