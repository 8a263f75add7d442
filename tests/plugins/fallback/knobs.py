"""Options of families that have no file, each in a tiny checkpoint."""

from __future__ import annotations

from typing import Any

from tests.models.knobs import FULL, SLIDING, YARN, Knobs

# Keys of 12 numbers beside values of 6, from a latent of 16.
MLA: dict[str, Any] = {
    **{"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6},
    **{"num_key_value_heads": 4, "first_k_dense_replace": 1, "n_shared_experts": 1, "moe_intermediate_size": 24},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    **{"pad_token_id": 0, "eos_token_id": 2},
}
MLA_YARN = YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}

GPT_OSS: dict[str, Any] = {
    **{"head_dim": 8, "num_experts": 6, "num_experts_per_tok": 2, "num_hidden_layers": 3, "sliding_window": 7},
    "layer_types": [SLIDING, FULL, SLIDING],
}

# Families that have no file: transformers' own models over the engine's cache.
FALLBACK: Knobs = {
    "deepseek_v2": ("deepseek_v2", MLA | {"topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("deepseek_v3", MLA),
    "deepseek_v3 yarn, a layer for several tokens": (
        "deepseek_v3",
        MLA | {"rope_parameters": MLA_YARN, "num_nextn_predict_layers": 1},
    ),
    "deepseek_v3 wide values, one projection of queries": (
        "deepseek_v3",
        MLA | {"v_head_dim": 20, "q_lora_rank": None, "rope_interleave": False},
    ),
    "glm4_moe_lite": ("glm4_moe_lite", MLA | {"v_head_dim": 16}),
    "gpt_neox": ("gpt_neox", {}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "sliding_window": 5}),
    "opt": ("opt", {"ffn_dim": 52, "word_embed_proj_dim": 32}),
    "starcoder2": ("starcoder2", {"sliding_window": 5}),
}

# Families that paged attention cannot run: transformers' own models over its own caches, in plain decoding.
WHOLE: Knobs = {
    "bloom": ("bloom", {"n_head": 4, "n_layer": 2, "seq_length": 256}),
    "falcon_h1": (
        "falcon_h1",
        {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8}
        | {"head_dim": 8, "mamba_chunk_size": 4, "pad_token_id": 0},
    ),
    "llama4_text": ("llama4_text", {"pad_token_id": 0, "attention_chunk_size": 8, "num_hidden_layers": 4}),
    "mamba": ("mamba", {"state_size": 8}),
    "mamba2": ("mamba2", {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 8, "chunk_size": 4}),
}
