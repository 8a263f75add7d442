"""Reads the config of a block drafter, and checks that it fits its target. Reads configs and headers only.

Layouts: DSpark's (deepseek-ai/DeepSpec), flat; DFlash's (z-lab), whose fields may lie in `dflash_config`. A layer is
named by its output there: layer i is read after i + 1 layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ssd.errors import UsageError
from ssd.models.checkpoint import Checkpoint
from ssd.system.fields import count, flag

_ARCHITECTURES = ("dspark", "dflash")


class BlockFields(NamedTuple):
    """The fields of a block drafter.

    It reads the target's hidden states after `layers` layers. `block`: rows of a block. `mask`: the id whose embedding
    is that of a mask; None if the checkpoint has a vector for it. `causal`: a row of a block sees no later ones.
    `from_anchor`: the row of the last known token predicts the next one; else that of a mask predicts its own place.
    `rank` of the first-order head; 0 without one."""

    layers: tuple[int, ...]
    block: int
    mask: int | None
    causal: bool
    from_anchor: bool
    rank: int


def is_block(model: Checkpoint) -> bool:
    """Return True for a block drafter, by its config."""
    names = model.config.get("architectures")
    return isinstance(names, list) and any(kind in str(name).lower() for name in names for kind in _ARCHITECTURES)


def fields_of(config: Mapping[str, Any]) -> BlockFields:
    """Return the fields of a config. Raises UsageError for one that is missing or wrong."""
    nested = config.get("dflash_config")
    said = {**config, **(nested if isinstance(nested, Mapping) else {})}
    layers = said.get("target_layer_ids")
    if not isinstance(layers, list) or not layers or any(type(layer) is not int or layer < -1 for layer in layers):
        raise UsageError(f"target_layer_ids must be a list of layers, is {layers!r}")
    mask = said.get("mask_token_id")
    return BlockFields(
        tuple(layer + 1 for layer in layers),
        count(said, "block_size", 16),
        mask if type(mask) is int else None,
        flag(said, "is_causal"),
        flag(said, "sample_from_anchor", any("dspark" in str(name).lower() for name in config["architectures"])),
        count(said, "markov_rank") if said.get("markov_rank") else 0,
    )


def check_block(draft: Checkpoint, target: Checkpoint) -> BlockFields:
    """Return the fields of a block drafter. Raises UsageError if it does not fit its target."""
    try:
        fields = fields_of(draft.config)
    except UsageError as error:
        raise UsageError(f"{draft.directory / 'config.json'}: {error}") from None
    pair = f"block drafter {draft.directory} does not fit target {target.directory}"
    for key in ("hidden_size", "vocab_size"):
        if (ours := target.count(key)) != (theirs := draft.count(key)):
            raise UsageError(f"{pair}: it has {key} {theirs}, the target {ours}")
    if max(fields.layers) > (layers := target.count("num_hidden_layers")):
        raise UsageError(f"{pair}: it reads hidden states after {max(fields.layers)} layers, the target has {layers}")
    return fields
