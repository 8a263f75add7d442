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


def head_of_speculators(config: dict[str, Any], file: Path) -> dict[str, Any]:
    """Return the config of an EAGLE-3 head of vLLM's `speculators` in the fields of other heads; others unchanged.

    Raises UsageError, which names `file`, for a config that is not supported."""
    if config.get("speculators_model_type") != "eagle3":
        return config
    layers, beside = _parts(config, file)
    if type(config.get("norm_before_residual")) is not bool:  # vLLM and the library differ in the default
        raise UsageError(f"{file}: norm_before_residual must be true or false")
    return {**layers, **beside, "architectures": ["LlamaForCausalLMEagle3"]}


def block_of_speculators(config: dict[str, Any], file: Path) -> dict[str, Any]:
    """Do `head_of_speculators` for a block drafter."""
    architecture = _BLOCKS.get(str(config.get("speculators_model_type")))
    if architecture is None:
        return config
    (layers, beside), ids = _parts(config, file), config.get("aux_hidden_state_layer_ids")
    if not isinstance(ids, list) or any(type(layer) is not int for layer in ids):
        raise UsageError(f"{file}: aux_hidden_state_layer_ids must be a list of layers, is {ids!r}")
    # A layer is named by its input here. Files of either kind that lack the field are older than it, which made it
    # possible to predict from the anchor.
    known = {"target_layer_ids": [layer - 1 for layer in ids], "sample_from_anchor": False}
    return {**layers, **known, **beside, "architectures": [architecture]}


def _parts(config: Mapping[str, Any], file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of the layers and those beside them; `auto_map` names a class of the library, not code."""
    layers = config.get("transformer_layer_config")
    if not isinstance(layers, dict):
        raise UsageError(f"{file} has no transformer_layer_config, which says what its layers are")
    return layers, {key: config[key] for key in _BESIDE_THE_LAYERS if config.get(key) is not None}
