"""A table of the GGUF architectures that are read, in the terms of Hugging Face's checkpoints.

Sources: gguf-py's `tensor_mapping` for names of tensors, llama.cpp's convert_hf_to_gguf.py for conventions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ssd.models.layer_kinds import FULL, LINEAR
from ssd.system import registered

FREQS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
"""Tensors that divide the frequencies of rotary embeddings: in every text, in long ones, in short ones."""
EPS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
FEED_FORWARD = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}


class Names(NamedTuple):
    """An architecture's names: in a GGUF, as `model_type` of a config, of its class in transformers."""

    kind: str
    model_type: str
    class_name: str


class Metadata:
    """Metadata below an architecture's name. Floats are fp32 (1e-05: 9.999999747e-06); 7 digits are kept."""

    def __init__(self, fields: Mapping[str, Any], kind: str) -> None:
        self._fields, self._kind = fields, kind

    def __getitem__(self, name: str) -> Any:
        value = self._fields[self.key(name)]
        return float(f"{value:.7g}") if isinstance(value, float) else value

    def get(self, name: str, default: Any = None) -> Any:
        return default if self.key(name) not in self._fields else self[name]

    def __contains__(self, name: str) -> bool:
        return self.key(name) in self._fields

    def key(self, name: str) -> str:
        return f"{self._kind}.{name}"


@dataclass(frozen=True)
class Architecture:
    """One architecture: its config and the names of its tensors in Hugging Face's terms.

    `fields` are copied from metadata to config. `as_without`: metadata accepted with this value only. `biased` parts
    must have a bias; `optional`: part -> the config field that says if it has one. `freq_factors` allows
    `rope_freqs.weight`."""

    names: Names
    layer: Mapping[str, str]  # {} in a name is the number of an expert in a stack
    fields: Mapping[str, str] = field(default_factory=lambda: EPS)
    constants: Mapping[str, Any] = field(default_factory=lambda: {"hidden_act": "silu"})
    as_without: Mapping[str, Any] = field(default_factory=dict)
    top: Mapping[str, str] = field(default_factory=lambda: _TOP)
    layers: str = "model.layers"
    biased: frozenset[str] = frozenset()
    optional: Mapping[str, str] = field(default_factory=dict)
    permuted: bool = False  # q and k are in the order of llama.cpp's rotary embedding
    norm_offset: float = 0.0  # added to the weights of norms, except those of `plain`
    plain: frozenset[str] = frozenset()
    bare: Mapping[str, str] = field(default_factory=dict)  # the whole name of a tensor in a layer -> ours
    deep: Mapping[str, int] = field(default_factory=dict)  # part -> dimensions; the file may lack the last but 1
    known: frozenset[str] = frozenset()  # metadata that this architecture has beside `fields`
    transposed: frozenset[str] = frozenset()  # parts that Hugging Face has as [in, out]
    rope: bool = True
    freq_factors: bool = False
    long_factors: bool = False  # longrope, by two tensors of factors
    partly: bool = False  # heads may be rotated in part
    own: Own | None = None  # the config's fields that are neither copied nor constant


Own = Callable[[Mapping[str, Any], Metadata, Architecture], dict[str, Any]]


def _qwen35(config: Mapping[str, Any], said: Metadata, arch: Architecture) -> dict[str, Any]:
    layers, every = config["num_hidden_layers"] - said.get("nextn_predict_layers", 0), said["full_attention_interval"]
    return {
        "num_hidden_layers": layers,
        "layer_types": [LINEAR if (layer + 1) % every else FULL for layer in range(layers)],
        "linear_value_head_dim": said["ssm.inner_size"] // config["linear_num_value_heads"],
        "partial_rotary_factor": said.get("rope.dimension_count", config["head_dim"]) / config["head_dim"],
    }


LLAMA = Architecture(
    Names("llama", "llama", "LlamaForCausalLM"),
    NORMS | ATTENTION | FEED_FORWARD,
    as_without={"logit_scale": 1.0},
    optional=dict.fromkeys(ATTENTION, "attention_bias") | dict.fromkeys(FEED_FORWARD, "mlp_bias"),
    permuted=True,
    freq_factors=True,
)
_QWEN2 = Architecture(
    Names("qwen2", "qwen2", "Qwen2ForCausalLM"),
    NORMS | ATTENTION | FEED_FORWARD,
    constants={"hidden_act": "silu", "use_sliding_window": False},
    biased=frozenset(("attn_q", "attn_k", "attn_v")),
    freq_factors=True,
)
_QWEN3 = replace(
    _QWEN2,
    names=Names("qwen3", "qwen3", "Qwen3ForCausalLM"),
    layer=NORMS | HEAD_NORMS | ATTENTION | FEED_FORWARD,
    constants={**_QWEN2.constants, "attention_bias": False},
    biased=frozenset(),
)
_QWEN3_MOE = replace(
    _QWEN3,
    names=Names("qwen3moe", "qwen3_moe", "Qwen3MoeForCausalLM"),
    layer=NORMS | HEAD_NORMS | ATTENTION | EXPERTS,
    fields={
        **EPS,
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
    },
    # llama.cpp divides the chosen experts' probabilities by their sum in every file.
    constants={**_QWEN3.constants, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    freq_factors=False,
)

_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_DELTA = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    **ATTENTION,
    **HEAD_NORMS,
}
_QWEN35 = Architecture(
    Names("qwen35", "qwen3_5_text", "Qwen3_5ForCausalLM"),
    _DELTA | FEED_FORWARD | {"ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a"},
    fields={
        **EPS,
        "ssm.conv_kernel": "linear_conv_kernel_dim",
        "ssm.state_size": "linear_key_head_dim",
        "ssm.group_count": "linear_num_key_heads",
        "ssm.time_step_rank": "linear_num_value_heads",
    },
    # Value heads are in another order than Hugging Face's: one of each key head, then the next of each.
    constants={"hidden_act": "silu", "attention_bias": False, "linear_value_heads_tiled": True},
    norm_offset=1.0,
    plain=frozenset(("ssm_norm",)),
    bare={"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"},
    deep={"ssm_conv1d": 3, "ffn_gate_inp_shexp": 2},
    known=frozenset(("ssm.inner_size", "full_attention_interval", "nextn_predict_layers", "rope.dimension_sections")),
    partly=True,
    own=_qwen35,
)
_QWEN35_MOE = replace(
    _QWEN35,
    names=Names("qwen35moe", "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
    layer={**{part: name for part, name in _QWEN35.layer.items() if part not in FEED_FORWARD}, **EXPERTS}
    | _SHARED_EXPERT,
    fields={
        **_QWEN35.fields,
        **{key: name for key, name in _QWEN3_MOE.fields.items() if key.startswith("expert")},
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
)
_QWEN3_NEXT = replace(
    _QWEN35_MOE,
    names=Names("qwen3next", "qwen3_next", "Qwen3NextForCausalLM"),
    layer=_DELTA | EXPERTS | _SHARED_EXPERT | {"ssm_ba": "linear_attn.in_proj_ba"},
    constants={**_QWEN3_MOE.constants, "use_sliding_window": False},
)

_ALL = LLAMA, _QWEN2, _QWEN3, _QWEN3_MOE, _QWEN35, _QWEN35_MOE, _QWEN3_NEXT
_OURS = {one.names.kind: one for one in _ALL}


def architectures() -> dict[str, Architecture]:
    """Return the table of each `general.architecture` of a GGUF: the core's, then those of `ssd.gguf_architectures`."""
    return _OURS | registered.load_all(registered.ARCHITECTURES) | _OURS


def architecture_of(model_type: object) -> Architecture:
    """Return the architecture of a config's `model_type`; llama if no other has it."""
    return next((one for one in architectures().values() if one.names.model_type == model_type), LLAMA)
