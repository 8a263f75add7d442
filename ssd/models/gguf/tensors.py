from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssd.errors import UsageError
from ssd.models.gguf.architectures import FREQS, LONG, SHORT, Architecture, architecture_of
from ssd.models.gguf.header import FLOATS, ByteSpan, Header
from ssd.models.header import TensorInfo, parse_object
from ssd.system.files import read_bounded

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from ssd.kernels.groups import Groups

LINK_FILE, GGUF_FILE = "gguf.json", "model.gguf"
"""In a checkpoint's folder: the file that names a GGUF elsewhere, by path, size and time; or the GGUF itself."""
_MAX_EXPERTS = 4096
_SAMPLE = 64 << 10
_MAX_LINK = 1 << 16


@dataclass(frozen=True)
class GgufTensor(TensorInfo):
    """A tensor at `offset` of its file. `dtype` is GGUF's name of its type.

    `heads`: number of heads whose rows are in llama.cpp's order; 0: none are. `added`: what the file adds to the
    weights. `transposed`: `shape` is [in, out], the file has [out, in]. `logarithm`: the file has -e^x of each x."""

    offset: int
    size: int
    heads: int = 0
    added: float = 0.0
    transposed: bool = False
    logarithm: bool = False

    @property
    def nbytes(self) -> int:
        return self.size

    def groups(self) -> Groups:
        """Return a weight in blocks as `Groups` [out, in], also if it is `transposed`."""
        from ssd.models.gguf.blocks import groups_of

        return groups_of(self.dtype, self._rows())

    def floats(self) -> Tensor:
        """Return the tensor with Hugging Face's numbers and shape, in float32, float16 or bfloat16."""
        import torch

        kind = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[self.dtype]
        stored = torch.from_numpy(self._rows().copy()).view(kind).view(self._stored)
        if self.added:
            stored = stored.float() - self.added
        if self.logarithm:
            stored = (-stored.float()).log()
        return stored.t().contiguous() if self.transposed else stored

    @property
    def _stored(self) -> tuple[int, ...]:
        return self.shape[::-1] if self.transposed else self.shape

    def _rows(self) -> np.ndarray:
        """Return the tensor's bytes, uint8 [rows, bytes of a row], in Hugging Face's order of rows."""
        import numpy as np

        rows = self._stored[0] if len(self.shape) > 1 or self.heads else 1
        try:
            stored = np.memmap(self.file, np.uint8, "r", self.offset, (rows, self.size // rows))
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read {self.file}: {error}") from None
        return unpermute(stored, self.heads) if self.heads else stored


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's order of the rows of a q or k projection, [heads * head_dim, any].

    Its rotary embedding turns neighbours (0, 1), ... of a head; Hugging Face's turns halves (0, d/2), ..."""
    count, width = rows.shape
    return rows.reshape(heads, count // heads // 2, 2, width).swapaxes(1, 2).reshape(count, width)


def tensors_of(headers: Iterable[Header], config: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """Return the tensors of these headers by Hugging Face's names, each expert of a stack by itself.

    Raises UsageError for a tensor that the architecture does not have, or that is in two files."""
    arch, found = architecture_of(config.get("model_type")), dict[str, TensorInfo]()
    for file, _, tensors in headers:
        for tensor in tensors:
            if tensor.name in (FREQS, LONG, SHORT) or _is_mtp(tensor.name, config):
                continue  # config.json has the former
            try:
                placed = _placed(tensor, file, arch, config)
            except UsageError as error:
                raise UsageError(f"{file}: {error}") from None
            if placed.keys() & found.keys():
                raise UsageError(f"{file}: tensor {tensor.name!r} is in another file too")
            found |= placed
    return found


def _is_mtp(name: str, config: Mapping[str, Any]) -> bool:
    match name.split("."):
        case ["blk", layer, *_] if layer.isdecimal() and "layer_types" in config:
            return int(layer) >= config["num_hidden_layers"]
    return False


def _placed(tensor: ByteSpan, file: Path, arch: Architecture, config: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """Return one tensor of a file by its name, or the experts of a stack by theirs."""
    part, kind, name = _part(tensor.name, arch, config)
    stack = "{}" in name
    dimensions = (2 if kind == "weight" else 1) + stack
    if (tensor.kind not in FLOATS or stack) and len(tensor.shape) != dimensions:
        raise UsageError(f"tensor {tensor.name!r} of {tensor.kind} is no {'stack of matrices' if stack else 'matrix'}")
    size = tensor.stop - tensor.start
    if stack:
        count = tensor.shape[0]
        if count != config.get("num_experts") or count > _MAX_EXPERTS:
            raise UsageError(f"tensor {tensor.name!r} has {count} experts, the metadata {config.get('num_experts')}")
        each = size // count
        starts = range(tensor.start, tensor.stop, each)
        return {
            name.format(index): GgufTensor(tensor.kind, tensor.shape[1:], file, start, each)
            for index, start in enumerate(starts)
        }
    heads = _heads(part, tensor, config) if arch.permuted else 0
    transposed = kind == "weight" and part in arch.transposed and len(tensor.shape) == 2
    shape = tensor.shape[::-1] if transposed else tensor.shape
    if len(shape) == arch.deep.get(part, 0) - 1:
        shape = (*shape[:-1], 1, shape[-1])
    added = arch.norm_offset if part.endswith("norm") and part not in arch.plain else 0.0
    logarithm = part == "ssm_a"
    return {name: GgufTensor(tensor.kind, shape, file, tensor.start, size, heads, added, transposed, logarithm)}


def _part(name: str, arch: Architecture, config: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return part, kind and Hugging Face's name of a tensor; raise UsageError for an unknown one.

    Example: `blk.3.attn_q.weight` -> `attn_q`, `weight`, `model.layers.3.self_attn.q_proj.weight`."""
    match name.split("."):
        case ["blk", layer, *rest] if (bare := arch.bare.get(".".join(rest))) is not None:
            return rest[0], "", f"{arch.layers}.{layer}.{bare}"
        case ["blk", layer, *rest, ("weight" | "bias") as kind] if (part := ".".join(rest)) in arch.layer:
            placed = f"{arch.layers}.{layer}.{arch.layer[part]}.{kind}"
        case [part, ("weight" | "bias") as kind] if part in arch.top:
            placed = f"{arch.top[part]}.{kind}"
        case _:
            raise UsageError(f"GGUF tensor {name!r} is not part of a model of architecture {arch.names.kind!r}")
    if kind == "bias" and part not in arch.biased and not config.get(arch.optional.get(part, "")):
        raise UsageError(f"GGUF tensor {name!r} is not part of a model of architecture {arch.names.kind!r}")
    return part, kind, placed


def _heads(part: str, tensor: ByteSpan, config: Mapping[str, Any]) -> int:
    """Return the number of heads whose rows are in llama.cpp's order; 0: none are."""
    names = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    if part not in names:
        return 0
    heads = config.get(names[part])
    if type(heads) is not int or heads < 1 or tensor.shape[0] % (2 * heads):
        raise UsageError(f"tensor {tensor.name!r} of shape {tensor.shape} is not that of {heads} heads")
    return heads


def gguf_files(directory: Path) -> list[Path]:
    """Return the GGUF files with the weights of a checkpoint's folder; none if these are in safetensors.

    Raises UsageError if a file has changed since the folder was made for it."""
    link = directory / LINK_FILE
    if not link.is_file():
        own = directory / GGUF_FILE
        return [own] if own.is_file() and not (directory / "model.safetensors").is_file() else []
    said = parse_object(read_bounded(link, _MAX_LINK), link)
    parts = [said, *(said.get("shards") or [])] if isinstance(said.get("shards", []), list) else []
    if not parts or not all(isinstance(part, dict) and isinstance(part.get("path"), str) for part in parts):
        raise UsageError(f"{link} names no GGUF file")
    files = [Path(part["path"]) for part in parts]
    for file in files:
        if not file.is_file():
            raise UsageError(f"{file} is gone: {directory} has the config of this GGUF file, but none of its weights")
    if link_to(files) != said:
        raise UsageError(f"{files[0]} has changed since {directory} was made for it: name the GGUF file itself")
    return files


def link_to(files: Sequence[Path]) -> dict[str, Any]:
    first, *shards = (_stat(file) for file in files)
    return {**first, "shards": shards} if shards else first


def _stat(file: Path) -> dict[str, Any]:
    stat = file.stat()
    return {"path": str(file.resolve()), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def sample_gguf(file: Path) -> bytes:
    """Return bytes that identify a GGUF: its size, and pieces from eight places."""
    size = file.stat().st_size
    pieces = [json.dumps(size).encode()]
    with file.open("rb") as stream:
        for part in range(8):
            stream.seek(max(0, size - _SAMPLE) * part // 7)
            pieces.append(stream.read(_SAMPLE))
    return b"".join(pieces)
