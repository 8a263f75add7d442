"""GGUF architectures of the plugin's families: a table each, for the core's reader (`ssd.models.gguf`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ssd.models.gguf.architectures import ATTENTION, EPS, FEED_FORWARD, HEAD_NORMS, LLAMA, Architecture, Metadata, Names
from ssd.models.layer_kinds import CONVOLUTION, FULL


def _granite(config: Mapping[str, Any], said: Metadata, arch: Architecture) -> dict[str, Any]:
    scales = {"attention_multiplier": config["head_dim"] ** -0.5, "embedding_multiplier": 1.0}
    scales |= {"residual_multiplier": 1.0, "logits_scaling": 1.0}
    return {name: config.get(name) or default for name, default in scales.items()}  # llama.cpp takes 0 as missing


def _lfm2(config: Mapping[str, Any], said: Metadata, arch: Architecture) -> dict[str, Any]:
    heads = said["attention.head_count_kv"]
    return {"layer_types": [FULL if count else CONVOLUTION for count in heads], "num_key_value_heads": max(heads)}


GPT2 = Architecture(
    Names("gpt2", "gpt2", "GPT2LMHeadModel"),
    {
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
    fields={
        "attention.layer_norm_epsilon": "layer_norm_epsilon",
        "feed_forward_length": "n_inner",
        "context_length": "n_positions",
    },
    constants={"activation_function": "gelu_new"},
    top={
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    layers="transformer.h",
    biased=frozenset(("attn_norm", "attn_qkv", "attn_output", "ffn_norm", "ffn_up", "ffn_down", "output_norm")),
    transposed=frozenset(("attn_qkv", "attn_output", "ffn_up", "ffn_down")),
    rope=False,
)
GRANITE = replace(
    LLAMA,
    names=Names("granite", "granite", "GraniteForCausalLM"),
    fields={
        **EPS,
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
    as_without={"rope.scaling.finetuned": True},  # llama.cpp's name for "positions are rotated" here
    freq_factors=False,
    own=_granite,
)
LFM2 = Architecture(
    Names("lfm2", "lfm2", "Lfm2ForCausalLM"),
    {
        **ATTENTION,
        "attn_output": "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "attn_norm": "operator_norm",
        "ffn_norm": "ffn_norm",
        "ffn_gate": "feed_forward.w1",
        "ffn_down": "feed_forward.w2",
        "ffn_up": "feed_forward.w3",
        "shortconv.conv": "conv.conv",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.out_proj": "conv.out_proj",
    },
    fields={"attention.layer_norm_rms_epsilon": "norm_eps", "shortconv.l_cache": "conv_L_cache"},
    constants={"conv_bias": False, "block_auto_adjust_ff_dim": False},
    top={"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head"},
    deep={"shortconv.conv": 3},
    own=_lfm2,
)
OLMO2 = Architecture(
    Names("olmo2", "olmo2", "Olmo2ForCausalLM"),
    {
        **ATTENTION,
        **HEAD_NORMS,
        **FEED_FORWARD,
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    constants={"hidden_act": "silu", "attention_bias": False},
)
