"""Checks a checkpoint folder before memory is allocated; trusts no length, offset, dtype or shape."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ssd.errors import UsageError
from ssd.models.gguf.header import read_header
from ssd.models.gguf.tensors import gguf_files, sample_gguf, tensors_of
from ssd.models.header import TensorInfo, check_safetensors, parse_object, sample
from ssd.models.quantization import QUANTIZATION, check_quantization, named
from ssd.models.stacks import unstacked
from ssd.system import fields, files
from ssd.system.registered import DRAFTS, load_all, names

_MAX_JSON, MAX_TOKENIZER = 64 << 20, 512 << 20  # bytes
# Our name of a field in config.json -> its names in other checkpoints.
_OLD_NAMES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_seq_len", "seq_length", "context_length"),
    "num_experts": ("num_local_experts",),
}

# Families whose checkpoints have `auto_map` from before transformers supported them. Its code is never run.
_CODE_IS_OURS = ("phi3",)

LIST_FILE = "draft_vocab.safetensors"
"""The file beside a draft's weights that lists the ids that it predicts, likeliest first."""

# `model_type` -> fields that its nested config may leave out, with their values in the family's first model.
_LEFT_OUT: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
    },
    "gemma4": {"model_type": "gemma4_text"},
    "qwen3_5": {"model_type": "qwen3_5_text"},
    "qwen3_5_moe": {"model_type": "qwen3_5_moe_text"},
}


# Ways of sentence-transformers to pool hidden states -> our names.
_POOLINGS: Mapping[str, Literal["last", "mean"]] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}


@cache
def pooling_of(target: Path) -> Literal["last", "mean"]:
    """Return a checkpoint's pooling (default: mean). Raises `UsageError` for one that is not computed."""
    file = _pooling_file(target)
    given = read_json(file) if file.is_file() else {}
    modes = [name for name, value in given.items() if name.startswith("pooling_mode_") and value is True]
    if modes and (len(modes) > 1 or modes[0] not in _POOLINGS):
        raise UsageError(f"this model pools by {' and '.join(modes)}, which is not computed: ask for mean or last")
    return _POOLINGS[modes[0]] if modes else "mean"


def _pooling_file(directory: Path) -> Path:
    return directory / "1_Pooling" / "config.json"


class Translation(NamedTuple):
    """Translates between a draft's ids and a target's in another vocabulary (`ssd.models.vocabularies`).

    `known`: size of the draft's vocabulary. `own`: the draft's id of each target token, else of its longest suffix that
    the draft has, else 0. `shared`: target ids of the tokens that both have, ascending. `words`: their share, for
    messages."""

    known: int
    own: list[int]
    shared: list[int]
    words: str


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that passed every check. Equal files have an equal `digest` (hex) in any folder.

    With a `translation`, `config` has the sizes of the target's vocabulary."""

    directory: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    nbytes: int
    digest: str
    translation: Translation | None = None

    def count(self, key: str, default: int | None = None, most: int = fields.MOST) -> int:
        """Return a positive whole number of the config; raise UsageError, which names the file, if it is none."""
        try:
            return fields.count(self.config, key, default, most)
        except UsageError as error:
            raise UsageError(f"{self.directory / 'config.json'}: {error}") from None


def inspect(directory: Path, weights: bool = True) -> Checkpoint:
    """Check config and weights of `directory`. Raises UsageError for the first fault.

    Without `weights` (`--load-format dummy`) only the config is read, and `tensors` is empty."""
    config = read_config(directory)
    tensors: dict[str, TensorInfo] = {}
    running = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    ggufs = gguf_files(directory) if weights else []
    if ggufs:
        tensors = tensors_of(map(read_header, ggufs), config)
    for gguf in ggufs:
        running.update(sample_gguf(gguf))
    shards, shard_of = _safetensors_files(directory) if weights and not ggufs else ([], {})
    for file in shards:
        found = check_safetensors(file)
        if twice := tensors.keys() & found.keys():
            raise UsageError(f"{directory}: tensor {min(twice)!r} is in more than one file, {file.name} among them")
        tensors |= found
        running.update(sample(file))
    if (listed := directory / LIST_FILE).is_file():
        check_safetensors(listed)
        running.update(sample(listed))
    for name, shard in shard_of.items():
        if name not in tensors or tensors[name].file.name != shard:
            raise UsageError(f"{directory}: tensor {name!r} is not in {shard}, where the index says")
    if _pooling_file(directory).is_file() and tensors and not any(name.startswith("model.") for name in tensors):
        # An embedding model, stored without what only its language model has.
        tensors = {
            name if name == "lm_head.weight" else f"model.{name}": replace(found, stored=found.stored or name)
            for name, found in tensors.items()
        }
        config["tie_word_embeddings"] = config.get("tie_word_embeddings", True) or "lm_head.weight" not in tensors
    try:
        tensors = named(unstacked(tensors, config), config.get(QUANTIZATION))
    except UsageError as error:
        raise UsageError(f"{directory}: {error}") from None
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    return Checkpoint(directory, config, tensors, nbytes, running.hexdigest())


def read_config(directory: Path) -> dict[str, Any]:
    """Read config.json, of a multimodal model its text part, under the field names that the engine uses.

    Raises UsageError for a bad file, for one with its own code, and for anything that is not supported."""
    file = directory / "config.json"
    config = read_json(file)
    for kind in load_all(DRAFTS).values():
        config = kind.read_config(config, file)
    if "speculators_model_type" in config:
        what = f"speculators of type {config['speculators_model_type']!r}"
        raise UsageError(f"{file}: {what} are not supported by a kind of draft that is installed{_here()}")
    _refuse_what_is_not_read(config, file)
    if "text_config" in config:
        config = _text_part(config, file)
        _refuse_what_is_not_read(config, file)
    for name, old_names in _OLD_NAMES.items():
        old = [config[key] for key in old_names if key in config]
        if name not in config and old:
            config[name] = old[0]
    return config


def _text_part(config: Mapping[str, Any], file: Path) -> dict[str, Any]:
    left_out, text = _LEFT_OUT.get(str(config.get("model_type"))), config["text_config"]
    if left_out is None or not isinstance(text, dict):
        known = ", ".join(_LEFT_OUT)
        raise UsageError(
            f"{file} has text_config: models of several modalities are not supported (the text of {known} is)"
        )
    beside = {key: value for key, value in config.items() if not isinstance(value, dict)}
    ties = {name: beside[name] for name in ("tie_word_embeddings",) if name in beside}  # the whole model's count
    return {**beside, **left_out, **text, **ties}


def _refuse_what_is_not_read(config: dict[str, Any], file: Path) -> None:
    if str(config.get("model_type")).endswith("_assistant"):
        raise UsageError(
            f"{file}: drafts of type {config['model_type']!r} are not supported: they attend to keys and values of "
            "their target, which another process has"
        )
    taken = any(kind.takes_config(config) for kind in load_all(DRAFTS).values())
    if config.get("auto_map") is not None and config.get("model_type") not in _CODE_IS_OURS and not taken:
        why = "" if names(DRAFTS) else f", and no kind of draft is installed that might read it{_here()}"
        raise UsageError(f"{file} has auto_map: models that bring their own code are refused{why}")
    if config.get("compression_config") is not None:
        raise UsageError(f"{file} has compression_config: quantised weights are not read")
    if config.get(QUANTIZATION) is not None:
        try:
            check_quantization(config[QUANTIZATION])
        except UsageError as error:
            raise UsageError(
                f"{file} has {QUANTIZATION}: quantised weights are not read in this way: {error}"
            ) from None
    if config.get("is_causal", True) is not True and not taken:
        raise UsageError(f"{file}: is_causal must be true: only models whose tokens see no later ones can generate")


def _here() -> str:
    return f" (entry points `{DRAFTS}`: {', '.join(names(DRAFTS)) or 'none'})"


def _safetensors_files(directory: Path) -> tuple[list[Path], dict[str, str]]:
    """Return the files with weights, and by the index, if there is one, the name of each tensor's file."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return [single], {}
    if not index.is_file():
        raise UsageError(f"{directory} has no model.safetensors (weights in other formats are not read)")
    shard_of = read_json(index).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise UsageError(f"{index} has no weight_map")
    for shard in shard_of.values():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise UsageError(f"{index}: {shard!r} is not the name of a file beside it")
    for shard in (shards := sorted(set(shard_of.values()))):
        if not (directory / shard).is_file():
            raise UsageError(f"{directory}: shard {shard} is missing, {index.name} names it")
    return [directory / shard for shard in shards], shard_of


def has_chat_template(directory: Path) -> bool:
    """Return True if the tokenizer has a chat template, valid or not."""
    file = directory / "tokenizer_config.json"
    return (directory / "chat_template.jinja").is_file() or (
        file.is_file() and bool(read_json(file).get("chat_template"))
    )


def read_json(path: Path) -> dict[str, Any]:
    return parse_object(read_bounded(path), path)


def read_bounded(path: Path, most: int = _MAX_JSON) -> bytes:
    """Read a whole file. Raises UsageError if it is missing or `ssd.system.files` refuses it."""
    if not path.exists():
        raise UsageError(f"{path.parent} has no {path.name}")
    return files.read_bounded(path, most)


def generation_config(directory: Path) -> dict[str, Any]:
    """Return the content of generation_config.json, or {} without one; raise UsageError for a bad one."""
    path = directory / "generation_config.json"
    return read_json(path) if path.is_file() else {}


def stop_token_ids(checkpoint: Checkpoint) -> frozenset[int]:
    """Return the end-of-sequence ids of config.json and generation_config.json that are in the vocabulary.

    Raises UsageError if one is no id, or if all are beyond the vocabulary."""
    found: set[int] = set()
    for source in (checkpoint.config, generation_config(checkpoint.directory)):
        ids = source.get("eos_token_id")
        ids = [] if ids is None else ids
        listed = ids if isinstance(ids, list) else [ids]
        if not all(type(token) is int and token >= 0 for token in listed):
            raise UsageError(f"{checkpoint.directory}: eos_token_id {ids!r} is neither a number nor a list of numbers")
        found.update(listed)
    vocabulary = range(checkpoint.count("vocab_size"))
    if found and found.isdisjoint(vocabulary):
        raise UsageError(
            f"{checkpoint.directory}: no text would ever end: eos_token_id {sorted(found)} is not in the vocabulary of "
            f"{len(vocabulary)} tokens"
        )
    return frozenset(found.intersection(vocabulary))
