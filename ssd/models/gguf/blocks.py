"""Reads GGUF's blocks as `Groups` with the same codes, steps and offsets: no weight is rounded.

The layouts are those of llama.cpp's ggml-common.h; bytes are little-endian."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from ssd.kernels.groups import Groups
from ssd.models.dequantize import E2M1, E2M1_ZERO, HALF_SCALES

if TYPE_CHECKING:
    import numpy as np

# Code of 4 bits -> number, in IQ4_NL and IQ4_XS.
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class _Unpacked(NamedTuple):
    """n unpacked blocks: `codes` uint8 [n, weights of a block], `steps` and `offsets` float32 [n, groups].

    In K types the steps are multiples of `unit` float32 [n, 1], the offsets of `offset_unit`."""

    codes: np.ndarray
    steps: np.ndarray
    offsets: np.ndarray | None = None
    unit: np.ndarray | None = None
    offset_unit: np.ndarray | None = None


def _fields(packed: np.ndarray, run: int, bits: int) -> np.ndarray:
    """Unpack numbers of `bits` from bytes [n, count] into uint8 [n, 8 / bits * count].

    The lowest bits of every `run` bytes come first, then their next ones."""
    import numpy as np

    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    numbers = packed.reshape(len(packed), -1, 1, run) >> shifts & np.uint8((1 << bits) - 1)
    return numbers.reshape(len(packed), -1)


def _halves(packed: np.ndarray) -> np.ndarray:
    """Read float16 in bytes [n, 2] as float32 [n, 1]."""
    return packed.copy().view("<f2").astype("f4")


def _q4_1(blocks: np.ndarray) -> _Unpacked:
    return _Unpacked(_fields(blocks[:, 4:], 16, 4), _halves(blocks[:, :2]), _halves(blocks[:, 2:4]))


def _fifth_bits(blocks: np.ndarray) -> np.ndarray:
    return _fields(blocks[:, 4:], 16, 4) | _fields(blocks[:, :4], 1, 1) << 4


def _q5_1(blocks: np.ndarray) -> _Unpacked:
    return _Unpacked(_fifth_bits(blocks[:, 4:]), _halves(blocks[:, :2]), _halves(blocks[:, 2:4]))


def _q2_k(blocks: np.ndarray) -> _Unpacked:
    scales, d, lowest = blocks[:, :16], _halves(blocks[:, 80:82]), _halves(blocks[:, 82:])
    return _Unpacked(_fields(blocks[:, 16:80], 32, 2), d * (scales & 15), -(lowest * (scales >> 4)), d, -lowest)


def _q3_k(blocks: np.ndarray) -> _Unpacked:
    scales = _fields(blocks[:, 96:104], 8, 4) | _fields(blocks[:, 104:108], 4, 2) << 4
    codes = _fields(blocks[:, 32:96], 32, 2) | _fields(blocks[:, :32], 32, 1) << 2
    d = _halves(blocks[:, 108:])
    return _Unpacked(codes, d * (scales.astype("f4") - 32), unit=d)


def _heads_of_k(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return steps and offsets [n, 8] and their units [n, 1] from the first 16 bytes of Q4_K and Q5_K."""
    import numpy as np

    first, second, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate((first & 63, rest & 15 | first >> 2 & 48), axis=1)
    lowest = np.concatenate((second & 63, rest >> 4 | second >> 2 & 48), axis=1)
    d, d_lowest = _halves(blocks[:, :2]), _halves(blocks[:, 2:4])
    return d * scales, -(d_lowest * lowest), d, -d_lowest


def _q5_k(blocks: np.ndarray) -> _Unpacked:
    codes = _fields(blocks[:, 48:], 32, 4) | _fields(blocks[:, 16:48], 32, 1) << 4
    return _Unpacked(codes, *_heads_of_k(blocks))


def _q6_k(blocks: np.ndarray) -> _Unpacked:
    codes = _fields(blocks[:, :128], 64, 4) | _fields(blocks[:, 128:192], 32, 2) << 4
    d = _halves(blocks[:, 208:])
    return _Unpacked(codes, d * blocks[:, 192:208].view("i1"), unit=d)


def _iq4(codes: np.ndarray) -> np.ndarray:
    import numpy as np

    return (np.array(_IQ4_VALUES) + 128).astype(np.uint8)[codes]


def _iq4_xs(blocks: np.ndarray) -> _Unpacked:
    scales = _fields(blocks[:, 4:8], 1, 4) | _fields(blocks[:, 2:4], 1, 2) << 4
    d = _halves(blocks[:, :2])
    return _Unpacked(_iq4(_fields(blocks[:, 8:], 16, 4)), d * (scales.astype("f4") - 32), unit=d)


def _mxfp4(blocks: np.ndarray) -> _Unpacked:
    import numpy as np

    codes = np.array(E2M1, np.uint8)[_fields(blocks[:, 1:], 16, 4)]
    return _Unpacked(codes, np.array(HALF_SCALES, np.float32)[blocks[:, :1]])


class _BlockKind(NamedTuple):
    """A type of blocks: `weights` numbers in `bytes`; the code `zero` stands for 0, before any offset."""

    weights: int
    bytes: int
    zero: int
    unpack: Callable[[np.ndarray], _Unpacked]


BLOCKS = {
    "Q4_0": _BlockKind(32, 18, 8, lambda blocks: _Unpacked(_fields(blocks[:, 2:], 16, 4), _halves(blocks[:, :2]))),
    "Q4_1": _BlockKind(32, 20, 0, _q4_1),
    "Q5_0": _BlockKind(32, 22, 16, lambda blocks: _Unpacked(_fifth_bits(blocks[:, 2:]), _halves(blocks[:, :2]))),
    "Q5_1": _BlockKind(32, 24, 0, _q5_1),
    "Q8_0": _BlockKind(32, 34, 128, lambda blocks: _Unpacked(blocks[:, 2:] ^ 128, _halves(blocks[:, :2]))),
    "Q2_K": _BlockKind(256, 84, 0, _q2_k),
    "Q3_K": _BlockKind(256, 110, 4, _q3_k),
    "Q4_K": _BlockKind(256, 144, 0, lambda blocks: _Unpacked(_fields(blocks[:, 16:], 32, 4), *_heads_of_k(blocks))),
    "Q5_K": _BlockKind(256, 176, 0, _q5_k),
    "Q6_K": _BlockKind(256, 210, 32, _q6_k),
    "IQ4_NL": _BlockKind(
        32, 18, 128, lambda blocks: _Unpacked(_iq4(_fields(blocks[:, 2:], 16, 4)), _halves(blocks[:, :2]))
    ),
    "IQ4_XS": _BlockKind(256, 136, 128, _iq4_xs),
    "MXFP4": _BlockKind(32, 17, E2M1_ZERO, _mxfp4),
}
"""GGUF's name of a type of blocks -> its layout."""


def groups_of(kind: str, rows: np.ndarray) -> Groups:
    """Return the weight [out, in] of `rows`, uint8 [out, bytes of a row], in blocks of the type `kind`.

    It equals gguf's `dequantize` bit for bit."""
    import numpy as np

    outputs, blocks = len(rows), BLOCKS[kind]
    with np.errstate(invalid="ignore"):  # the reader of the tensor refuses numbers that are not finite
        parts = blocks.unpack(rows.reshape(-1, blocks.bytes))
    codes, steps, offsets, *units = (
        None if part is None else torch.from_numpy(part.reshape(outputs, -1)) for part in parts
    )
    assert codes is not None and steps is not None
    return Groups(codes, steps, offsets, blocks.zero, tuple(unit for unit in units if unit is not None))
