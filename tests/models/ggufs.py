"""A tiny random Llama as a GGUF file, in any of the types that are read."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

from ssd.models.gguf_import import _LAYER, _TOP
from tests.models import tiny, wheels

# Rows of whole blocks of 32.
SIZES = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 300, "tie_word_embeddings": False}


def write(file: Path, kind: str = "F32", tokenizer: Path | None = None, seed: int = 0, **fields: float | str) -> Path:
    """Tables in `kind`, norms in F32, and the tokenizer of a checkpoint in the metadata. `fields`: other metadata,
    `_` for `.`. -> the checkpoint it is made from, in a folder beside it."""
    directory = tiny.llama(file.with_suffix(".from"), seed=seed, **SIZES)
    config, weights = json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if tokenizer is not None:
        add_tokenizer(writer, tokenizer)
    for name, value in fields.items():
        key = name.replace("__", ".")
        writer.add_string(key, value) if isinstance(value, str) else writer.add_float32(key, value)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    names = {f"{ours}.weight": f"{theirs}.weight" for theirs, ours in _TOP.items()}
    for layer in range(config["num_hidden_layers"]):
        names |= {f"model.layers.{layer}.{ours}.weight": f"blk.{layer}.{part}.weight" for part, ours in _LAYER.items()}
    for ours, theirs in names.items():
        array, part = weights[ours], theirs.split(".")[-2]
        if part in heads:
            array = wheels.interleaved(array, heads[part])
        add_tensor(writer, theirs, array, kind if array.ndim == 2 else "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return directory


def add_tensor(writer: gguf.GGUFWriter, name: str, array: np.ndarray, kind: str) -> None:
    known = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, gguf.quantize(array, known), raw_dtype=known)


def add_tokenizer(writer: gguf.GGUFWriter, directory: Path, pre: str = "gpt-2") -> None:
    """What llama.cpp writes of a byte-level BPE."""
    known = json.loads((directory / "tokenizer.json").read_text())
    special = {token["content"] for token in known["added_tokens"]}
    tokens = sorted(known["model"]["vocab"], key=known["model"]["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_merges([" ".join(merge) for merge in known["model"]["merges"]])
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")


def rounded(array: np.ndarray, kind: str) -> np.ndarray:
    """What is left of the numbers in a type."""
    known = gguf.GGMLQuantizationType[kind]
    return gguf.dequantize(gguf.quantize(array, known), known).reshape(array.shape)
