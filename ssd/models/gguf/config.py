"""Makes config.json, in Hugging Face's terms, from a GGUF's metadata."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ssd.errors import UsageError
from ssd.models.gguf.architectures import FREQS, LONG, SHORT, Architecture, Metadata, architectures
from ssd.models.gguf.header import ByteSpan, Header

# Metadata below the architecture's name that is read, or that does not change the computation.
_SIZES = {
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "vocab_size",
    "tensor_data_layout",
}
_SIZES |= {f"attention.{name}" for name in ("head_count", "head_count_kv", "key_length", "value_length")}
_ROPE = {"rope.dimension_count", "rope.freq_base", "rope.scaling.finetuned"}
_ROPE |= {f"rope.scaling.{name}" for name in ("type", "factor", "original_context_length", "attn_factor")}
_ROPE |= {f"rope.scaling.yarn_{name}" for name in ("attn_factor", "beta_fast", "beta_slow")}
# Keys that are accepted with this value only, because it changes nothing.
_AS_WITHOUT = {"attention.causal": True, "use_parallel_residual": False, "rope.scaling.yarn_ext_factor": 1.0}
_AS_WITHOUT |= {"expert_count": 0, "expert_used_count": 0, "attention.sliding_window": 0}
_BETAS = ("beta_fast", "beta_slow")
_TOKENS = (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding"))


def config_of(header: Header, tensors: Sequence[tuple[Path, ByteSpan]]) -> dict[str, Any]:
    """Return the config.json of the model with this header; its `tensors` may be in several files.

    Raises UsageError for metadata that is not supported or contradicts the tensors; KeyError, TypeError or ValueError
    for metadata that describes no model."""
    fields = header.fields
    kind = fields.get("general.architecture")
    known = architectures()
    if not isinstance(kind, str) or kind not in known:
        raise UsageError(f"GGUF architecture {kind!r} is not supported ({', '.join(known)} are)")
    for key, count in {"split.tensors.count": len(tensors), "split.no": 0}.items():
        if fields.get(key, count) != count:
            raise UsageError(f"{key} {fields[key]!r} is not that of the files: {count}")
    arch = known[kind]
    _refuse_what_is_not_read(fields, arch)
    said = Metadata(fields, kind)
    shapes = {tensor.name: list(tensor.shape) for _, tensor in tensors}
    hidden, heads, layers = said["embedding_length"], said["attention.head_count"], said["block_count"]
    turned = said.get("rope.dimension_count", hidden // heads)
    head_dim = said.get("attention.key_length", hidden // heads if arch.partly else turned)
    _check_sizes(said, shapes, arch, head_dim)
    allowed = {FREQS: arch.freq_factors, LONG: arch.long_factors, SHORT: arch.long_factors}
    for name in allowed:
        if name in shapes and not allowed[name]:
            raise UsageError(f"tensor {name!r} is not supported in architecture {kind!r}")
    config = {
        "architectures": [arch.names.class_name],
        "model_type": arch.names.model_type,
        "dtype": "float32",
        "attention_dropout": 0.0,
        **{name: fields.get(f"tokenizer.ggml.{key}_token_id") for name, key in _TOKENS},
        "head_dim": head_dim,
        "hidden_size": hidden,
        "intermediate_size": said[_inner(said)],
        "max_position_embeddings": said["context_length"],
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": said.get("attention.head_count_kv", heads),
        "tie_word_embeddings": "output.weight" not in shapes,
        "vocab_size": shapes["token_embd.weight"][0],
        **arch.constants,
        **{ours: said[name] for name, ours in arch.fields.items() if name in said or name.endswith("epsilon")},
        **{
            flag: all(f"blk.0.{part}.bias" in shapes for part, theirs in arch.optional.items() if theirs == flag)
            for flag in sorted(set(arch.optional.values()))
        },
    }
    if arch.rope:
        rope = _rope(tensors, said, arch, head_dim)
        config |= {"rope_theta": rope["rope_theta"], "rope_parameters": rope}
        if trained := rope.get("original_max_position_embeddings"):
            config["original_max_position_embeddings"] = trained
    return config if arch.own is None else config | arch.own(config, said, arch)


def _inner(said: Metadata) -> str:
    names = "feed_forward_length", "expert_feed_forward_length"
    return next((name for name in names if name in said), names[0])


def _refuse_what_is_not_read(fields: Mapping[str, Any], arch: Architecture) -> None:
    known = _SIZES | {"pooling_type"} | arch.fields.keys() | arch.known | (_ROPE if arch.rope else set())
    known -= arch.as_without.keys()
    same = {**_AS_WITHOUT, **arch.as_without}
    for key, value in fields.items():
        name = key.removeprefix(f"{arch.names.kind}.")
        if name != key and name not in known and (name not in same or value != same[name]):
            raise UsageError(f"{key} {value!r} is not supported")


def _check_sizes(said: Metadata, shapes: Mapping[str, list[int]], arch: Architecture, head_dim: int) -> None:
    layers = len({name.split(".")[1] for name in shapes if name.startswith("blk.")})
    sizes = {
        "attention.value_length": head_dim,
        "vocab_size": shapes["token_embd.weight"][0],
        "block_count": layers,
        "embedding_length": shapes["token_embd.weight"][-1],
    }
    if arch.rope and not arch.partly:
        sizes["rope.dimension_count"] = head_dim
    for name, size in sizes.items():
        if (value := said.get(name, size)) != size:
            raise UsageError(f"{said.key(name)} {value!r} is not supported: by the rest of the file it is {size}")


def _rope(
    tensors: Sequence[tuple[Path, ByteSpan]], said: Metadata, arch: Architecture, head_dim: int
) -> dict[str, Any]:
    """Return the `rope_parameters` of the metadata.

    llama.cpp multiplies YaRN's factor of cosines and sines, 0.1 ln(factor) + 1, by those in the metadata."""
    rope: dict[str, Any] = {"rope_theta": said.get("rope.freq_base", 10000.0), "rope_type": "default"}
    turned = said.get("rope.dimension_count", head_dim)
    if turned != head_dim:
        rope["partial_rotary_factor"] = turned / head_dim
    names = {tensor.name for _, tensor in tensors}
    attention_factor = said.get("rope.scaling.attn_factor", 1.0) * said.get("rope.scaling.yarn_attn_factor", 1.0)
    # llama.cpp's default
    scaling = said.get("rope.scaling.type", "linear" if "rope.scaling.factor" in said else "none")
    if names & {LONG, SHORT} and scaling in ("none", "longrope"):
        known = said["rope.scaling.original_context_length"]
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": known}
        rope |= {"long_factor": _factors(tensors, LONG, turned), "short_factor": _factors(tensors, SHORT, turned)}
        return rope | ({"attention_factor": attention_factor} if "rope.scaling.attn_factor" in said else {})
    if scaling == "yarn":
        factor = said["rope.scaling.factor"]
        rope |= {"rope_type": scaling, "factor": factor}
        rope["original_max_position_embeddings"] = said["rope.scaling.original_context_length"]
        rope["attention_factor"] = attention_factor * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
        rope |= {beta: said[f"rope.scaling.yarn_{beta}"] for beta in _BETAS if f"rope.scaling.yarn_{beta}" in said}
        attention_factor = 1.0
    elif scaling == "linear":
        rope |= {"rope_type": scaling, "factor": said["rope.scaling.factor"]}
    elif scaling != "none":
        raise UsageError(f"rope scaling {scaling!r} is not supported (none, linear, yarn are)")
    if attention_factor != 1.0:
        raise UsageError(f"{said.key('rope.scaling.attn_factor')} is not supported beside rope scaling {scaling!r}")
    if (tables := names & {FREQS, LONG, SHORT}) and scaling != "none":
        raise UsageError(f"tensor {min(tables)!r} is not supported beside rope scaling {scaling!r}")
    if FREQS in names:
        rope["frequency_factors"] = _factors(tensors, FREQS, turned)
    return rope


def _factors(tensors: Sequence[tuple[Path, ByteSpan]], name: str, turned: int) -> list[float]:
    """Return the divisors of frequencies, one a pair of a head; raise UsageError for a bad tensor."""
    found = next((one for one in tensors if one[1].name == name), None)
    if found is None:
        raise UsageError(f"tensor {name!r} is missing")
    file, tensor = found
    if tensor.kind != "F32" or tensor.shape != (turned // 2,):
        raise UsageError(f"tensor {name!r} must have {turned // 2} numbers in F32")
    with file.open("rb") as stream:
        stream.seek(tensor.start)
        values = struct.unpack(f"<{turned // 2}f", stream.read(tensor.stop - tensor.start))
    if not all(0 < value < math.inf for value in values):
        raise UsageError(f"tensor {name!r} has a factor that is not positive")
    return list(values)
