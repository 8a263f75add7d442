"""The layouts in which drafts are written.

An EAGLE-3 head: SafeAILab's, which SGLang and vLLM read, or vLLM's `speculators`. Weights of few bits:
compressed-tensors'."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ssd.models.checkpoint import Checkpoint
from ssd.models.pairs import DRAFT_VOCAB

EAGLE3 = "eagle3"
"""The name of the kind of a head (`ssd.models.draft_kinds.kinds`)."""
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
LAYER_NAMES = "midlayer", "layers.0"
"""A head's layer in the two layouts."""
Layout = Literal["sglang", "speculators"]
_BESIDE_THE_LAYER = (DRAFT_VOCAB, LAYER_IDS)


def speculators(
    config: dict[str, Any], state: dict[str, Tensor], target: Checkpoint, lookahead: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config and tensors of a head in the layout of `speculators` instead of SafeAILab's.

    `lookahead`: how many tokens a user of the library is to draft."""
    layer = {name: value for name, value in config.items() if name not in (*_BESIDE_THE_LAYER, "architectures")}
    layer["rope_theta"] = config["rope_parameters"]["rope_theta"]  # what transformers 4 reads
    proposal = {"proposal_type": "greedy", "speculative_tokens": lookahead}
    verifier = {"name_or_path": target.directory.name, "architectures": target.config.get("architectures", [])}
    found = {name: config[name] for name in _BESIDE_THE_LAYER} | {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{**proposal, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": verifier,
        },
        "transformer_layer_config": layer,
        "target_hidden_size": None,
        "norm_before_residual": False,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
    }
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in state.items()}
    if "d2t" in state:
        ids = state["d2t"].cpu() + torch.arange(config[DRAFT_VOCAB])
        tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill(0, ids, True)
    return found, tensors


def quantization_config(bits: Literal[4, 8], group: int | None = None) -> dict[str, Any]:
    """Return the `quantization_config` of a checkpoint whose linear layers all have this number of `bits`."""
    form, strategy = {4: ("pack-quantized", "group"), 8: ("int-quantized", "channel")}[bits]
    weights: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy}
    weights |= {"dynamic": False, "group_size": group}
    targets = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    described = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    return {**described, "config_groups": {"group_0": targets}, "ignore": []}
