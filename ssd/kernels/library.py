"""The C functions, by ctypes. `kernels.h` says what each takes."""

from __future__ import annotations

import ctypes
from array import array
from ctypes import POINTER, c_float, c_int, c_int32, c_int64, c_uint8, c_uint64, c_void_p
from functools import cache

import torch
from torch import Tensor

from ssd.kernels import build


class Store(ctypes.Structure):
    """`store_t` of kernels.h."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("layer_size", c_int64),
        ("cell", c_int64),
        ("slots", c_void_p),
        ("begin", c_void_p),
        ("count", c_void_p),
        ("longest", c_int64),
    )


class Attend(ctypes.Structure):
    """`attend_t` of kernels.h."""

    _fields_ = (
        ("shared", POINTER(Store)),
        ("own", POINTER(Store)),
        ("q", c_void_p),
        ("out", c_void_p),
        ("q_stride", c_int64),
        ("layer", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("dim", c_int64),
        ("window", c_int64),
        ("scale", c_float),
        ("cap", c_float),
        ("sinks", c_void_p),
    )


class Product(ctypes.Structure):
    """`product_t` of kernels.h."""

    _fields_ = (
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("bytes", c_int64),
        ("bits", c_int64),
        ("group", c_int64),
        ("zero", c_int64),
        ("offsets", c_int64),
        ("wide", c_int64),
        ("parts", c_int64),
        ("rowwise", c_int64),
        ("span", c_int64),
        ("columns", c_int64),
        ("half", c_int64),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("next", c_void_p),
        ("named", c_int64),
        ("table", c_uint8 * 16),
    )


class Layer(ctypes.Structure):
    """`layer_t` of kernels.h."""

    _fields_ = (
        ("attention_norm", c_void_p),
        ("forward_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("token_norm", c_void_p),
        ("eps", c_float),
        ("qkv", Product),
        ("out", Product),
        ("gate_up", Product),
        ("down", Product),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("dim", c_int64),
        ("scale", c_float),
        ("window", c_int64),
        ("normed_residual", c_int64),
    )


class View(ctypes.Structure):
    """`view_t` of kernels.h."""

    _fields_ = (("shared", POINTER(Store)), ("own", POINTER(Store)), ("tokens", c_int64))


class Model(ctypes.Structure):
    """`model_t` of guess.c."""

    _fields_ = (
        ("embedding", POINTER(Product)),
        ("layers", POINTER(Layer)),
        ("count", c_int64),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("norm", c_void_p),
        ("eps", c_float),
        ("head", Product),
        ("ids", c_void_p),
        ("table", POINTER(Product)),
        ("mask", c_void_p),
        ("first", POINTER(Product)),
        ("second", POINTER(Product)),
    )


class Ask(ctypes.Structure):
    """`ask_t` of guess.c."""

    _fields_ = (
        ("index", c_int64),
        ("before", c_int64),
        ("after", c_int64),
        ("text", c_void_p),
        ("texts", c_int64),
        ("noise", c_void_p),
        ("temperature", c_float),
        ("key", c_int32 * 2),
    )


class Changes(ctypes.Structure):
    """`changes_t` of kernels.h."""

    _fields_ = (
        ("kept", c_void_p),
        ("made", c_void_p),
        ("size", c_int64),
        ("entries", c_void_p),
        ("total", c_int64),
        ("rows", c_void_p),
        ("count", c_int64),
    )


MAX_WINDOW = 64


class Convolution(ctypes.Structure):
    """`convolution_t` of kernels.h."""

    _fields_ = (
        ("changes", Changes),
        ("states", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("y", c_void_p),
        ("channels", c_int64),
        ("window", c_int64),
        ("silu", c_int64),
    )


class Delta(ctypes.Structure):
    """`delta_t` of kernels.h."""

    _fields_ = (
        ("changes", Changes),
        ("states", c_void_p),
        ("queries", c_void_p),
        ("query_stride", c_int64),
        ("decay", c_void_p),
        ("dt_bias", c_void_p),
        ("y", c_void_p),
        ("prepared", c_void_p),
        ("heads", c_int64),
        ("key_heads", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("tiled", c_int64),
    )


class Suffixes(ctypes.Structure):
    """`suffixes_t` of kernels.h."""

    _fields_ = (
        ("blocks", c_int64),
        ("next", c_int64),
        ("mask", c_int64),
        ("tokens", c_void_p),
        ("links", c_void_p * 2),
        ("heads", c_void_p * 2),
        ("headers", c_void_p),
    )


SUFFIX_TAIL = 32


class SuffixText(ctypes.Structure):
    """`suffix_text_t` of kernels.h."""

    _fields_ = (
        ("scope", c_uint64),
        ("block", c_int64),
        ("end", c_int64),
        ("owns", c_int64),
        ("length", c_int64),
        ("tail", c_int32 * SUFFIX_TAIL),
    )


_ROWS = (c_int64, c_int64)  # how many, and how many numbers each has
_SCORES = (c_void_p, c_int64, POINTER(c_float), POINTER(c_void_p), POINTER(c_int64))
_ARGUMENTS: dict[str, tuple[type, ...]] = {
    "rms_norm": (c_void_p, c_int64, c_void_p, c_void_p, *_ROWS, c_float),
    "silu_mul": (c_void_p, c_void_p, *_ROWS),
    "rotate": (c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int64, *_ROWS),
    "sigmoid_mul": (c_void_p, c_void_p, c_void_p, *_ROWS),
    "convolve": (POINTER(Convolution),),
    "gated_delta": (POINTER(Delta),),
    "expand": (c_void_p, c_int64, c_int64, c_void_p),
    "gumbel": (c_void_p, c_int32, c_void_p, c_void_p, *_ROWS),
    "dots": (POINTER(Product), c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p),
    "look_up": (POINTER(Product), c_void_p, c_void_p, c_int64),
    "draw": (*_SCORES, *_ROWS),
    "rank": (*_SCORES, POINTER(c_float), c_int64, *_ROWS),
    "multiply": (POINTER(Product), c_void_p, c_int64, c_void_p, c_int64, c_void_p),
    "read_only": (c_void_p, c_int64),
    "pack_groups": (POINTER(Product), c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
    "codes_used": (c_void_p, c_int64, c_void_p),
    "find_groups": (c_void_p, *_ROWS, c_int64, c_void_p, c_void_p, c_void_p),
    "round_groups": (c_void_p, *_ROWS, c_void_p, c_void_p, c_void_p),
    "put": (POINTER(Store), c_int64, c_void_p, c_int64, c_void_p, c_int64, c_int64, *_ROWS),
    "attend": (POINTER(Attend), c_int64, c_int64, c_void_p),
    "suffixes_begin": (POINTER(Suffixes), POINTER(SuffixText), c_void_p, c_int64),
    "suffixes_add": (POINTER(Suffixes), POINTER(SuffixText), c_void_p, c_int64),
    "suffixes_find": (POINTER(Suffixes), POINTER(SuffixText), c_int64, c_void_p, c_void_p, c_void_p),
    "decoder": (
        *(POINTER(Layer), c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int64),
        *(POINTER(View), c_int64, c_void_p),
    ),
    "remember": (
        *(POINTER(Layer), c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64),
        *(POINTER(Store), c_void_p),
    ),
    "guess": (
        *(POINTER(Model), c_void_p, POINTER(c_void_p), c_void_p, c_int64, POINTER(View), c_int64),
        *(POINTER(Ask), c_int64, c_int64, c_int64, c_void_p, POINTER(c_int64), POINTER(c_float), c_void_p),
    ),
    "go_on": (
        *(POINTER(Model), c_void_p, c_void_p, c_int64, POINTER(View)),
        *(POINTER(Ask), c_int64, c_int64, c_int64, c_int64, c_void_p, c_float, c_float),
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
