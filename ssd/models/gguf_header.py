"""The header of a GGUF file, checked against the bytes that exist; nothing in it is trusted.

Format (little-endian): magic, version, tensor count, metadata count; metadata as (name, type, value); tensors as (name,
dimensions, type, offset); then the tensors from the next aligned byte on. The gguf library believes lengths and counts.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ssd.errors import UsageError

FLOATS = ("F32", "F16", "BF16")
PACKED = {"Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 26), "Q5_1": (32, 28), "Q8_0": (32, 34)}
PACKED |= {"Q2_K": (256, 164), "Q3_K": (256, 146), "Q4_K": (256, 148), "Q5_K": (256, 212), "Q6_K": (256, 210)}
PACKED |= {"IQ4_NL": (32, 34), "IQ4_XS": (256, 266)}
"""A type of blocks -> the weights of a block, and the bytes that `ssd.kernels.groups.grouped_product` keeps it in."""
SUPPORTED = (*FLOATS, *PACKED)
_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_MAX_STRING, _MAX_DIMENSIONS, _MAX_ALIGNMENT = 64 << 20, 4, 1 << 20
# Of a header before its tensors: no tokenizer comes near. A file may have more room, as one with holes has.
_MAX_HEADER, _MAX_ENTRIES = 256 << 20, 1 << 20
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY, _UINT32 = 8, 9, 4
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class Span(NamedTuple):
    """The bytes of a tensor, its name, its shape with the slowest dimension first, and GGUF's name of its type."""

    start: int
    stop: int
    name: str
    shape: tuple[int, ...]
    kind: str


def shards_of(file: Path) -> list[Path]:
    """The files of a model that llama.cpp's gguf-split wrote, of which `file` is the first; else `file` alone.

    Raises UsageError for another of them, and when one is missing."""
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


def check_gguf(path: Path) -> list[Span]:
    """The tensors of a file, in the order of their bytes. Raise `UsageError` unless all that the header promises is in
    the file, once, in types that are read here."""
    try:
        with path.open("rb") as file:
            return _Header(file, path).check()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


class _Header:
    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path, self._size = file, path, path.stat().st_size
        self._entries = 0  # fields, elements of their arrays and tensors so far
        self._alignment = 32

    def check(self) -> list[Span]:
        if self._take(4) != _MAGIC:
            raise UsageError(f"{self._path} is not a readable GGUF file: it does not begin with GGUF")
        if (version := self._number("<I")) not in _VERSIONS:
            raise UsageError(f"{self._path} has GGUF version {version}; {' and '.join(map(str, _VERSIONS))} are read")
        tensors, fields = self._number("<Q"), self._number("<Q")
        self._each_once("field", self._count(fields, 13), self._field)
        spans: list[Span] = []
        self._each_once("tensor", self._count(tensors, 24), lambda name: spans.append(self._tensor(name)))
        position = -(-self._file.tell() // self._alignment) * self._alignment
        room, previous = self._size - position, 0
        for start, stop, name, *_ in sorted(spans):
            if start < previous:
                raise UsageError(f"{self._path}: tensor {name!r} overlaps another")
            if stop > room:
                end = position + stop
                raise UsageError(f"{self._path} is truncated: tensor {name!r} ends at {end} of {self._size}")
            previous = stop
        return [span._replace(start=position + span.start, stop=position + span.stop) for span in sorted(spans)]

    def _each_once(self, kind: str, count: int, read: Callable[[str], None]) -> None:
        names: set[str] = set()
        for _ in range(count):
            name = self._string()
            if name in names:
                raise UsageError(f"{self._path}: {kind} {name!r} is there twice")
            names.add(name)
            read(name)

    def _field(self, name: str) -> None:
        kind = self._number("<I")
        if name == "general.alignment":
            self._alignment = self._number("<I") if kind == _UINT32 else 0
            if not 0 < self._alignment <= _MAX_ALIGNMENT or self._alignment & (self._alignment - 1):
                raise UsageError(f"{self._path}: general.alignment is no power of two")
        elif kind == _ARRAY:
            kind, count = self._number("<I"), self._number("<Q")
            if kind == _STRING:
                for _ in range(self._count(count, 8)):
                    self._string()
            else:
                size = self._scalar(name, kind)
                self._file.seek(size * self._count(count, size), 1)
        elif kind == _STRING:
            self._string()
        else:
            self._take(self._scalar(name, kind))

    def _scalar(self, name: str, kind: int) -> int:
        if kind not in _SCALAR_BYTES:
            raise UsageError(f"{self._path}: field {name!r} has a type {kind} that is not known here")
        return _SCALAR_BYTES[kind]

    def _tensor(self, name: str) -> Span:
        """The byte range of a tensor, relative to the first tensor byte."""
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
        return Span(start, start + math.prod(shape) // block * size, name, tuple(reversed(shape)), kind)

    def _number(self, layout: str) -> int:
        value: int = struct.unpack(layout, self._take(struct.calcsize(layout)))[0]
        return value

    def _string(self) -> str:
        length = self._number("<Q")
        if length > _MAX_STRING:
            raise UsageError(f"{self._path}: a string of {length} bytes is over {_MAX_STRING}")
        try:
            return self._take(length).decode()
        except UnicodeDecodeError as error:
            raise UsageError(f"{self._path} has a string that is not UTF-8") from error

    def _count(self, count: int, each: int) -> int:
        """`count` things of at least `each` bytes, if there is room for them and they are not too many."""
        if count * each > self._size - self._file.tell():
            raise UsageError(f"{self._path} is truncated: no room for {count} entries")
        self._entries += count
        if self._entries > _MAX_ENTRIES:
            raise UsageError(f"{self._path}: its header has more than {_MAX_ENTRIES} entries")
        return count

    def _take(self, count: int) -> bytes:
        if count > self._size - self._file.tell():
            raise UsageError(f"{self._path} is truncated: its header is longer than its {self._size} bytes")
        if count > _MAX_HEADER - self._file.tell():
            raise UsageError(f"{self._path}: its header is longer than {_MAX_HEADER} bytes")
        return self._file.read(count)
