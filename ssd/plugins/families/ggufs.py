"""GGUF architectures of the plugin's families: a table each, for the core's reader (`ssd.models.gguf`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ssd.models.gguf.architectures import (
    ATTENTION,
    EPS,
    EXPERTS,
    FEED_FORWARD,
    HEAD_NORMS,
    LLAMA,
    NORMS,
    Architecture,
    Metadata,
    Names,
)
from ssd.models.layer_kinds import CONVOLUTION, FULL, SLIDING

_GEMMA_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def _gemma(config: Mapping[str, Any], said: Metadata, every: int, deepest: int) -> dict[str, Any]:
    """Return windows, caps and scale; llama.cpp derives missing ones from the model's depth.

    Every n-th layer (`every`) sees all tokens. Scores of the model with `deepest` layers have a scale of their own."""
    layers, hidden, heads = (config[name] for name in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    pattern = said.get("attention.sliding_window_pattern", every)
    slides = pattern if isinstance(pattern, list) else [bool((layer + 1) % pattern) for layer in range(layers)]
    scalar = hidden / heads if layers == deepest else config["head_dim"]
    own: dict[str, Any] = {"sliding_window": said["attention.sliding_window"]}
    own["layer_types"] = [SLIDING if slide else FULL for slide in slides]
    own["query_pre_attn_scalar"] = said["attention.scale"] ** -2 if "attention.scale" in said else scalar
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        own[cap] = config.get(cap) or None
    return own


def _gemma2(config: Mapping[str, Any], said: Metadata, arch: Architecture) -> dict[str, Any]:
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}  # llama.cpp's defaults
    return _gemma({**caps, **config}, said, every=2, deepest=46)


def _gemma3(config: Mapping[str, Any], said: Metadata, arch: Architecture) -> dict[str, Any]:
    """Return the fields of Gemma 3, whose layers with a window rotate by their own base, unscaled."""
    base = said.get("rope.freq_base_swa", 10000.0)
    rope = dict(config["rope_parameters"])
    if "rope.freq_base" not in said:
        rope["rope_theta"] = 1e6
    sliding = {"rope_type": "default", "rope_theta": base}
    return {
        **_gemma(config, said, every=6, deepest=62),
        "rope_theta": rope["rope_theta"],
        "rope_local_base_freq": base,
        "rope_parameters": {FULL: rope, SLIDING: sliding},
    }


def _gpt_oss(config: Mapping[str, Any], said: Metadata, arch: Architecture) -> dict[str, Any]:
    window = said["attention.sliding_window"]
    return {"sliding_window": window, "rope_parameters": {**config["rope_parameters"], "truncate": False}}


def _phi3(config: Mapping[str, Any], said: Metadata, arch: Architecture) -> dict[str, Any]:
    """Return the window (0 in a file: none) and a padding token that fits small vocabularies."""
    return {"sliding_window": config.get("sliding_window") or None, "pad_token_id": config["pad_token_id"] or 0}


def _granite(config: Mapping[str, Any], said: Metadata, arch: Architecture) -> dict[str, Any]:
    scales = {"attention_multiplier": config["head_dim"] ** -0.5, "embedding_multiplier": 1.0}
    scales |= {"residual_multiplier": 1.0, "logits_scaling": 1.0}
    return {name: config.get(name) or default for name, default in scales.items()}  # llama.cpp takes 0 as missing


def _lfm2(config: Mapping[str, Any], said: Metadata, arch: Architecture) -> dict[str, Any]:
    heads = said["attention.head_count_kv"]
    return {"layer_types": [FULL if count else CONVOLUTION for count in heads], "num_key_value_heads": max(heads)}


GEMMA2 = Architecture(
    Names("gemma2", "gemma2", "Gemma2ForCausalLM"),
    _GEMMA_NORMS | ATTENTION | FEED_FORWARD,
    fields={
        **EPS,
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "attention.sliding_window": "sliding_window",
    },
    constants={"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False},
    norm_offset=1.0,
    known=frozenset(("attention.sliding_window_pattern", "rope.freq_base_swa", "attention.scale")),
    own=_gemma2,
)
GEMMA3 = replace(
    GEMMA2,
    names=Names("gemma3", "gemma3_text", "Gemma3ForCausalLM"),
    layer=_GEMMA_NORMS | HEAD_NORMS | ATTENTION | FEED_FORWARD,
    own=_gemma3,
)
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
GPT_OSS = Architecture(
    Names("gpt-oss", "gpt_oss", "GptOssForCausalLM"),
    {
        **ATTENTION,
        **EXPERTS,
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
    },
    fields={
        **EPS,
        "attention.sliding_window": "sliding_window",
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "intermediate_size",
    },
    biased=frozenset(("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")),
    bare={"attn_sinks.weight": "self_attn.sinks"},
    optional=dict.fromkeys(ATTENTION, "attention_bias"),
    own=_gpt_oss,
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
PHI3 = Architecture(
    Names("phi3", "phi3", "Phi3ForCausalLM"),
    {
        **NORMS,
        "attn_qkv": "self_attn.qkv_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_up": "mlp.gate_up_proj",
        "ffn_down": "mlp.down_proj",
    },
    fields={**EPS, "attention.sliding_window": "sliding_window"},
    long_factors=True,
    partly=True,
    own=_phi3,
)
