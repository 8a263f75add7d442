"""Every option of every family, each in a tiny checkpoint."""

from __future__ import annotations

from typing import Any

THETA = {"rope_theta": 10000.0}
DEFAULT = {"rope_type": "default"}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
YARN = THETA | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}
# Long for the texts of the tests: one of a single token is the same either way.
LONGROPE = THETA | {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": 2,
}
LINEAR = THETA | {"rope_type": "linear", "factor": 4.0}
FULL, SLIDING = "full_attention", "sliding_attention"

QWEN3 = {"head_dim": 8}
MOE = QWEN3 | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": True}
DELTA = "linear_attention"
QWEN3_5 = {
    "std": 0.1,  # of the weights: the norm behind a state makes small differences large
    "head_dim": 16,
    "num_hidden_layers": 4,
    "layer_types": [DELTA, FULL, DELTA, DELTA],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": DEFAULT | THETA | {"partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]},
}
QWEN3_5_MOE = (
    QWEN3_5
    | {"shared_expert_intermediate_size": 28}
    | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
)

Knobs = dict[str, tuple[str, dict[str, Any]]]
"""Name -> model_type and fields of the config."""


def kinds(families: Knobs) -> list[str]:
    """The `model_type`s of families, sorted."""
    return sorted({kind for kind, _ in families.values()})


FAMILIES: Knobs = {
    "llama": ("llama", {}),
    "llama without GQA": ("llama", {"num_key_value_heads": 4}),
    "llama with one key head": ("llama", {"num_key_value_heads": 1}),
    "llama with three queries a key": ("llama", {"num_attention_heads": 6, "hidden_size": 48}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama attention bias": ("llama", {"attention_bias": True}),
    "llama feed-forward bias": ("llama", {"mlp_bias": True}),
    "llama head_dim": ("llama", {"head_dim": 20}),
    "llama eps": ("llama", {"rms_norm_eps": 0.1}),
    "llama vocabulary": ("llama", {"vocab_size": 257}),
    "llama theta": ("llama", {"rope_parameters": DEFAULT | {"rope_theta": 100.0}}),
    "llama linear rope": ("llama", {"rope_parameters": LINEAR}),
    "llama llama3 rope": ("llama", {"rope_parameters": THETA | LLAMA3}),
    "llama yarn rope": ("llama", {"rope_parameters": YARN}),
    "llama dynamic rope": ("llama", {"rope_parameters": THETA | {"rope_type": "dynamic", "factor": 4.0}}),
    "llama longrope": ("llama", {"rope_parameters": LONGROPE}),
    "llama longrope, short": ("llama", {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 256}}),
    "llama sharded": ("llama", {"shards": True, "num_hidden_layers": 3}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral head_dim": ("mistral", {"sliding_window": None, "head_dim": 20}),
    "mistral window": ("mistral", {"sliding_window": 6}),
    "mistral window of one token": ("mistral", {"sliding_window": 1}),
    "mistral window wider than the text": ("mistral", {"sliding_window": 200}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied, theta, eps": (
        "qwen2",
        {"tie_word_embeddings": True, "rms_norm_eps": 0.1, "rope_parameters": DEFAULT | {"rope_theta": 100.0}},
    ),
    "qwen2 window above a layer": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen3": ("qwen3", QWEN3),
    "qwen3 tied": ("qwen3", QWEN3 | {"tie_word_embeddings": True}),
    "qwen3 head_dim": ("qwen3", {"head_dim": 20, "num_key_value_heads": 4}),
    "qwen3 bias, eps, theta": (
        "qwen3",
        QWEN3 | {"attention_bias": True, "rms_norm_eps": 0.1, "rope_parameters": DEFAULT | {"rope_theta": 1000000.0}},
    ),
    "qwen3 linear rope": ("qwen3", QWEN3 | {"rope_parameters": LINEAR}),
    "qwen3 window that no layer uses": ("qwen3", QWEN3 | {"use_sliding_window": True, "sliding_window": 4}),
    "qwen3 window": (
        "qwen3",
        QWEN3 | {"use_sliding_window": True, "sliding_window": 7, "layer_types": [SLIDING, FULL]},
    ),
    "qwen3_moe": ("qwen3_moe", MOE),
    "qwen3_moe shares as they are": ("qwen3_moe", MOE | {"norm_topk_prob": False, "num_experts_per_tok": 3}),
    "qwen3_moe tied, bias": ("qwen3_moe", MOE | {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3_moe every second layer": ("qwen3_moe", MOE | {"decoder_sparse_step": 2}),
    "qwen3_moe without experts in a layer": ("qwen3_moe", MOE | {"mlp_only_layers": [1]}),
}

# Families with layers that have a state.
RECURRENT: Knobs = {
    "qwen3_5_text": ("qwen3_5_text", QWEN3_5),
    "qwen3_5_text tied, bias, eps": (
        "qwen3_5_text",
        QWEN3_5 | {"tie_word_embeddings": True, "attention_bias": True, "rms_norm_eps": 0.1},
    ),
    "qwen3_5_text every second layer": ("qwen3_5_text", QWEN3_5 | {"layer_types": None, "full_attention_interval": 2}),
    "qwen3_5_text yarn, no shared keys": (
        "qwen3_5_text",
        QWEN3_5 | {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}, "linear_num_key_heads": 4},
    ),
    "qwen3_5_text window": ("qwen3_5_text", QWEN3_5 | {"linear_conv_kernel_dim": 2}),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", QWEN3_5_MOE),
    "qwen3_next": ("qwen3_next", QWEN3_5_MOE),
    "qwen3_next shares as they are": ("qwen3_next", QWEN3_5_MOE | {"norm_topk_prob": False}),
    "qwen3_next every second layer, some dense": (
        "qwen3_next",
        QWEN3_5_MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [3], "rope_parameters": None},
    ),
}
