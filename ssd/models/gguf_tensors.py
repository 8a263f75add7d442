"""The tensors of a Llama in a GGUF file under Hugging Face's names, read from the file as they are wanted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssd.errors import UsageError
from ssd.files import read_bounded
from ssd.models.gguf_header import FLOATS, check_gguf
from ssd.models.header import TensorInfo, parse_object

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from ssd.kernels.groups import Groups

LINK_FILE, GGUF_FILE = "gguf.json", "model.gguf"
"""In a checkpoint's folder: the file that names a GGUF elsewhere, by path, size and time; or the GGUF itself."""
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SAMPLE = 64 << 10
_MAX_LINK = 1 << 16


@dataclass(frozen=True)
class GgufTensor(TensorInfo):
    """A tensor whose bytes begin at `offset` of its file. `dtype` is GGUF's name of it.

    `heads`: llama.cpp's order of rows within so many heads has to be undone; 0: it is as Hugging Face's."""

    offset: int
    size: int
    heads: int

    @property
    def nbytes(self) -> int:
        return self.size

    def groups(self) -> Groups:
        """A weight [out, in] in blocks."""
        from ssd.models.gguf_blocks import groups_of

        return groups_of(self.dtype, self._rows())

    def floats(self) -> Tensor:
        """A tensor in float32, float16 or bfloat16."""
        import torch

        kind = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[self.dtype]
        return torch.from_numpy(self._rows().copy()).view(kind).view(self.shape)

    def _rows(self) -> np.ndarray:
        """Its bytes, uint8 [rows, bytes of a row]."""
        import numpy as np

        rows = self.shape[0] if len(self.shape) > 1 else 1
        try:
            stored = np.memmap(self.file, np.uint8, "r", self.offset, (rows, self.size // rows))
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read {self.file}: {error}") from None
        return unpermute(stored, self.heads) if self.heads else stored


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's order of the rows of a q or k projection, [heads * head_dim, any], within each head.

    Its rotary embedding turns neighbours (0, 1), (2, 3), ...; Hugging Face's turns halves (0, d/2), (1, d/2 + 1), ...
    """
    count, width = rows.shape
    return rows.reshape(heads, count // heads // 2, 2, width).swapaxes(1, 2).reshape(count, width)


def hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; UsageError for a tensor no Llama has."""
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in LAYER:
            return f"model.layers.{layer}.{LAYER[part]}.weight"
        case [part, "weight"] if part in TOP:
            return f"{TOP[part]}.weight"
    raise UsageError(f"GGUF tensor {name!r} is not part of a plain Llama")


def tensors_of(file: Path, config: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """The tensors of a checked file, by Hugging Face's names. Raises UsageError for what no Llama has."""
    found: dict[str, TensorInfo] = {}
    heads = {"q_proj": config.get("num_attention_heads"), "k_proj": config.get("num_key_value_heads")}
    for tensor in check_gguf(file):
        name = hugging_face_name(tensor.name)
        if tensor.kind not in FLOATS and len(tensor.shape) != 2:
            raise UsageError(f"{file}: tensor {tensor.name!r} of {tensor.kind} is no matrix")
        permuted = heads.get(name.split(".")[-2], 0)
        if permuted and (len(tensor.shape) != 2 or type(permuted) is not int or tensor.shape[0] % (2 * permuted)):
            raise UsageError(f"{file}: tensor {tensor.name!r} of shape {tensor.shape} is not that of {permuted} heads")
        size = tensor.stop - tensor.start
        found[name] = GgufTensor(tensor.kind, tensor.shape, file, tensor.start, size, permuted or 0)
    return found


def gguf_of(directory: Path) -> Path | None:
    """The GGUF file that has the weights of a checkpoint's folder; None if they are in safetensors.

    Raises UsageError if the file is no longer the one that the folder was made for."""
    link = directory / LINK_FILE
    if not link.is_file():
        own = directory / GGUF_FILE
        return own if own.is_file() and not (directory / "model.safetensors").is_file() else None
    said = parse_object(read_bounded(link, _MAX_LINK), link)
    if not isinstance(said.get("path"), str):
        raise UsageError(f"{link} names no GGUF file")
    file = Path(said["path"])
    if not file.is_file():
        raise UsageError(f"{file} is gone: {directory} has the config of this GGUF file, but none of its weights")
    if link_to(file) != said:
        raise UsageError(f"{file} has changed since {directory} was made for it: name the GGUF file itself")
    return file


def link_to(file: Path) -> dict[str, Any]:
    """What `LINK_FILE` says of a GGUF file as it is now."""
    stat = file.stat()
    return {"path": str(file.resolve()), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def sample_gguf(file: Path) -> bytes:
    """What tells a GGUF from another cheaply: its size, and bytes from eight places."""
    size = file.stat().st_size
    pieces = [json.dumps(size).encode()]
    with file.open("rb") as stream:
        for part in range(8):
            stream.seek(max(0, size - _SAMPLE) * part // 7)
            pieces.append(stream.read(_SAMPLE))
    return b"".join(pieces)
