"""What the C files here offer, on tensors: float32 on a CPU, without gradients.

Each function computes a row from that row alone, in an order that depends on its length: it has the same bits in any
batch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_float, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from ssd.kernels.build import library

_NO_WINDOW = 2**62
_CHANNELS = 32  # as in products.c
_ZERO_POINT = 128
_LEVELS = {1: 127.0, 2: 32639.0}  # of 8 bits, and of 256 a + b with a and b from -127 to 127


class _Store(ctypes.Structure):
    """`store_t` of attention.c."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("layer_size", c_int64),
        ("slots", c_void_p),
        ("begin", c_void_p),
        ("count", c_void_p),
    )


_ROWS = (c_int64, c_int64)  # how many, and how many numbers each has
_ARGUMENTS: dict[str, tuple[type, ...]] = {
    "rms_norm": (c_void_p, c_int64, c_void_p, c_void_p, *_ROWS, c_float),
    "silu_mul": (c_void_p, c_void_p, *_ROWS),
    "rotate": (c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int64, *_ROWS),
    "float_product": (c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p, *_ROWS, c_int64),
    "split_bytes": (c_void_p, c_int64, c_int64, c_void_p, c_void_p, *_ROWS, c_float, c_float, c_float),
    "int8_product": (c_void_p, c_int64, *[c_void_p] * 6, *_ROWS, c_int64),
    "put": (POINTER(_Store), c_int64, c_void_p, c_int64, c_void_p, c_int64, *_ROWS),
    "attend": (
        *(POINTER(_Store), POINTER(_Store), c_int64, c_void_p, c_int64, c_void_p),
        *(c_int64, c_int64, c_int64, c_int64, c_int64, c_float, c_float, c_int64, c_void_p),
    ),
}


@cache
def _functions() -> ctypes.PyDLL | None:
    """The compiled functions. They take microseconds, in which no other thread of a process needs the interpreter."""
    path = library()
    if path is None:
        return None
    functions = ctypes.PyDLL(str(path))
    for name, arguments in _ARGUMENTS.items():
        function = getattr(functions, name)
        function.argtypes, function.restype = arguments, None
    return functions


def serve(tensor: Tensor) -> bool:
    """Whether these kernels can work on what is like `tensor`. The first time, they are compiled."""
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32 and _functions() is not None


def multiply_floats(weight: Tensor) -> bool:
    """Whether `FloatProduct` does for this weight, on this processor."""
    return serve(weight) and bool(_call().has_float_product())


def multiply_int8(inputs: int) -> bool:
    """The same of `Int8Product` and a weight of so many inputs."""
    return inputs % 4 == 0 and _functions() is not None and bool(_call().has_int8_product())


def _checked(x: Tensor) -> None:
    """`TypeError` for what would be read as something else than it is."""
    if x.dtype != torch.float32 or not x.is_cpu:
        raise TypeError(f"these kernels take float32 on a CPU, not {x.dtype} on {x.device}")


def _rows(x: Tensor, size: int) -> tuple[Tensor, int]:
    """x [..., size] as rows at a constant distance, and that distance; raises `ValueError` for another size."""
    _checked(x)
    if x.shape[-1] != size:
        raise ValueError(f"rows have {x.shape[-1]} numbers, not {size}")
    if x.dim() == 2 and x.stride(1) == 1:
        return x, x.stride(0)
    return x.contiguous(), size


def _heads(x: Tensor) -> Tensor:
    """x [n, heads, dim] with the heads of a token side by side."""
    _checked(x)
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., size] -> x / sqrt(mean(x^2) + eps) * weight."""
    size = weight.shape[0]
    x, stride = _rows(x, size)
    y = torch.empty(x.shape)
    _call().rms_norm(x.data_ptr(), stride, weight.data_ptr(), y.data_ptr(), x.numel() // size, size, eps)
    return y


def silu_mul(gate_up: Tensor) -> Tensor:
    """[n, 2 * size] -> silu(gate) * up [n, size], where gate is the first half of a row and up the second."""
    _checked(gate_up)
    gate_up = gate_up.contiguous()
    y = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2)
    _call().silu_mul(gate_up.data_ptr(), y.data_ptr(), *y.shape)
    return y


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [n, heads, dim], cos and sin [n, 1, dim] -> x * cos + (x with its halves swapped) * sin, contiguous."""
    x = _heads(x)
    y, (n, heads, dim) = torch.empty(x.shape), x.shape
    _call().rotate(x.data_ptr(), x.stride(0), cos.data_ptr(), sin.data_ptr(), y.data_ptr(), n, heads, dim)
    return y


class FloatProduct:
    """x [n, in] -> x W^T + b [n, out], for W [out, in] and b [out] in float32.

    A weight whose numbers are all bfloat16's, as most checkpoints have them, is kept in that: half of the bytes to read
    for the same products.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._outputs, self._inputs = weight.shape
        short = weight.bfloat16()
        kept = short if torch.equal(short.float(), weight) else weight
        self._weight, self._bias = _blocks(kept, 1), None if bias is None else _padded(bias)
        self._bytes = kept.element_size()

    def __call__(self, x: Tensor) -> Tensor:
        x, stride = _rows(x, self._inputs)
        y = torch.empty(x.shape[0], self._outputs)
        weight, bias = self._weight.data_ptr(), _pointer(self._bias)
        sizes = x.shape[0], self._inputs, self._outputs
        _call().float_product(x.data_ptr(), stride, weight, self._bytes, bias, y.data_ptr(), *sizes)
        return y


class Int8Product:
    """x [n, in] -> (integers W^T) * scales * sizes / levels + b [n, out]: W [out, in] int8, scales and b [out] float32,
    sizes [n] the largest magnitudes of the rows, or `least`, and the integers x / sizes * levels, rounded.

    They have 8 or 16 bits, multiplied in one or two `parts`. Sums are exact.
    """

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None, parts: int, least: float) -> None:
        self._outputs, self._inputs = weight.shape
        self._weight, self._scales = _blocks(weight, 4), _padded(scales / _LEVELS[parts])
        self._zeros = _padded(_ZERO_POINT * weight.sum(1, dtype=torch.int32))
        self._bias = None if bias is None else _padded(bias)
        self._parts = parts
        self._rounding = _LEVELS[parts], least, float(sum(_ZERO_POINT * 256**part for part in range(parts)))

    def __call__(self, x: Tensor) -> Tensor:
        (x, stride), n, parts = _rows(x, self._inputs), x.shape[0], self._parts
        numbers, sizes = torch.empty(parts * n * self._inputs, dtype=torch.uint8), torch.empty(n)
        call, y, bias = _call(), torch.empty(n, self._outputs), _pointer(self._bias)
        at, size_at = numbers.data_ptr(), sizes.data_ptr()
        call.split_bytes(x.data_ptr(), stride, parts, at, size_at, n, self._inputs, *self._rounding)
        weight = self._weight.data_ptr(), self._scales.data_ptr(), self._zeros.data_ptr()
        call.int8_product(at, parts, size_at, *weight, bias, y.data_ptr(), n, self._inputs, self._outputs)
        return y


def _blocks(weight: Tensor, together: int) -> Tensor:
    """[out, in] -> [blocks of channels, in / together, channels of a block, together], filled up with zeros."""
    inputs = weight.shape[1]
    blocks = _padded(weight).view(-1, _CHANNELS, inputs // together, together)
    return blocks.transpose(1, 2).contiguous()


def _padded(x: Tensor) -> Tensor:
    """x with zeros behind it, for whole blocks of channels."""
    missing = -x.shape[0] % _CHANNELS
    return torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing else x.contiguous()


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


class Places:
    """Where the keys and values are that each of n tokens sees: of those in `keys` and `values`
    [layers, slots, kv_heads, dim], token i sees the ones in slots[begin[i]] to slots[begin[i] + count[i] - 1], its own
    the last."""

    def __init__(self, keys: Tensor, values: Tensor, slots: Tensor, begin: Sequence[int], count: Sequence[int]) -> None:
        self._kept = keys, values, slots, torch.tensor(begin), torch.tensor(count)
        self._store = _Store(
            keys.data_ptr(), values.data_ptr(), keys.stride(0), *(t.data_ptr() for t in self._kept[2:])
        )
        self.longest = max(count, default=0)

    def put(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store what each token adds, k and v [n, kv_heads, dim]."""
        k, v, (n, kv_heads, dim) = _heads(k), _heads(v), k.shape
        _call().put(byref(self._store), layer, k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), n, kv_heads * dim)

    def attend(
        self,
        layer: int,
        q: Tensor,
        out: Tensor,
        tokens: range,
        scale: float,
        softcap: float | None = None,
        window: int | None = None,
        own: Places | None = None,
    ) -> None:
        """Attention of these `tokens`, q [n, heads, dim], into out [n, heads * dim]. Each sees what it shares with
        others here and behind that what is its `own`, of all of them the last `window`."""
        q, (_, heads, dim) = _heads(q), q.shape
        kv_heads = self._kept[0].shape[-2]
        scores = torch.empty(self.longest + (0 if own is None else own.longest))
        _call().attend(
            byref(self._store),
            None if own is None else byref(own._store),
            layer,
            q.data_ptr(),
            q.stride(0),
            out.data_ptr(),
            tokens.start,
            tokens.stop,
            heads,
            kv_heads,
            dim,
            scale,
            softcap or 0.0,
            window or _NO_WINDOW,
            scores.data_ptr(),
        )


def _call() -> ctypes.PyDLL:
    functions = _functions()
    assert functions is not None, "see `serve`"
    return functions
