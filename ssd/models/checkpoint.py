"""A checkpoint folder checked before any process is spawned or memory allocated: config, tensors, tokenizer.

Nothing here trusts the files: lengths, offsets, dtypes and shapes are compared with the bytes that exist.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ssd import fields, files
from ssd.errors import UsageError
from ssd.models import heads
from ssd.models.header import TensorInfo, check_safetensors, parse_object, sample
from ssd.models.multimodal import text_part

__all__ = [
    "DRAFT_VOCAB",
    "SHARED",
    "Checkpoint",
    "TensorInfo",
    "borrowed",
    "check_pair",
    "check_safetensors",
    "inspect",
    "read_config",
]
__all__ += ["safetensors_files", "tokenizer_vocabulary"]

_MAX_JSON, MAX_TOKENIZER = 64 << 20, 512 << 20  # bytes
_QUANTISED = ("quantization_config", "compression_config")
# Keys of a draft's config.json: tensors that it reads from its target's files; how many ids, from 0, it may predict.
SHARED, DRAFT_VOCAB = "shared_with_target", "draft_vocab_size"
# What the engine reads in config.json -> what others name it.
_OLD_NAMES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_seq_len"),
    "num_experts": ("num_local_experts",),
}


@dataclass(frozen=True)
class Checkpoint:
    """A folder that passed every check. `digest` (hex) names the model: equal for equal files, wherever they are."""

    directory: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    nbytes: int
    digest: str

    def count(self, key: str, default: int | None = None, most: int = fields.MOST) -> int:
        """A positive whole number of the config. Raises UsageError, which names the file."""
        try:
            return fields.count(self.config, key, default, most)
        except UsageError as error:
            raise UsageError(f"{self.directory / 'config.json'}: {error}") from None


def inspect(directory: Path, weights: bool = True) -> Checkpoint:
    """Check the config and every safetensors file of `directory`; UsageError names the first thing wrong.

    Without `weights` (`--load-format dummy`) only the config is read, and `tensors` is empty.
    """
    config = read_config(directory)
    tensors: dict[str, TensorInfo] = {}
    running = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for file in safetensors_files(directory) if weights else []:
        found = check_safetensors(file)
        if twice := tensors.keys() & found.keys():
            raise UsageError(f"{directory}: tensor {min(twice)!r} is in more than one file, {file.name} among them")
        tensors |= found
        running.update(sample(file))
    if weights:
        _check_index(directory, tensors)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    return Checkpoint(directory, config, tensors, nbytes, running.hexdigest())


def read_config(directory: Path) -> dict[str, Any]:
    """config.json as a dict, of a model of several modalities its text part; UsageError when it is missing, no JSON
    object, or asks for code of its own, for quantised weights, for modalities or a kind of attention that are not
    supported."""
    file = directory / "config.json"
    config = read_json(file)
    _refuse_what_is_not_read(config, file)
    if "text_config" in config:
        config = text_part(config, file)
        _refuse_what_is_not_read(config, file)
    for name, old_names in _OLD_NAMES.items():
        old = [config[key] for key in old_names if key in config]
        if name not in config and old:
            config[name] = old[0]
    return config


def _refuse_what_is_not_read(config: dict[str, Any], file: Path) -> None:
    if config.get("auto_map") is not None:
        raise UsageError(f"{file} has auto_map: models that bring their own code are refused")
    for field in _QUANTISED:
        if config.get(field) is not None:
            raise UsageError(f"{file} has {field}: quantised weights are not read")
    if config.get("is_causal", True) is not True:
        raise UsageError(f"{file}: is_causal must be true: only models whose tokens see no later ones can generate")


def safetensors_files(directory: Path) -> list[Path]:
    """model.safetensors, or the shards that model.safetensors.index.json names, all of which exist."""
    single = directory / "model.safetensors"
    if single.is_file():
        return [single]
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        raise UsageError(f"{directory} has no model.safetensors (weights in other formats are not read)")
    shards = sorted(set(_weight_map(index).values()))
    for shard in shards:
        if not (directory / shard).is_file():
            raise UsageError(f"{directory}: shard {shard} is missing, {index.name} names it")
    return [directory / shard for shard in shards]


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name to shard file name; a shard outside the folder is refused."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise UsageError(f"{index} has no weight_map")
    for shard in names.values():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise UsageError(f"{index}: {shard!r} is not the name of a file beside it")
    return names


def _check_index(directory: Path, tensors: dict[str, TensorInfo]) -> None:
    """With shards, every tensor is where the index says."""
    if (directory / "model.safetensors").is_file():
        return
    for name, shard in _weight_map(directory / "model.safetensors.index.json").items():
        if name not in tensors or tensors[name].file.name != shard:
            raise UsageError(f"{directory}: tensor {name!r} is not in {shard}, where the index says")


def read_json(path: Path) -> dict[str, Any]:
    return parse_object(read_bounded(path), path)


def read_bounded(path: Path, most: int = _MAX_JSON) -> bytes:
    """All of a model's file. Raises UsageError for one that is missing or that `ssd.files` refuses."""
    if not path.exists():
        raise UsageError(f"{path.parent} has no {path.name}")
    return files.read_bounded(path, most)


def tokenizer_vocabulary(directory: Path) -> dict[str, int] | None:
    """Token -> id from tokenizer.json, added tokens included; None when the folder has no tokenizer.json."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    text = read_bounded(file, MAX_TOKENIZER)
    try:
        return dict(Tokenizer.from_buffer(text).get_vocab(with_added_tokens=True))
    except Exception as error:  # the library raises bare Exception
        raise UsageError(f"cannot read {file}: {error}") from error


def check_pair(target: Checkpoint, draft: Checkpoint) -> None:
    """UsageError unless every token id means the same to both models.

    Embeddings padded to different sizes are fine as long as the tokenizers agree. Without two tokenizers to compare,
    the vocabulary sizes must be equal.
    """
    if DRAFT_VOCAB in draft.config:
        draft.count(DRAFT_VOCAB)
    pair = f"target {target.directory} and draft {draft.directory}"
    files = [model.directory / "tokenizer.json" for model in (target, draft)]
    if all(file.is_file() for file in files):
        if read_bounded(files[0], MAX_TOKENIZER) == read_bounded(files[1], MAX_TOKENIZER):
            return
        ours, theirs = tokenizer_vocabulary(target.directory), tokenizer_vocabulary(draft.directory)
        assert ours is not None and theirs is not None
        if differing := sorted(ours.items() ^ theirs.items()):
            raise UsageError(f"{pair} have different tokenizers: {differing[0][0]!r} is not the same token in both")
    else:
        sizes = [model.count("vocab_size") for model in (target, draft)]
        if sizes[0] != sizes[1]:
            raise UsageError(f"{pair} cannot work together: vocabularies of {sizes[0]} and {sizes[1]} tokens")


def borrowed(draft: Checkpoint, target: Checkpoint) -> Checkpoint:
    """`draft` with the tensors that its config leaves to the target's files ("shared_with_target": their names).

    A draft over its target's own embedding needs no copy of it, and an EAGLE-3 head often has none. UsageError when the
    target has no such tensor.
    """
    names = draft.config.get(SHARED, [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"{draft.directory / 'config.json'}: {SHARED} must be a list of names")
    if heads.is_head(draft) and heads.EMBEDDING not in draft.tensors:
        names = [*names, heads.TARGET_EMBEDDING]
    for name in names:
        if name not in target.tensors:
            raise UsageError(f"draft {draft.directory} shares {name} with its target, which {target.directory} lacks")
    return replace(draft, tensors=draft.tensors | {name: target.tensors[name] for name in names})
