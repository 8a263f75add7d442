"""A Llama GGUF as a folder with config.json, tokenizer and the file's name; the weights stay in the GGUF."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssd.errors import UsageError
from ssd.files import cache_dir
from ssd.models.download import building, lock, progress_bar
from ssd.models.gguf_header import check_gguf
from ssd.models.gguf_tensors import LINK_FILE, link_to, tensors_of
from ssd.models.gguf_tokenizer import FILES, write_tokenizer

if TYPE_CHECKING:
    from gguf import GGUFReader

# Metadata of a Llama, below `llama.`, that is read, or says nothing about what is computed.
_READ = {"context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size", "tensor_data_layout"}
_READ |= {f"attention.{name}" for name in ("head_count", "head_count_kv", "key_length", "value_length")}
_READ |= {"attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base"}
_READ |= {f"rope.scaling.{name}" for name in ("type", "factor", "original_context_length", "finetuned")}
# What it may say beside that: as it is without.
_AS_WITHOUT = {"attention.causal": True, "use_parallel_residual": False, "logit_scale": 1.0}
_AS_WITHOUT |= {"expert_count": 0, "expert_used_count": 0}


def import_gguf(reader: GGUFReader, file: Path, directory: Path) -> None:
    """Write config.json for the Llama in a GGUF `file` into the existing folder `directory`.

    Raises UsageError when it is of another architecture, or has tensors that a Llama does not have."""
    try:
        config = llama_config(reader)
        (directory / "config.json").write_text(json.dumps(config, indent=2, allow_nan=False) + "\n")
        tensors_of(file, config)
    except UsageError as error:
        raise UsageError(f"{reader.data.filename}: {error}") from error
    except (LookupError, OverflowError, TypeError, ValueError, ZeroDivisionError, StopIteration) as error:
        cause = f"lacks {error}" if isinstance(error, KeyError) else f"does not describe a model: {error}"
        raise UsageError(f"{reader.data.filename} {cause}") from error


def read_gguf(source: Path) -> GGUFReader:
    """The file, its header checked; UsageError when it is no GGUF."""
    from gguf import GGUFReader

    check_gguf(source)
    try:
        return GGUFReader(source)
    except (LookupError, OSError, OverflowError, TypeError, ValueError) as error:
        raise UsageError(f"{source} is not a readable GGUF file: {error}") from error


def llama_config(reader: GGUFReader) -> dict[str, Any]:
    """The config.json of a Llama from GGUF metadata."""
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("tokenizer.ggml.to")}
    if fields.get("general.architecture") != "llama":
        raise UsageError(f"GGUF architecture {fields.get('general.architecture')!r} is not supported, only 'llama'")
    _refuse_what_is_not_read(fields)
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    head_dim = fields.get("llama.attention.key_length", fields.get("llama.rope.dimension_count", hidden // heads))
    rope = {"rope_theta": fields.get("llama.rope.freq_base", 10000.0), "rope_type": "default"}
    known = "linear" if "llama.rope.scaling.factor" in fields else "none"  # llama.cpp's custom where it does not say
    if (scaling := fields.get("llama.rope.scaling.type", known)) == "linear":
        rope |= {"rope_type": scaling, "factor": fields["llama.rope.scaling.factor"]}
    elif scaling != "none":
        raise UsageError(f"rope scaling {scaling!r} is not supported (none, linear are)")
    embedding = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    vocab_size = int(embedding.shape[-1])
    layers = len({tensor.name.split(".")[1] for tensor in reader.tensors if tensor.name.startswith("blk.")})
    for name, size in {
        "rope.dimension_count": head_dim,
        "attention.value_length": head_dim,
        "vocab_size": vocab_size,
        "block_count": layers,
    }.items():
        if (said := fields.get(f"llama.{name}", size)) != size:
            raise UsageError(f"llama.{name} {said} is not supported: by the rest of the file it is {size}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", heads),
        # metadata floats are fp32: 1e-05 arrives as 9.999999747e-06
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.7g}"),
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "vocab_size": vocab_size,
    }


def _refuse_what_is_not_read(fields: Mapping[str, Any]) -> None:
    """UsageError for metadata that may ask for another computation."""
    for key, value in fields.items():
        name = key.removeprefix("llama.")
        if name != key and name not in _READ and (name not in _AS_WITHOUT or value != _AS_WITHOUT[name]):
            raise UsageError(f"{key} {value!r} is not supported")


def checkpoint_of(file: Path) -> Path:
    """The folder that names `file` as its weights, with its config, and the tokenizer files beside it if there are any.

    It is made again when one of these has changed. Raises UsageError for a file that is no Llama in a GGUF, and when
    the cache cannot be written."""
    beside = [path for name in FILES if (path := file.with_name(name)).is_file()]
    final = cache_dir() / "gguf" / f"{file.stem}-{_state([file, *beside])}"
    if (final / "config.json").is_file():
        return final
    try:
        with progress_bar(file.name) as report, lock(final.with_name(f".{final.name}.lock"), report):
            if not (final / "config.json").is_file():
                with building(final) as fresh:
                    reader = read_gguf(file)
                    if file.with_name("tokenizer.json") in beside:
                        for path in beside:
                            shutil.copyfile(path, fresh / path.name)
                    else:
                        write_tokenizer(reader, fresh)
                    import_gguf(reader, file, fresh)
                    (fresh / LINK_FILE).write_text(json.dumps(link_to(file)))
    except OSError as error:
        raise UsageError(f"cannot store {file.name} as a checkpoint in {cache_dir()}: {error}") from error
    return final


def _state(files: list[Path]) -> str:
    """Names the files as they are now: path, size and time of the last change."""
    stats = [(str(file.resolve()), stat.st_size, stat.st_mtime_ns) for file in files if (stat := file.stat())]
    return hashlib.sha256(repr(stats).encode()).hexdigest()[:16]
