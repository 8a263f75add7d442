"""Every option of the plugin's families, each in a tiny checkpoint."""

from __future__ import annotations

from tests.models.knobs import DEFAULT, FULL, LINEAR, LONGROPE, SLIDING, THETA, YARN, Knobs

GPT_OSS = {
    "head_dim": 8,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "sliding_window": 7,
    "layer_types": [SLIDING, FULL, SLIDING],
}
PHI3 = {"sliding_window": None, "pad_token_id": 0}
PHI3_LONG = PHI3 | {"rope_parameters": LONGROPE, "original_max_position_embeddings": 2}
GRANITE = {"embedding_multiplier": 4.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5, "logits_scaling": 3.0}
OLMO3 = {"sliding_window": 5, "layer_types": [SLIDING, FULL]}
GEMMA3 = {
    "head_dim": 8,
    "query_pre_attn_scalar": 12,
    "sliding_window": 9,
    "num_hidden_layers": 3,
    "layer_types": [SLIDING, FULL, SLIDING],
    "tie_word_embeddings": True,
}
GEMMA2 = GEMMA3 | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
GEMMA4 = {
    "head_dim": 8,
    "global_head_dim": 12,
    "sliding_window": 9,
    "num_hidden_layers": 6,
    "layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING, FULL],
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 10,
    "vocab_size_per_layer_input": 131,
    "tie_word_embeddings": True,
}
# As the larger models are: no inputs of layers, few wide heads whose keys are their values, experts.
GEMMA4_MOE = GEMMA4 | {
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "num_hidden_layers": 3,
    "layer_types": [SLIDING, SLIDING, FULL],
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 20,
}
LFM2 = {
    "norm_eps": 1e-3,
    "intermediate_size": 100,
    "block_multiple_of": 12,
    "num_hidden_layers": 3,
    "layer_types": ["conv", FULL, "conv"],
    "tie_word_embeddings": True,
}
FAMILIES: Knobs = {
    "gpt2": ("gpt2", {}),
    "gpt2 untied": ("gpt2", {"tie_word_embeddings": False}),
    "gpt2 inner size, eps": ("gpt2", {"n_inner": 52, "layer_norm_epsilon": 0.1}),
    "gpt2 exact gelu": ("gpt2", {"activation_function": "gelu"}),
    "gpt2 unscaled": ("gpt2", {"scale_attn_weights": False}),
    "gpt2 scaled by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2 upcast": ("gpt2", {"reorder_and_upcast_attn": True}),
    "gemma3_text": ("gemma3_text", GEMMA3),
    "gemma3_text pattern": ("gemma3_text", GEMMA3 | {"layer_types": None, "sliding_window_pattern": 2}),
    "gemma3_text untied, bias, eps": (
        "gemma3_text",
        GEMMA3 | {"tie_word_embeddings": False, "attention_bias": True, "rms_norm_eps": 0.1},
    ),
    "gemma3_text soft cap": ("gemma3_text", GEMMA3 | {"final_logit_softcapping": 3.0}),
    "gemma3_text two bases": (
        "gemma3_text",
        GEMMA3 | {"rope_parameters": {FULL: LINEAR | {"rope_theta": 500.0}, SLIDING: DEFAULT | {"rope_theta": 50.0}}},
    ),
    "gemma3_text yarn": ("gemma3_text", GEMMA3 | {"rope_parameters": {FULL: YARN, SLIDING: DEFAULT | THETA}}),
    "gemma2": ("gemma2", GEMMA2),
    "gemma2 uncapped, untied, bias": (
        "gemma2",
        GEMMA2
        | {"attn_logit_softcapping": None, "final_logit_softcapping": None}
        | {"tie_word_embeddings": False, "attention_bias": True},
    ),
    "gemma2 every second layer, linear rope": ("gemma2", GEMMA2 | {"layer_types": None, "rope_parameters": LINEAR}),
    "gemma4_text": ("gemma4_text", GEMMA4),
    "gemma4_text double width, soft cap, untied, eps": (
        "gemma4_text",
        GEMMA4
        | {"use_double_wide_mlp": True, "final_logit_softcapping": 3.0}
        | {"tie_word_embeddings": False, "rms_norm_eps": 0.1},
    ),
    "gemma4_text of one size": ("gemma4_text", GEMMA4 | {"global_head_dim": 8, "num_kv_shared_layers": 0}),
    "gemma4_text pattern, proportional": (
        "gemma4_text",
        GEMMA4
        | {"layer_types": None, "num_hidden_layers": 8, "num_kv_shared_layers": 2, "std": 0.1}
        | {
            "rope_parameters": {
                FULL: {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.5, "factor": 4.0},
                SLIDING: DEFAULT | {"rope_theta": 50.0},
            }
        },
    ),
    "gemma4_text keys as values": (
        "gemma4_text",
        GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "std": 0.1},
    ),
    "gemma4_text experts": ("gemma4_text", GEMMA4_MOE),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "gpt_oss unbiased, tied, eps, plain rope": (
        "gpt_oss",
        GPT_OSS
        | {"attention_bias": False, "tie_word_embeddings": True, "rms_norm_eps": 0.1}
        | {"rope_parameters": DEFAULT | THETA},
    ),
    "gpt_oss clamped": (
        "gpt_oss",
        GPT_OSS | {"swiglu_limit": 0.3, "swiglu_alpha": 2.5, "num_experts_per_tok": 3, "layer_types": None},
    ),
    "gpt_oss yarn": ("gpt_oss", GPT_OSS | {"rope_parameters": YARN | {"truncate": False}}),
    "phi3": ("phi3", PHI3),
    "phi3 window, tied": ("phi3", PHI3 | {"sliding_window": 5, "tie_word_embeddings": True}),
    "phi3 without GQA": ("phi3", PHI3 | {"num_key_value_heads": 4}),
    "phi3 longrope": ("phi3", PHI3_LONG),
    "phi3 partly rotated": ("phi3", PHI3 | {"rope_parameters": DEFAULT | THETA | {"partial_rotary_factor": 0.75}}),
    "granite": ("granite", GRANITE),
    "granite tied, bias, eps": (
        "granite",
        GRANITE | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 0.1},
    ),
    "granite yarn": ("granite", GRANITE | {"rope_parameters": YARN}),
    "olmo2": ("olmo2", {}),
    "olmo2 with one key head": ("olmo2", {"num_key_value_heads": 1}),
    "olmo2 tied, bias, eps": ("olmo2", {"tie_word_embeddings": True, "attention_bias": True, "rms_norm_eps": 0.1}),
    "olmo3": ("olmo3", OLMO3),
    "olmo3 yarn": ("olmo3", OLMO3 | {"rope_parameters": {FULL: YARN, SLIDING: DEFAULT | THETA}}),
    "olmo3 every fourth layer": ("olmo3", {"sliding_window": 5, "num_hidden_layers": 4}),
}
RECURRENT: Knobs = {
    "lfm2": ("lfm2", LFM2),
    "lfm2 untied, bias, window": ("lfm2", LFM2 | {"tie_word_embeddings": False, "conv_bias": True, "conv_L_cache": 5}),
    "lfm2 exact width": ("lfm2", LFM2 | {"block_auto_adjust_ff_dim": False, "intermediate_size": 52}),
    "lfm2 multiplier, all but one by number": (
        "lfm2",
        LFM2 | {"block_ffn_dim_multiplier": 1.4, "layer_types": None, "full_attn_idxs": [1]},
    ),
}
