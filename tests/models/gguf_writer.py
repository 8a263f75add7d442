"""Writes a Llama checkpoint as a GGUF file: what `ssd.models.gguf_tensors` reads, the other way round."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from ssd.errors import UsageError
from ssd.models.checkpoint import Checkpoint, inspect
from ssd.models.gguf_tensors import LAYER, TOP


def write_gguf(
    directory: Path,
    file: Path,
    kind: str,
    tokenizer: Path | None = None,
    metadata: Mapping[str, str | float] | None = None,
) -> None:
    """Write the checkpoint in `directory`, tables as `kind` ("F32", "Q8_0", ...), norms as F32, with the tokenizer of
    another folder if one is given, and with other `metadata`. UsageError for what is no plain Llama."""
    model = inspect(directory)
    config, heads = model.config, model.config["num_attention_heads"]
    rope = config.get("rope_parameters") or config
    if config.get("model_type") != "llama" or rope.get("rope_type", "default") != "default":
        raise UsageError(f"{directory} is no plain Llama: only those are written as GGUF")
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads", heads))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if tokenizer is not None:
        add_tokenizer(writer, tokenizer)
    for key, value in (metadata or {}).items():
        writer.add_string(key, value) if isinstance(value, str) else writer.add_float32(key, value)
    for name, array in _tensors(model):
        known = gguf.GGMLQuantizationType[kind if array.ndim == 2 else "F32"]
        writer.add_tensor(name, gguf.quantize(array, known), raw_dtype=known)
    finish(writer)


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
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _tensors(model: Checkpoint) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor by llama.cpp's name, in float32 and in its row order."""
    from safetensors import safe_open

    heads = {"attn_q": model.config["num_attention_heads"]}
    heads["attn_k"] = model.config.get("num_key_value_heads", heads["attn_q"])
    for name, theirs in _names(model.config).items():
        if name not in model.tensors:
            raise UsageError(f"{model.directory} is no plain Llama: it has no {name}")
        with safe_open(model.tensors[name].file, framework="pt") as source:  # numpy knows no bfloat16
            array = source.get_tensor(name).float().numpy()
        part = theirs.split(".")[-2]
        yield theirs, permute(array, heads[part]) if part in heads else array


def _names(config: Mapping[str, Any]) -> dict[str, str]:
    """Hugging Face's name -> llama.cpp's; a tied head is the embedding."""
    names = {f"{ours}.weight": f"{theirs}.weight" for theirs, ours in TOP.items()}
    if config.get("tie_word_embeddings"):
        del names["lm_head.weight"]
    for layer in range(config["num_hidden_layers"]):
        names |= {f"model.layers.{layer}.{ours}.weight": f"blk.{layer}.{part}.weight" for part, ours in LAYER.items()}
    return names
