"""Reads the config of a block drafter, and checks that it fits its target.

Layouts: DSpark's, flat; DFlash's and SpecForge's, with fields in `dflash_config` or beside it; vLLM's `speculators`.
Their layer i is read after i + 1 layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from ssd.config.params import MAX_LOOKAHEAD
from ssd.errors import UsageError
from ssd.models.checkpoint import Checkpoint
from ssd.models.layer_kinds import FULL
from ssd.plugins.drafts.eagle3_config import check_states
from ssd.system.fields import count, flag

BLOCK_ROWS = 2 * (MAX_LOOKAHEAD + 1) + 1
"""Most rows of a block: the last committed token, K of the trunk, K + 1 of a chain, and a mask."""

# Families whose layers a block drafter may have; SpecForge and `speculators` name their own drafts, which have Qwen3's.
_FAMILIES = ("llama", "qwen3", "dspark", "dflash")
# Fields that would change the computation -> their values that do not.
_PLAIN: Mapping[str, tuple[object, ...]] = {
    "model_type": _FAMILIES,
    "hidden_act": ("silu",),
    "attention_mode": ("gqa",),
    "markov_head_type": ("vanilla",),
    "projector_type": ("dspark", "dflash"),
    "use_aux_hidden_state": (True,),
    "is_neox_style": (True,),
    "rope_is_neox_style": (True,),
    "use_swa": (False,),
    "attention_sink_bias": (False,),
    "attention_value_scale": (1.0,),
    "input_embedding_scale": (1.0,),
    "output_multiplier": (1.0,),
    "logit_scale": (1.0,),
    "final_logit_softcapping": (),
}
# Tensors of any block drafter. Those of the confidence head, of `t2d` and of a verifier are not read.
_TENSORS = re.compile(
    r"(fc|hidden_norm)\.weight|norm\.weight|(embed_tokens|lm_head)\.weight|d2t|t2d|confidence_head\.proj\.(weight|bias)"
    r"|verifier_(lm_head|norm)\.weight|(.*\.)?rotary_emb\.inv_freq"
    r"|layers\.(?P<layer>\d{1,6})\.(self_attn\.[qkvo]_proj\.(weight|(?P<attention_bias>bias))|self_attn\.[qk]_norm\.weight"
    r"|(input|post_attention)_layernorm\.weight|mlp\.(gate|up|down)_proj\.(weight|(?P<mlp_bias>bias)))"
    r"|(?P<first>markov_head\.markov_w[12]\.weight)"
)


class BlockFields(NamedTuple):
    """A block drafter that reads the target's hidden states after `layers` layers.

    `mask`: id of a mask's embedding. `causal`: a row of a block sees no later ones. `from_anchor`: the row of the last
    known token predicts the next token; else a mask predicts its own place. `rank`: of the first-order head, or 0."""

    layers: tuple[int, ...]
    block: int
    mask: int
    causal: bool
    from_anchor: bool
    rank: int


def path_cells(fields: BlockFields, longest: int) -> int:
    """Return how many cells the path of a sequence needs, with speculations of at most `longest` tokens.

    If the anchor predicts nothing, each output after a known token is a block that ends in a mask."""
    return 1 if fields.from_anchor else longest + 2


def fields_of(config: Mapping[str, Any]) -> BlockFields:
    """Return the fields of a config. Raises UsageError for one that is missing, wrong or not supported."""
    nested = config.get("dflash_config")
    beside = {name: value for name, value in nested.items() if value is not None} if isinstance(nested, Mapping) else {}
    said = {**config, **beside}
    for name, known in _PLAIN.items():
        if (value := said.get(name)) is not None and value not in known:
            supported = f" ({', '.join(map(str, known))})" if known else ""
            raise UsageError(f"{name} {value!r} is not supported in a block drafter{supported}")
    names = [str(name).lower() for name in config["architectures"]]
    if any("dflash2" in name for name in names):
        raise UsageError(f"architectures {config['architectures']!r} are not supported: a DFlash2 has other layers")
    _refuse_windows(said)
    dspark = said.get("projector_type") == "dspark" or any("dspark" in name for name in names)
    from_anchor = flag(said, "sample_from_anchor", flag(said, "shift_label", dspark))
    block, mask = count(said, "block_size", 16), said.get("mask_token_id")
    if block < 2:
        raise UsageError("block_size must be at least 2")
    rank = 0 if said.get("markov_rank") in (None, 0) else count(said, "markov_rank")
    if type(mask) is not int or not 0 <= mask < count(said, "vocab_size"):
        raise UsageError(f"mask_token_id must be an id of the vocabulary, is {mask!r}")
    causal = flag(said, "is_causal", flag(said, "causal"))
    return BlockFields(_layers(said), block, mask, causal, from_anchor, rank)


def _refuse_windows(said: Mapping[str, Any]) -> None:
    kinds = said.get("layer_types")
    if kinds is None:
        if said.get("sliding_window") is not None and flag(said, "use_sliding_window", True):
            raise UsageError(f"sliding_window {said['sliding_window']!r} is not supported in a block drafter")
    elif not isinstance(kinds, list) or len(kinds) != count(said, "num_hidden_layers"):
        raise UsageError("layer_types must be a list of num_hidden_layers kinds")
    elif odd := [kind for kind in kinds if kind != FULL]:
        raise UsageError(f"layer_types has {odd[0]!r}: only {FULL} is supported in a block drafter")


def _layers(said: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the target layers after which hidden states are read; without a list, DFlash's default."""
    ids = said.get("target_layer_ids")
    if ids is None:
        theirs = count(said, "num_target_layers")
        own = count(said, "num_hidden_layers", most=theirs)
        ids = [theirs // 2] if own == 1 else [round(1 + index * (theirs - 4) / (own - 1)) for index in range(own)]
    if not isinstance(ids, list) or not ids or any(type(layer) is not int for layer in ids):
        raise UsageError(f"target_layer_ids must be a list of layers, is {ids!r}")
    if ids[0] < -1 or any(first >= second for first, second in pairwise(ids)):
        raise UsageError(f"target_layer_ids must be ascending layers, from -1 (the embedding) on, are {ids!r}")
    return tuple(layer + 1 for layer in ids)


def check_block(draft: Checkpoint, target: Checkpoint) -> BlockFields:
    """Raise UsageError if a block drafter does not fit its target; return its fields."""
    file = draft.directory / "config.json"
    try:
        fields = fields_of(draft.config)
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None
    if (width := draft.count("hidden_size")) != (theirs := target.count("hidden_size")):
        raise UsageError(f"{file}: a block drafter's hidden_size must be its target's, {theirs}, is {width}")
    check_states(draft, target, fields.layers)
    _check_tensors(draft, fields)
    return fields


def _check_tensors(draft: Checkpoint, fields: BlockFields) -> None:
    """Raise UsageError for an unknown tensor."""
    layers = draft.count("num_hidden_layers")
    for name in sorted(draft.tensors):
        found = _TENSORS.fullmatch(name)
        parts = found.groupdict() if found else {}
        if (
            found is None
            or int(parts["layer"] or 0) >= layers
            or any(parts[bias] and not flag(draft.config, bias) for bias in ("attention_bias", "mlp_bias"))
            or (parts["first"] and not fields.rank)
        ):
            raise UsageError(
                f"{draft.directory}: tensor {name} is not one of the block drafter that its config.json describes"
            )
