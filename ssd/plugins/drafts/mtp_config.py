"""Finds the MTP head in a target's own checkpoint. Reads configs and headers only.

MTP (multi-token prediction; DeepSeek-V3, arXiv 2412.19437) trains a further layer, which predicts the token after the
next one. Read are the names of Qwen3-Next and Qwen3.5: `mtp.pre_fc_norm_embedding`, `mtp.pre_fc_norm_hidden`, `mtp.fc`,
`mtp.layers.0`, `mtp.norm`."""

from __future__ import annotations

from dataclasses import replace

from ssd.errors import UsageError
from ssd.models.checkpoint import Checkpoint
from ssd.models.layer_kinds import FULL
from ssd.system.fields import flag

TARGET_NORM = "target_norm.weight"
"""The head's name of its target's last norm."""
_ARCHITECTURE = "MTPHead"
_OWN = tuple(f"mtp.{name}.weight" for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"))
_LAYER, _EMBEDDING, _NORM = "mtp.layers.0.", "embed_tokens.weight", "norm.weight"
# Families with MTP layers of another layout -> why these are not computed.
_REFUSED = {
    "deepseek_v3": "its layer has latent attention (MLA)",
    "deepseek_v32": "its layer has latent attention (MLA)",
    "glm4_moe": "its layer is of a family that has no file here",
    "glm4_moe_lite": "its layer has latent attention (MLA)",
}


def is_mtp(model: Checkpoint) -> bool:
    return model.config.get("architectures") == [_ARCHITECTURE]


def head_of(target: Checkpoint) -> Checkpoint | None:
    """Return the target's MTP head as a draft, or None. Raises UsageError for one that is not supported."""
    config, kind = target.config, target.config.get("model_type")
    others = [name for name in target.tensors if name.endswith(".eh_proj.weight")]
    if others or (kind in _REFUSED and config.get("num_nextn_predict_layers")):
        cause = _REFUSED.get(str(kind), f"{[*others, 'eh_proj.weight'][0]} is not a name of Qwen's")
        raise UsageError(f"{target.directory}: the MTP head of {kind} is not supported: {cause}")
    names = [name for name in target.tensors if name.startswith("mtp.")]
    if not (names if target.tensors else config.get("mtp_num_hidden_layers")):
        return None
    layers = target.count("mtp_num_hidden_layers", 1)
    if layers > 1 or flag(config, "mtp_use_dedicated_embeddings"):
        asked = f"{layers} layers" if layers > 1 else "an embedding of its own"
        raise UsageError(f"{target.directory}: an MTP head with {asked} is not supported")
    if odd := [name for name in names if name not in _OWN and not name.startswith(_LAYER)]:
        raise UsageError(f"{target.directory}: tensor {odd[0]} is not one of a supported MTP head")
    if missing := [name for name in _OWN if names and name not in names]:
        raise UsageError(f"{target.directory}: the MTP head lacks tensor {missing[0]}")
    one_layer = {"num_hidden_layers": 1, "layer_types": [FULL]}
    found = replace(target, config=config | one_layer | {"architectures": [_ARCHITECTURE]})
    if not names:
        return found
    tables = [name for name in target.tensors if name.endswith(_EMBEDDING)]
    model = tables[0].removesuffix(_EMBEDDING) if tables else "model."
    # A model of one layer: in the names of the family, with the target's embedding and last layer.
    ours = {name: name.replace("mtp.", "model.", 1) if name not in _OWN[:3] else name for name in names}
    ours |= {
        f"{model}{_EMBEDDING}": f"model.{_EMBEDDING}",
        f"{model}{_NORM}": TARGET_NORM,
        "lm_head.weight": "lm_head.weight",
    }
    tensors = {
        own: replace(target.tensors[name], stored=target.tensors[name].stored or name)
        for name, own in ours.items()
        if name in target.tensors
    }
    return replace(found, tensors=tensors, nbytes=sum(tensor.nbytes for tensor in tensors.values()))
