"""Reads the header of a safetensors file, checked against the bytes that exist.

Format: an 8-byte little-endian length, that many bytes of JSON (name -> dtype, shape, data_offsets), then the
tensors."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from ssd.errors import UsageError

_MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library itself
_MAX_DIMENSIONS = 8
_MAX_INTEGER = 1 << 62
_DTYPE_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2}
_DTYPE_BYTES |= {"U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8}
_SAMPLE = 64 << 10


@dataclass(frozen=True)
class TensorInfo:
    """A tensor by its file's header; `dtype` is safetensors' (`BF16`). `stored`: another name in the file."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    stored: str = field(default="", kw_only=True)

    @property
    def nbytes(self) -> int:
        return _DTYPE_BYTES[self.dtype] * math.prod(self.shape)


def check_safetensors(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of one file, in the order of their bytes, from its header alone.

    Raises UsageError for an unknown dtype, a wrong shape, a gap and an overlap."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            text = _header(file, path, size)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    header, data_start = parse_object(text, path), 8 + len(text)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise UsageError(f"{path}: __metadata__ is no map of strings")
    spans = sorted((*_span(path, name, entry), name) for name, entry in header.items())
    position = 0
    for start, stop, name in spans:
        if start != position:
            raise UsageError(f"{path}: tensor {name!r} {'overlaps another' if start < position else 'follows a gap'}")
        position = stop
    promised = data_start + position
    if promised != size:
        trouble = "is truncated" if size < promised else "has bytes after its last tensor"
        raise UsageError(f"{path} {trouble}: header promises {promised} bytes, file has {size}")
    return {name: TensorInfo(header[name]["dtype"], tuple(header[name]["shape"]), path) for _, _, name in spans}


def _header(file: BinaryIO, path: Path, size: int) -> bytes:
    """Read the JSON at the beginning of a file; nothing else reads by a length that the file says."""
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8:
        raise UsageError(f"{path} is truncated: {size} bytes are no safetensors file")
    if length > _MAX_HEADER:
        raise UsageError(f"{path} is not a safetensors file: a header of {length} bytes is over {_MAX_HEADER}")
    if 8 + length > size:
        raise UsageError(f"{path} is truncated: header promises {8 + length} bytes, file has {size}")
    return file.read(length)


def _span(path: Path, name: str, entry: Any) -> tuple[int, int]:
    """Return the checked byte range of one header entry, relative to the first tensor byte."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise UsageError(f"{path}: tensor {name!r} has a malformed header entry")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPE_BYTES:
        raise UsageError(f"{path}: tensor {name!r} has unknown dtype {dtype!r}")
    if not _naturals(shape):
        raise UsageError(f"{path}: tensor {name!r} has a bad shape {shape!r}")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise UsageError(f"{path}: tensor {name!r} has bad offsets {offsets!r}")
    needed = _DTYPE_BYTES[dtype] * math.prod(shape)
    if offsets[1] - offsets[0] != needed:
        raise UsageError(f"{path}: tensor {name!r} {dtype}{shape} needs {needed} bytes, has {offsets[1] - offsets[0]}")
    return offsets[0], offsets[1]


def _naturals(value: Any) -> bool:
    if not isinstance(value, list) or len(value) > _MAX_DIMENSIONS:
        return False
    return all(type(item) is int and 0 <= item < _MAX_INTEGER for item in value)


def sample(path: Path) -> bytes:
    """Return bytes that identify a file: size, header, and pieces from the middle and the end.

    Size and header alone are equal in all fine-tunes of a model. Raises UsageError for a bad header."""
    size = path.stat().st_size
    with path.open("rb") as file:
        pieces = [size.to_bytes(8, "little"), _header(file, path, size)]
        for offset in (size // 2, size - _SAMPLE):
            file.seek(max(0, offset))
            pieces.append(file.read(_SAMPLE))
    return b"".join(pieces)


def parse_object(text: bytes, path: Path) -> dict[str, Any]:
    """Parse a JSON object; raise UsageError, which names `path`, also for duplicate keys and infinities."""
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} has bad JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _finite(number: str) -> float:
    if not math.isfinite(value := float(number)):
        raise ValueError(f"{number} is no number")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key occurs twice")
    return value
