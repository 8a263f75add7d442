"""Reads the header of a GGUF file, checked against the bytes that exist; nothing in it is trusted.

Format (little-endian): magic, version, tensor count, metadata count; metadata as (name, type, value); tensors as (name,
dimensions, type, offset); then the tensors from the next aligned byte on. The gguf library trusts lengths, and takes
ten seconds for a vocabulary of 262,144 tokens."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from ssd.errors import UsageError
from ssd.kernels.form import Form

FLOATS = ("F32", "F16", "BF16")
GGUF_FORMS: Mapping[str, Form] = {
    "Q4_0": Form(4, 32, 1, 2),
    "Q4_1": Form(4, 32, 2, 2),
    "Q5_0": Form(6, 32, 1, 2),
    "Q5_1": Form(6, 32, 2, 2),
    "Q8_0": Form(8, 32, 1, 2),
    "Q2_K": Form(4, 16, 2, 1, 256),
    "Q3_K": Form(4, 16, 1, 1, 256),
    "Q4_K": Form(4, 32, 2, 1, 256),
    "Q5_K": Form(6, 32, 2, 1, 256),
    "Q6_K": Form(6, 16, 1, 1, 256),
    "IQ4_NL": Form(4, 32, 1, 2),
    "IQ4_XS": Form(4, 32, 1, 1, 256),
    "MXFP4": Form(4, 32, 1, 1),
}
"""GGUF's name of a type of blocks -> the form that its weights are packed in."""
SUPPORTED = (*FLOATS, *GGUF_FORMS)
_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_MAX_STRING, _MAX_DIMENSIONS, _MAX_ALIGNMENT = 64 << 20, 4, 1 << 20
# Limits of the bytes before the tensors, far above any tokenizer's. The size of a sparse file is no limit.
_MAX_HEADER, _MAX_ENTRIES = 256 << 20, 1 << 20
_FIRST_READ = 1 << 20
_LENGTH = struct.Struct("<Q")
# GGUF's number of a type -> struct's format: uint8, int8, ..., float32, bool, then those of 64 bits.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY, _UINT32 = 8, 9, 4
_Read = TypeVar("_Read")
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class ByteSpan(NamedTuple):
    """The bytes of a tensor, its shape with the slowest dimension first, and GGUF's name of its type."""

    start: int
    stop: int
    name: str
    shape: tuple[int, ...]
    kind: str


class Header(NamedTuple):
    """A checked header: `fields` by name (numbers, texts, lists of them), tensors in order of their bytes."""

    file: Path
    fields: dict[str, Any]
    tensors: list[ByteSpan]


def shards_of(file: Path) -> list[Path]:
    """Return all files of a model; raise UsageError if `file` is not the first, or one is missing."""
    if (found := _SPLIT.fullmatch(file.name)) is None:
        return [file]
    name, number, count = found[1], int(found[2]), int(found[3])
    shards = [file.with_name(f"{name}-{index:05}-of-{count:05}.gguf") for index in range(1, count + 1)]
    if number != 1:
        raise UsageError(
            f"{file} is part {number} of a model in {count} files: name the first, ...-00001-of-{found[3]}.gguf"
        )
    for shard in shards:
        if not shard.is_file():
            raise UsageError(f"{file.parent} has no {shard.name}: {file.name} is the first of {count} files")
    return shards


def read_header(path: Path) -> Header:
    """Return the checked header of a file.

    Raises `UsageError` unless the file has all bytes that the header promises, under unique names and in known
    types."""
    try:
        with path.open("rb") as file:
            return _Reader(file, path).read()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


class _Reader:
    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path, self._size = file, path, path.stat().st_size
        self._bytes, self._at = b"", 0  # bytes read from the file, and how many are parsed
        self._entries = 0  # fields, elements of their arrays and tensors so far
        self._alignment = 32

    def read(self) -> Header:
        if self._take(4) != _MAGIC:
            raise UsageError(f"{self._path} is not a readable GGUF file: it does not begin with GGUF")
        if (version := self._number("<I")) not in _VERSIONS:
            raise UsageError(f"{self._path} has GGUF version {version}; {' and '.join(map(str, _VERSIONS))} are read")
        tensors, fields = self._number("<Q"), self._number("<Q")
        found = self._each_once("field", self._count(fields, 13), self._field)
        spans = list(self._each_once("tensor", self._count(tensors, 24), self._tensor).values())
        position = -(-self._at // self._alignment) * self._alignment
        room, previous = self._size - position, 0
        for start, stop, name, *_ in sorted(spans):
            if start < previous:
                raise UsageError(f"{self._path}: tensor {name!r} overlaps another")
            if stop > room:
                end = position + stop
                raise UsageError(f"{self._path} is truncated: tensor {name!r} ends at {end} of {self._size}")
            previous = stop
        placed = [span._replace(start=position + span.start, stop=position + span.stop) for span in sorted(spans)]
        return Header(self._path, found, placed)

    def _each_once(self, kind: str, count: int, read: Callable[[str], _Read]) -> dict[str, _Read]:
        found: dict[str, _Read] = {}
        for _ in range(count):
            name = self._string()
            if name in found:
                raise UsageError(f"{self._path}: {kind} {name!r} is there twice")
            found[name] = read(name)
        return found

    def _field(self, name: str) -> Any:
        kind = self._number("<I")
        if name == "general.alignment":
            self._alignment = self._number("<I") if kind == _UINT32 else 0
            if not 0 < self._alignment <= _MAX_ALIGNMENT or self._alignment & (self._alignment - 1):
                raise UsageError(f"{self._path}: general.alignment is no power of two")
            return self._alignment
        if kind != _ARRAY:
            return self._string() if kind == _STRING else self._numbers(name, kind, 1)[0]
        kind, count = self._number("<I"), self._number("<Q")
        return (
            [self._string() for _ in range(self._count(count, 8))]
            if kind == _STRING
            else self._numbers(name, kind, count)
        )

    def _numbers(self, name: str, kind: int, count: int) -> list[Any]:
        if kind not in _SCALARS:
            raise UsageError(f"{self._path}: field {name!r} has a type {kind} that is not known here")
        layout, size = _SCALARS[kind], struct.calcsize(f"<{_SCALARS[kind]}")
        return list(struct.unpack(f"<{count}{layout}", self._take(size * self._count(count, size))))

    def _tensor(self, name: str) -> ByteSpan:
        """Read a tensor's entry; its byte range is relative to the first tensor byte."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        dimensions = self._number("<I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise UsageError(f"{self._path}: tensor {name!r} has {dimensions} dimensions")
        shape = [self._number("<Q") for _ in range(dimensions)]
        number, start = self._number("<I"), self._number("<Q")
        known = {int(kind): kind for kind in GGMLQuantizationType}
        kind = known[number].name if number in known else str(number)
        if kind not in SUPPORTED:
            raise UsageError(f"{self._path}: tensor {name!r} has type {kind}; {', '.join(SUPPORTED)} are read")
        block, size = GGML_QUANT_SIZES[known[number]]
        if 0 in shape or shape[0] % block:
            raise UsageError(f"{self._path}: tensor {name!r} of {kind} has a bad shape {shape}")
        if start % self._alignment:
            raise UsageError(f"{self._path}: tensor {name!r} starts at {start}, which is not aligned")
        return ByteSpan(start, start + math.prod(shape) // block * size, name, tuple(reversed(shape)), kind)

    def _number(self, layout: str) -> int:
        value: int = struct.unpack(layout, self._take(struct.calcsize(layout)))[0]
        return value

    def _string(self) -> str:
        """Read a string, without helpers if its bytes are here: a vocabulary has hundreds of thousands."""
        start = self._at + _LENGTH.size
        if start > len(self._bytes):
            self._read_until(start)
        length: int = _LENGTH.unpack_from(self._bytes, self._at)[0]
        stop = start + length
        if stop > len(self._bytes):
            if length > _MAX_STRING:
                raise UsageError(f"{self._path}: a string of {length} bytes is over {_MAX_STRING}")
            self._read_until(stop)
        self._at = stop
        try:
            return self._bytes[start:stop].decode()
        except UnicodeDecodeError as error:
            raise UsageError(f"{self._path} has a string that is not UTF-8") from error

    def _count(self, count: int, each: int) -> int:
        """Return `count` if the file has room for as many entries of `each` bytes; raise UsageError if not."""
        if count * each > self._size - self._at:
            raise UsageError(f"{self._path} is truncated: no room for {count} entries")
        self._entries += count
        if self._entries > _MAX_ENTRIES:
            raise UsageError(f"{self._path}: its header has more than {_MAX_ENTRIES} entries")
        return count

    def _take(self, count: int) -> bytes:
        start, self._at = self._at, self._at + count
        self._read_until(self._at)
        return self._bytes[start : self._at]

    def _read_until(self, stop: int) -> None:
        if stop > self._size:
            raise UsageError(f"{self._path} is truncated: its header is longer than its {self._size} bytes")
        if stop > _MAX_HEADER:
            raise UsageError(f"{self._path}: its header is longer than {_MAX_HEADER} bytes")
        if stop > (known := len(self._bytes)):
            self._bytes += self._file.read(max(stop - known, known, _FIRST_READ))
        if stop > len(self._bytes):
            raise UsageError(f"{self._path} has become shorter while it was read")
