"""Writes a checkpoint as a GGUF file, by the conventions of llama.cpp's convert_hf_to_gguf.py."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from ssd.models.checkpoint import Checkpoint, inspect
from ssd.models.stacks import ExpertTensor

# `model_type` -> architecture of a GGUF.
KINDS = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gpt2": "gpt2",
    "gpt_oss": "gpt-oss",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "granite": "granite",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next",
    "lfm2": "lfm2",
}
DELTA = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
OFFSET, PERMUTED = ("gemma2", "gemma3_text", *DELTA), ("llama", "mistral", "granite")
# Metadata of some families, as convert_hf_to_gguf.py names it.
_OWN = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "shortconv.l_cache": "conv_L_cache",
}


def write_gguf(
    directory: Path,
    file: Path,
    kind: str,
    tokenizer: Path | None = None,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
) -> None:
    """Write the checkpoint in `directory`, tables as `kind` ("F32", "Q8_0", ...), norms as F32, with the tokenizer of
    another folder if one is given, with other `metadata`, and with other `tensors` (None: without that one).

    A table whose rows are no whole blocks is F32."""
    model = inspect(directory)
    config, arch = model.config, KINDS[model.config["model_type"]]
    writer = gguf.GGUFWriter(file, arch)
    for key, value in _metadata(config).items():
        if f"{arch}.{key}" not in (metadata or {}):
            writer.add_key_value(f"{arch}.{key}", value, _type(value))
    if tokenizer is not None:
        add_tokenizer(writer, tokenizer)
    add_fields(writer, metadata or {})
    for name, array in {**dict(_tensors(model)), **dict(_factors(config)), **(tensors or {})}.items():
        if array is None:
            continue
        fits = (
            array.ndim > 1
            and "ffn_gate_inp" not in name
            and not name.endswith(".bias")
            and array.shape[-1] % gguf.GGML_QUANT_SIZES[_known(kind)][0] == 0
        )
        known = _known(kind if fits else "F32")
        writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(array), known), raw_dtype=known)
    finish(writer)


def add_fields(writer: gguf.GGUFWriter, fields: Mapping[str, Any]) -> None:
    """Add metadata: numbers, texts, and lists of them. None leaves a field out."""
    for key, value in fields.items():
        if value is not None:
            writer.add_key_value(key, value, _type(value))


def _known(kind: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[kind]


def _type(value: Any) -> gguf.GGUFValueType:
    return gguf.GGUFValueType.UINT32 if type(value) is int else gguf.GGUFValueType.get_type(value)


def head_dim_of(config: Mapping[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata below the architecture's name."""
    heads, head_dim, kind = config["num_attention_heads"], head_dim_of(config), config["model_type"]
    found = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "attention.head_count": heads,
    }
    inner = config["n_inner"] or 4 * config["hidden_size"] if kind == "gpt2" else config.get("intermediate_size")
    if inner is not None:
        found["feed_forward_length"] = inner
    if kind == "gpt2":
        return found | {"attention.layer_norm_epsilon": config["layer_norm_epsilon"]}
    found["attention.head_count_kv"] = config.get("num_key_value_heads", heads)
    found["attention.layer_norm_rms_epsilon"] = config["norm_eps" if kind == "lfm2" else "rms_norm_eps"]
    if kind not in ("phi3", "qwen2"):
        found |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if kind in (*PERMUTED, "phi3", "olmo2"):
        found |= {"vocab_size": config["vocab_size"]}
    if kind in (*PERMUTED, "phi3"):
        part = (config.get("rope_parameters") or config).get("partial_rotary_factor") or 1.0
        found |= {"rope.dimension_count": int(part * head_dim)}
    if kind == "gpt_oss":
        found["expert_feed_forward_length"] = config["intermediate_size"]
    if kind in DELTA:
        found["ssm.inner_size"] = config["linear_value_head_dim"] * config["linear_num_value_heads"]
        found["full_attention_interval"] = config["layer_types"].index("full_attention") + 1
        found["rope.dimension_count"] = int(config["rope_parameters"]["partial_rotary_factor"] * head_dim)
        found["rope.dimension_sections"] = [11, 11, 10, 0]
    if kind == "lfm2":
        kv_heads = found["attention.head_count_kv"]
        found["attention.head_count_kv"] = [kv_heads if one != "conv" else 0 for one in config["layer_types"]]
    own = {key: config[field] for key, field in _OWN.items() if config.get(field) is not None}
    if kind in ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe"):
        own.pop("attention.sliding_window", None)
    return found | own | _rope(config)


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or config
    rope = rope.get("full_attention") or rope
    found: dict[str, Any] = {"rope.freq_base": float(rope.get("rope_theta", 10000.0))}
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        found |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    known = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    if kind in ("yarn", "longrope"):
        found["rope.scaling.original_context_length"] = known
    if kind == "longrope":
        stretch = config["max_position_embeddings"] / known
        found["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(stretch) / math.log(known))
    return found


def _factors(config: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors by which frequencies are divided."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        for name in ("long", "short"):
            yield f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32)
    if rope.get("rope_type") == "llama3":
        low, high, factor = (rope[name] for name in ("low_freq_factor", "high_freq_factor", "factor"))
        size = head_dim_of(config)
        turns = (
            rope["original_max_position_embeddings"]
            * rope["rope_theta"] ** (-np.arange(0, size, 2) / size)
            / (2 * math.pi)
        )
        smooth = np.clip((turns - low) / (high - low), 0, 1)
        yield "rope_freqs.weight", (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def finish(writer: gguf.GGUFWriter) -> None:
    """Write what the writer has been given, and close the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: gguf.GGUFWriter, directory: Path, pre: str = "gpt-2") -> None:
    """The byte-level BPE in `directory`; `pre` names how llama.cpp cuts a text before it merges."""
    known = json.loads((directory / "tokenizer.json").read_text())
    special = {token["content"] for token in known["added_tokens"]}
    ids = known["model"]["vocab"] | {token["content"]: token["id"] for token in known["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in known["model"]["merges"]])
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    names = json.loads((directory / "tokenizer_config.json").read_text())
    writer.add_bos_token_id(ids[names["bos_token"]])
    writer.add_eos_token_id(ids[names["eos_token"]])


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of the rows of a q or k projection, [heads * head_dim, hidden]: its rotary embedding turns
    neighbours, Hugging Face's turns halves of a head."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def tile(array: np.ndarray, axis: int, key_heads: int, heads: int) -> np.ndarray:
    """llama.cpp's order of value heads: the first of each key head, then the second of each."""
    axis %= array.ndim
    before, size, after = array.shape[:axis], array.shape[axis], array.shape[axis + 1 :]
    apart = array.reshape(*before, key_heads, heads // key_heads, size // heads, *after)
    return apart.swapaxes(axis, axis + 1).reshape(array.shape)


def _delta(name: str, array: np.ndarray, config: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors that are made of one of a delta net, by Hugging Face's names of Qwen3.5."""
    key_heads, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    keys, values = config["linear_key_head_dim"], config["linear_value_head_dim"] * heads // key_heads
    if name.endswith("in_proj_qkvz.weight"):
        width = array.shape[1]
        parts = np.split(array.reshape(key_heads, -1, width), np.cumsum((keys, keys, values)), axis=1)
        *qkv, z = (part.reshape(-1, width) for part in parts)
        yield name.replace("qkvz", "qkv"), np.concatenate(qkv)
        yield name.replace("qkvz", "z"), z
        return
    if name.endswith("conv1d.weight"):
        array = array[:, 0]
    if name.endswith("A_log"):
        array = -np.exp(array)
    if config["model_type"] != "qwen3_next":
        if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
            first = 2 * keys * key_heads
            array = np.concatenate((array[:first], tile(array[first:], 0, key_heads, heads)))
        elif name.endswith("out_proj.weight"):
            array = tile(array, 1, key_heads, heads)
        elif not name.endswith("norm.weight"):
            array = tile(array, 0, key_heads, heads)
    yield name.replace("dt_bias", "dt_proj.bias"), array


def _arrays(model: Checkpoint) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor of the checkpoint, and what llama.cpp makes of those of delta nets and convolutions."""
    from safetensors import safe_open

    for name in sorted(model.tensors, key=lambda name: [int(p) if p.isdigit() else 0 for p in name.split(".")]):
        with safe_open(model.tensors[name].file, framework="pt") as source:  # numpy knows no bfloat16
            info = model.tensors[name]
            stacked = isinstance(info, ExpertTensor)
            read = info.of(source.get_slice(info.stack)) if stacked else source.get_tensor(name)
            array = read.float().numpy()
        if ".linear_attn." in name:
            yield from _delta(name, array, model.config)
        else:
            yield name, array[:, 0] if name.endswith("conv.conv.weight") else array


def _tensors(model: Checkpoint) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor by llama.cpp's name, in float32 and in its order."""
    config, kind = model.config, model.config["model_type"]
    arch = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[KINDS[kind]]
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config.get("num_key_value_heads")}
    stacks: dict[str, list[np.ndarray]] = {}
    for name, array in _arrays(model):
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        if name.endswith("sinks"):
            name += ".weight"
        expert = re.fullmatch(r"(.*\.experts)\.\d+(\..*)", name)
        theirs = names.get_name("".join(expert.groups()) if expert else name, (".weight", ".bias"))
        assert theirs is not None, name
        part = theirs.split(".")[-2]
        if part in heads and kind in PERMUTED:
            array = permute(array, heads[part])
        if name.endswith("norm.weight") and kind in OFFSET and not name.endswith("linear_attn.norm.weight"):
            array = array + 1
        if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            array = array.T
        if expert:
            stacks.setdefault(theirs, []).append(array)
        else:
            yield theirs, array
    for theirs, arrays in stacks.items():
        yield theirs, np.stack(arrays)
