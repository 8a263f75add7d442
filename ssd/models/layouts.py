"""Brings configs of other draft layouts into the fields that the engine reads. Reads no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ssd.errors import UsageError

# Kinds of block drafters, as vLLM's `speculators` and names of architectures have them -> an architecture.
_BLOCKS = {"dspark": "DSparkDraftModel", "dflash": "DFlashDraftModel"}

# Fields that the config of a draft of vLLM's `speculators` has beside the config of its layers.
_BESIDE_THE_LAYERS = (
    *("draft_vocab_size", "target_hidden_size", "quantization_config", "compression_config"),
    *("norm_before_residual", "norm_before_fc", "eagle_aux_hidden_state_layer_ids"),
    *("block_size", "mask_token_id", "sample_from_anchor", "markov_rank", "markov_head_type"),
)


def names_block(config: Mapping[str, Any]) -> bool:
    names = config.get("architectures")
    return isinstance(names, list) and any(kind in str(name).lower() for name in names for kind in _BLOCKS)


def of_speculators(config: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return the config of a draft of vLLM's `speculators`, in the fields of other drafts of its kind.

    Its `auto_map` names a class of the library, not code. Raises UsageError, which names `file`, for a config that is
    not supported."""
    kind, layers = config["speculators_model_type"], config.get("transformer_layer_config")
    if kind not in ("eagle3", *_BLOCKS):
        supported = ", ".join(("eagle3", *_BLOCKS))
        raise UsageError(f"{file}: speculators of type {kind!r} are not supported ({supported} are)")
    if not isinstance(layers, dict):
        raise UsageError(f"{file} has no transformer_layer_config, which says what its layers are")
    beside = {key: config[key] for key in _BESIDE_THE_LAYERS if config.get(key) is not None}
    if kind == "eagle3":
        if type(config.get("norm_before_residual")) is not bool:  # vLLM and the library differ in the default
            raise UsageError(f"{file}: norm_before_residual must be true or false")
        return {**layers, **beside, "architectures": ["LlamaForCausalLMEagle3"]}
    ids = config.get("aux_hidden_state_layer_ids")
    if not isinstance(ids, list) or any(type(layer) is not int for layer in ids):
        raise UsageError(f"{file}: aux_hidden_state_layer_ids must be a list of layers, is {ids!r}")
    # A layer is named by its input here. Files of either kind that lack the field are older than it, which made it
    # possible to predict from the anchor.
    known = {"target_layer_ids": [layer - 1 for layer in ids], "sample_from_anchor": False}
    return {**layers, **known, **beside, "architectures": [_BLOCKS[kind]]}
