"""The C functions, by ctypes. `kernels.h` and guess.c say what each takes; `Store` here is `store_t` there."""

from __future__ import annotations

import ctypes
from array import array
from ctypes import POINTER, c_float, c_int, c_int32, c_int64, c_uint8, c_uint64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ssd.kernels import build


def _declared(*fields: tuple[type[Any], str]) -> list[tuple[str, type[Any]]]:
    return [(name, kind) for kind, names in fields for name in names.split(", ")]


class Store(ctypes.Structure):
    _fields_ = _declared(
        (c_void_p, "keys, values"),
        (c_int64, "layer_size, cell"),
        (c_void_p, "slots, begin, count"),
        (c_int64, "longest"),
    )


class Attend(ctypes.Structure):
    _fields_ = _declared(
        (POINTER(Store), "shared, own"),
        (c_void_p, "q, out"),
        (c_int64, "q_stride, layer, heads, kv_heads, dim, window"),
        (c_float, "scale, cap"),
        (c_void_p, "sinks"),
    )


class CProduct(ctypes.Structure):
    _fields_ = _declared(
        (c_int64, "inputs, outputs, bytes, bits, group, zero, offsets, wide, parts, rowwise, span, columns, half"),
        (c_void_p, "weight, bias, next"),
        (c_int64, "named"),
        (c_uint8 * 16, "table"),
    )


class CLayer(ctypes.Structure):
    _fields_ = _declared(
        (c_void_p, "attention_norm, forward_norm, q_norm, k_norm, token_norm"),
        (c_float, "eps"),
        (CProduct, "qkv, out, gate_up, down"),
        (c_int64, "heads, kv_heads, dim"),
        (c_float, "scale"),
        (c_int64, "window, normed_residual"),
    )


class CView(ctypes.Structure):
    _fields_ = _declared((POINTER(Store), "shared, own"), (c_int64, "tokens"))


class CModel(ctypes.Structure):
    _fields_ = _declared(
        (POINTER(CProduct), "embedding"),
        (POINTER(CLayer), "layers"),
        (c_int64, "count"),
        (c_void_p, "cosines, sines, norm"),
        (c_float, "eps"),
        (CProduct, "head"),
        (c_void_p, "ids"),
        (POINTER(CProduct), "table"),
        (c_void_p, "mask"),
        (POINTER(CProduct), "first, second"),
    )


class CAsk(ctypes.Structure):
    _fields_ = _declared(
        (c_int64, "index, before, after"),
        (c_void_p, "text"),
        (c_int64, "texts"),
        (c_void_p, "noise"),
        (c_float, "temperature"),
        (c_int32 * 2, "key"),
    )


class Changes(ctypes.Structure):
    _fields_ = _declared(
        (c_void_p, "kept, made"),
        (c_int64, "size"),
        (c_void_p, "entries"),
        (c_int64, "total"),
        (c_void_p, "rows"),
        (c_int64, "count"),
    )


MAX_WINDOW = 64


class Convolution(ctypes.Structure):
    _fields_ = _declared(
        (Changes, "changes"),
        (c_void_p, "states, weight, bias, y"),
        (c_int64, "channels, window, silu"),
    )


class CDelta(ctypes.Structure):
    _fields_ = _declared(
        (Changes, "changes"),
        (c_void_p, "states, queries"),
        (c_int64, "query_stride"),
        (c_void_p, "decay, dt_bias, y, prepared"),
        (c_int64, "heads, key_heads, key_dim, value_dim, tiled"),
    )


class Suffixes(ctypes.Structure):
    _fields_ = _declared(
        (c_int64, "blocks, next, mask"),
        (c_void_p, "tokens"),
        (c_void_p * 2, "links, heads"),
        (c_void_p, "headers"),
    )


SUFFIX_TAIL = 32


class SuffixText(ctypes.Structure):
    _fields_ = _declared(
        (c_uint64, "scope"),
        (c_int64, "block, end, owns, length"),
        (c_int32 * SUFFIX_TAIL, "tail"),
    )


_ROWS = (c_int64, c_int64)  # how many, and how many numbers each has
_SCORES = (c_void_p, c_int64, POINTER(c_float), POINTER(c_void_p), POINTER(c_int64))
_ARGUMENTS: dict[str, tuple[type, ...]] = {
    "rms_norm": (c_void_p, c_int64, c_void_p, c_void_p, *_ROWS, c_float),
    "silu_mul": (c_void_p, c_void_p, *_ROWS),
    "rotate": (c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int64, *_ROWS),
    "sigmoid_mul": (c_void_p, c_void_p, c_void_p, *_ROWS),
    "convolve": (POINTER(Convolution),),
    "gated_delta": (POINTER(CDelta),),
    "expand": (c_void_p, c_int64, c_int64, c_void_p),
    "gumbel": (c_void_p, c_int32, c_void_p, c_void_p, *_ROWS),
    "dots": (POINTER(CProduct), c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p),
    "look_up": (POINTER(CProduct), c_void_p, c_void_p, c_int64),
    "draw": (*_SCORES, *_ROWS),
    "rank": (*_SCORES, POINTER(c_float), c_int64, *_ROWS),
    "multiply": (POINTER(CProduct), c_void_p, c_int64, c_void_p, c_int64, c_void_p),
    "read_only": (c_void_p, c_int64),
    "pack_groups": (POINTER(CProduct), c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
    "codes_used": (c_void_p, c_int64, c_void_p),
    "find_groups": (c_void_p, *_ROWS, c_int64, c_void_p, c_void_p, c_void_p),
    "round_groups": (c_void_p, *_ROWS, c_void_p, c_void_p, c_void_p),
    "put": (POINTER(Store), c_int64, c_void_p, c_int64, c_void_p, c_int64, c_int64, *_ROWS),
    "attend": (POINTER(Attend), c_int64, c_int64, c_void_p),
    "suffixes_begin": (POINTER(Suffixes), POINTER(SuffixText), c_void_p, c_int64),
    "suffixes_add": (POINTER(Suffixes), POINTER(SuffixText), c_void_p, c_int64),
    "suffixes_find": (POINTER(Suffixes), POINTER(SuffixText), c_int64, c_void_p, c_void_p, c_void_p),
    "decoder": (
        *(POINTER(CLayer), c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int64),
        *(POINTER(CView), c_int64, c_void_p),
    ),
    "remember": (
        *(POINTER(CLayer), c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, POINTER(Store), c_void_p),
    ),
    "guess": (
        *(POINTER(CModel), c_void_p, POINTER(c_void_p), c_void_p, c_int64, POINTER(CView), c_int64),
        *(POINTER(CAsk), c_int64, c_int64, c_int64, c_void_p, POINTER(c_int64), POINTER(c_float), c_void_p),
    ),
    "go_on": (
        *(POINTER(CModel), c_void_p, c_void_p, c_int64, POINTER(CView)),
        *(POINTER(CAsk), c_int64, c_int64, c_int64, c_int64, c_void_p, c_float, c_float),
        *(c_void_p, POINTER(c_int64), POINTER(c_float), c_void_p),
    ),
}


@cache
def functions() -> ctypes.PyDLL | None:
    """Return the compiled library, None if there is none. Its functions keep the GIL while they run."""
    path = build.library()
    if path is None:
        return None
    found = ctypes.PyDLL(str(path))
    for name, arguments in _ARGUMENTS.items():
        function = getattr(found, name)
        function.argtypes, function.restype = arguments, None
    found.find_groups.restype = c_int
    found.suffixes_begin.restype = found.suffixes_find.restype = found.go_on.restype = c_int64
    return found


def call() -> ctypes.PyDLL:
    found = functions()
    assert found is not None, "see `ssd.kernels.cpu.serve`"
    return found


_scratch = torch.empty(0, dtype=torch.uint8)
_SPARE = 2**24  # bytes, for the next larger call


def scratch(size: int) -> Tensor:
    """Return at least `size` bytes for one call, in which no other thread runs. Keep a reference until it ends."""
    global _scratch
    if _scratch.numel() < size:
        _scratch = torch.empty(size + min(size, _SPARE), dtype=torch.uint8)
    return _scratch


def address(numbers: array[int]) -> int:
    """Return the address of an array's numbers. The array must live, and not grow, while it is used."""
    return numbers.buffer_info()[0]


def pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
