"""What the C files here offer, on tensors: float32 on a CPU, without gradients.

Each function computes a row from that row alone, in an order that depends on its length: it has the same bits in any
batch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_float, c_int64, c_void_p

import torch
from torch import Tensor

from ssd.kernels import library
from ssd.kernels.library import call, pointer, scratch

_CHANNELS = 32  # as in products.h
_GROUP = 32  # as in groups.c
_GROUPED = {4: _CHANNELS * (4 + _GROUP // 2), 8: _CHANNELS * (2 + _GROUP)}  # bits: bytes of a block's group
_ZERO_POINT = 128
_LEVELS = {1: 127.0, 2: 32639.0}  # of 8 bits, and of 256 a + b with a and b from -127 to 127


def present(device: torch.device) -> bool:
    """Whether there are kernels for a device. The first time, they are compiled."""
    return device.type == "cpu" and library.functions() is not None


def serve(tensor: Tensor) -> bool:
    """Whether these kernels can work on what is like `tensor`."""
    return tensor.dtype == torch.float32 and present(tensor.device)


def multiply_floats(weight: Tensor) -> bool:
    """Whether `FloatProduct` does for this weight, on this processor."""
    return serve(weight) and bool(call().has_float_product())


def multiply_int8(inputs: int) -> bool:
    """The same of `Int8Product` and a weight of so many inputs."""
    return inputs % 4 == 0 and library.functions() is not None and bool(call().has_int8_product())


def check(x: Tensor) -> None:
    """`TypeError` for what would be read as something else than it is."""
    if x.dtype != torch.float32 or not x.is_cpu:
        raise TypeError(f"these kernels take float32 on a CPU, not {x.dtype} on {x.device}")


def _rows(x: Tensor, size: int) -> tuple[Tensor, int]:
    """x [..., size] as rows at a constant distance, and that distance; raises `ValueError` for another size."""
    check(x)
    if x.shape[-1] != size:
        raise ValueError(f"rows have {x.shape[-1]} numbers, not {size}")
    if x.dim() == 2 and x.stride(1) == 1:
        return x, x.stride(0)
    return x.contiguous(), size


def by_heads(x: Tensor) -> Tensor:
    """x [n, heads, dim] with the heads of a token side by side."""
    check(x)
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., size] -> x / sqrt(mean(x^2) + eps) * weight."""
    size = weight.shape[0]
    x, stride = _rows(x, size)
    y = torch.empty(x.shape)
    call().rms_norm(x.data_ptr(), stride, weight.data_ptr(), y.data_ptr(), x.numel() // size, size, eps)
    return y


def silu_mul(gate_up: Tensor) -> Tensor:
    """[n, 2 * size] -> silu(gate) * up [n, size], where gate is the first half of a row and up the second."""
    check(gate_up)
    gate_up = gate_up.contiguous()
    y = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2)
    call().silu_mul(gate_up.data_ptr(), y.data_ptr(), *y.shape)
    return y


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [n, heads, dim], cos and sin [n, 1, dim] -> x * cos + (x with its halves swapped) * sin, contiguous."""
    x = by_heads(x)
    y, (n, heads, dim) = torch.empty(x.shape), x.shape
    call().rotate(x.data_ptr(), x.stride(0), cos.data_ptr(), sin.data_ptr(), y.data_ptr(), n, heads, dim)
    return y


def gumbel(keys: Tensor, first: int, size: int) -> Tensor:
    """float32 [n, size] of Gumbel noise for the token ids from `first` on, by keys int32 [n, 2]."""
    keys = keys.contiguous()
    y = torch.empty(keys.shape[0], size)
    call().gumbel(keys.data_ptr(), first, y.data_ptr(), *y.shape)
    return y


Warmth = Sequence[tuple[float, Tensor] | None]
"""For each row of logits [n, V] the temperature that it is divided by, and the noise, float32 [V or more], that is
added to that; None for a row that is greedy."""


def draw(logits: Tensor, warmth: Warmth | None = None) -> list[int]:
    """The id of the largest number of each row of [n, V], the lowest one on a tie; -1 for a row that holds a NaN or no
    finite maximum."""
    logits, stride = _rows(logits, logits.shape[1])
    ids = (c_int64 * len(logits))()
    call().draw(logits.data_ptr(), stride, *_warmth(warmth, logits), ids, *logits.shape)
    return list(ids)


def rank(logits: Tensor, count: int, warmth: Warmth | None = None) -> list[list[int]]:
    """The ids of the `count` largest numbers of each row of [n, V], at most V, the lowest one of equals first; what is
    no number comes last."""
    logits, stride = _rows(logits, logits.shape[1])
    ids = (c_int64 * (len(logits) * count))()
    call().rank(logits.data_ptr(), stride, *_warmth(warmth, logits), ids, count, *logits.shape)
    return [ids[start : start + count] for start in range(0, len(ids), count)]


def _warmth(rows: Warmth | None, logits: Tensor) -> tuple[ctypes.Array[c_float] | None, ctypes.Array[c_void_p] | None]:
    """Temperatures, and the addresses of the noise. Raises `ValueError` for too little of it."""
    if rows is None:
        return None, None
    if len(rows) != len(logits) or any(row and len(row[1]) < logits.shape[1] for row in rows):
        raise ValueError(f"{len(rows)} rows of noise for logits {list(logits.shape)}")
    temperatures = (c_float * len(rows))(*(row[0] if row else 0.0 for row in rows))
    return temperatures, (c_void_p * len(rows))(*(row[1].data_ptr() if row else None for row in rows))


class Product:
    """x [n, in] -> [n, out] by a packed weight, `struct`, whose tensors are `kept`."""

    def __init__(self, struct: library.Product, *kept: Tensor | None) -> None:
        self.struct, self._kept = struct, kept
        self._inputs, self._outputs = int(struct.inputs), int(struct.outputs)
        self.row_bytes = 4 + int(struct.parts) * self._inputs  # of scratch

    def __call__(self, x: Tensor) -> Tensor:
        (x, stride), n = _rows(x, self._inputs), x.shape[0]
        y = torch.empty(n, self._outputs)
        room = scratch(n * self.row_bytes)
        call().multiply(byref(self.struct), x.data_ptr(), stride, y.data_ptr(), n, room.data_ptr())
        return y


def float_product(weight: Tensor, bias: Tensor | None) -> Product:
    """x -> x W^T + b, for W [out, in] and b [out] in float32.

    A weight whose numbers are all bfloat16's, as most checkpoints have them, is kept in that, and one whose numbers
    were made of few bits, in these: fewer bytes to read for the same products, bit by bit.
    """
    weight = weight.contiguous()
    grouped = next(filter(None, (_grouped(weight, bits) for bits in _GROUPED)), None)
    if grouped is not None:
        size, (bits, packed) = 0, grouped
    else:
        short = weight.bfloat16()
        packed = _blocks(short if torch.equal(short.float(), weight) else weight, 1)
        size, bits = packed.element_size(), 0
    padded = None if bias is None else _padded(bias)
    outputs, inputs = weight.shape
    struct = library.Product(inputs, outputs, size, bits, 0, packed.data_ptr(), None, pointer(padded))
    return Product(struct, packed, padded)


def _grouped(weight: Tensor, bits: int) -> tuple[int, Tensor] | None:
    """`weight` in groups of numbers of so many bits (groups.c), and these; None if its numbers are not such."""
    outputs, inputs = weight.shape
    if inputs % _GROUP:
        return None
    packed = torch.zeros(-(-outputs // _CHANNELS) * inputs // _GROUP * _GROUPED[bits], dtype=torch.uint8)
    sound = call().pack_groups(weight.data_ptr(), outputs, inputs, bits, packed.data_ptr())
    return (bits, packed) if sound else None


def int8_product(weight: Tensor, scales: Tensor, bias: Tensor | None, parts: int, least: float) -> Product:
    """x -> (integers W^T) * scales * sizes / levels + b: W [out, in] int8, scales and b [out] float32, sizes [n] the
    largest magnitudes of the rows, or `least`, and the integers x / sizes * levels, rounded.

    They have 8 or 16 bits, multiplied in one or two `parts`. Sums are exact.
    """
    outputs, inputs = weight.shape
    zeros = _padded(_ZERO_POINT * weight.sum(1, dtype=torch.int32))
    packed, scales = _blocks(weight, 4), _padded(scales / _LEVELS[parts])
    padded = None if bias is None else _padded(bias)
    pointers = packed.data_ptr(), scales.data_ptr(), pointer(padded), zeros.data_ptr()
    zero = float(sum(_ZERO_POINT * 256**part for part in range(parts)))
    struct = library.Product(inputs, outputs, 1, 0, parts, *pointers, _LEVELS[parts], least, zero)
    return Product(struct, packed, scales, padded, zeros)


def _blocks(weight: Tensor, together: int) -> Tensor:
    """[out, in] -> [blocks of channels, in / together, channels of a block, together], filled up with zeros."""
    inputs = weight.shape[1]
    blocks = _padded(weight).view(-1, _CHANNELS, inputs // together, together)
    return blocks.transpose(1, 2).contiguous()


def _padded(x: Tensor) -> Tensor:
    """x with zeros behind it, for whole blocks of channels."""
    missing = -x.shape[0] % _CHANNELS
    return torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing else x.contiguous()
