"""The kernels of the C files on tensors: float32 on a CPU, without gradients.

Each function computes a row from that row alone, in an order that depends only on its length, so a row's result has the
same bits in any batch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_float, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from ssd.kernels import library
from ssd.kernels.form import CHANNELS
from ssd.kernels.library import call, pointer, scratch

_DOTS = 16
"""Rows of a table that are unpacked at a time, as in kernels.h."""


def present(device: torch.device) -> bool:
    return device.type == "cpu" and library.functions() is not None


def serve(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and present(tensor.device)


def multiply_floats(weight: Tensor) -> bool:
    """Return True if `float_product` takes this weight here: with AVX2, or on a 64-bit ARM."""
    return serve(weight) and bool(call().has_products())


def check(x: Tensor) -> None:
    """Raise `TypeError` unless x is float32 on a CPU: the kernels read bare memory."""
    if x.dtype != torch.float32 or not x.is_cpu:
        raise TypeError(f"these kernels take float32 on a CPU, not {x.dtype} on {x.device}")


def _rows(x: Tensor, size: int) -> tuple[Tensor, int]:
    """Return x [..., size] as rows, and their stride. Raises `ValueError` for another size."""
    check(x)
    if x.shape[-1] != size:
        raise ValueError(f"rows have {x.shape[-1]} numbers, not {size}")
    if x.dim() == 2 and x.stride(1) == 1:
        return x, x.stride(0)
    return x.contiguous(), size


def by_heads(x: Tensor) -> Tensor:
    check(x)
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Map x [..., size] -> x / sqrt(mean(x^2) + eps) * weight."""
    size = weight.shape[0]
    x, stride = _rows(x, size)
    y = torch.empty(x.shape, dtype=torch.float32)
    call().rms_norm(x.data_ptr(), stride, weight.data_ptr(), y.data_ptr(), x.numel() // size, size, eps)
    return y


def check_places(places: Sequence[int], rows: int) -> None:
    if places and not 0 <= min(places) <= max(places) < rows:
        raise IndexError(f"places from {min(places)} to {max(places)} in a table of {rows} rows")


def silu_mul(gate_up: Tensor) -> Tensor:
    """Map (gate, up) [n, 2 * size] -> silu(gate) * up [n, size]."""
    check(gate_up)
    gate_up = gate_up.contiguous()
    y = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=torch.float32)
    call().silu_mul(gate_up.data_ptr(), y.data_ptr(), *y.shape)
    return y


def sigmoid_mul(gate: Tensor, x: Tensor) -> Tensor:
    check(gate)
    check(x)
    if gate.shape != x.shape:
        raise ValueError(f"gates {list(gate.shape)} of numbers {list(x.shape)}")
    gate, x, y = gate.contiguous(), x.contiguous(), torch.empty(x.shape, dtype=torch.float32)
    call().sigmoid_mul(gate.data_ptr(), x.data_ptr(), y.data_ptr(), *y.shape)
    return y


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [n, heads, dim] by cos and sin [n, 1, dim]: x * cos + (x with its halves swapped) * sin."""
    x = by_heads(x)
    y, (n, heads, dim) = torch.empty(x.shape, dtype=torch.float32), x.shape
    call().rotate(x.data_ptr(), x.stride(0), cos.data_ptr(), sin.data_ptr(), y.data_ptr(), n, heads, dim)
    return y


def gumbels_of(keys: Tensor, size: int, first: int = 0, ids: Tensor | None = None) -> Tensor:
    """Return Gumbel noise float32 [n, size] for keys int32 [n, 2], of `ids` int64 [size] or from id `first` on."""
    keys, ids = keys.contiguous(), None if ids is None else ids.contiguous()
    y = torch.empty(keys.shape[0], size if ids is None else ids.shape[0], dtype=torch.float32)
    call().gumbel(keys.data_ptr(), first, library.pointer(ids), y.data_ptr(), *y.shape)
    return y


Warmth = Sequence[tuple[float, Tensor] | None]
"""For each row of logits [n, V] its temperature and the noise float32 [V or more] to add; None for a greedy row."""


def draw(logits: Tensor, warmth: Warmth | None = None) -> list[int]:
    """Return the id of each row's largest logit, the lowest on a tie; -1 with a NaN or no finite maximum."""
    logits, stride = _rows(logits, logits.shape[1])
    ids = (c_int64 * len(logits))()
    call().draw(logits.data_ptr(), stride, *_warmth(warmth, logits), ids, *logits.shape)
    return list(ids)


class Ranked(NamedTuple):
    ids: list[list[int]]
    scores: list[list[float]]


def rank(logits: Tensor, count: int, warmth: Warmth | None = None) -> Ranked:
    """Return the `count` <= V largest logits of each row of [n, V]: lower ids first on a tie, NaNs last and as -inf."""
    logits, stride = _rows(logits, logits.shape[1])
    size = len(logits) * count
    ids, best = (c_int64 * size)(), (c_float * size)()
    call().rank(logits.data_ptr(), stride, *_warmth(warmth, logits), ids, best, count, *logits.shape)
    return ranked_lists(ids, best, count)


def ranked_lists(ids: ctypes.Array[c_int64], scores: ctypes.Array[c_float], count: int) -> Ranked:
    places = [slice(start, start + count) for start in range(0, len(ids), count)]
    return Ranked([ids[place] for place in places], [scores[place] for place in places])


def _warmth(rows: Warmth | None, logits: Tensor) -> tuple[ctypes.Array[c_float] | None, ctypes.Array[c_void_p] | None]:
    """Return temperatures, and addresses of the noise. Raises `ValueError`."""
    if rows is None:
        return None, None
    if len(rows) != len(logits) or any(row and len(row[1]) < logits.shape[1] for row in rows):
        raise ValueError(f"{len(rows)} rows of noise for logits {list(logits.shape)}")
    temperatures = (c_float * len(rows))(*(row[0] if row else 0.0 for row in rows))
    return temperatures, (c_void_p * len(rows))(*(row[1].data_ptr() if row else None for row in rows))


class Product:
    """Multiplies x [n, in] -> [n, out] by the packed weight of `struct`; keeps its tensors alive."""

    def __init__(self, struct: library.CProduct, *kept: Tensor | None) -> None:
        struct.columns = struct.outputs
        self.struct, self._kept = struct, kept
        self._inputs, self._outputs = int(struct.inputs), int(struct.outputs)
        self.row_bytes = (int(struct.parts) + 4) * self._inputs if struct.parts else 0  # of scratch
        self._next: Product | None = None

    def __call__(self, x: Tensor) -> Tensor:
        (x, stride), n = _rows(x, self._inputs), x.shape[0]
        y = torch.empty(n, int(self.struct.columns), dtype=torch.float32)
        memory = scratch(n * self.row_bytes)
        call().multiply(byref(self.struct), x.data_ptr(), stride, y.data_ptr(), n, memory.data_ptr())
        return y

    @property
    def bytes(self) -> int:
        return sum(part.nbytes for part in self._kept if part is not None)

    def rows(self, places: Tensor) -> Tensor:
        """Return the rows [n, in] of the weight in float32 at `places` int64 [n]. Raises `IndexError`."""
        if places.dtype != torch.int64 or places.dim() != 1:
            raise TypeError(f"places {places.dtype} {list(places.shape)}")
        places = places.contiguous()
        check_places(places.tolist(), self._outputs)
        y = torch.empty(places.shape[0], self._inputs, dtype=torch.float32)
        call().look_up(byref(self.struct), places.data_ptr(), y.data_ptr(), places.shape[0])
        return y

    def dots(self, x: Tensor, places: Tensor) -> Tensor:
        """Multiply x [n, in] by the rows at `places` int64 [k] -> [n, k]. Nothing checks `places`."""
        x, places = _rows(x, self._inputs)[0].contiguous(), places.contiguous()
        y, memory = torch.empty(x.shape[0], places.shape[0], dtype=torch.float32), scratch(self.dots_bytes)
        addresses = x.data_ptr(), places.data_ptr(), places.shape[0], y.data_ptr(), x.shape[0], memory.data_ptr()
        call().dots(byref(self.struct), *addresses)
        return y

    @property
    def dots_bytes(self) -> int:
        return 4 * _DOTS * self._inputs


def chain(products: Sequence[Product]) -> Product:
    """Chain products of the same inputs; return the first, which now computes all: x -> [n, sum of out]."""
    columns = sum(int(product.struct.outputs) for product in products)
    for product, following in zip(products, [*products[1:], None], strict=True):
        product.struct.columns, product._next = columns, following
        product.struct.next = None if following is None else ctypes.addressof(following.struct)
    products[0].row_bytes = max(product.row_bytes for product in products)
    return products[0]


def float_product(weight: Tensor, bias: Tensor | None) -> Product:
    """Pack W [out, in] and b [out], float32, for x W^T + b, in 16 bits if they hold all numbers of W."""
    outputs, inputs = weight.shape
    kept, bias = whole_blocks(shortest(weight)), None if bias is None else whole_blocks(bias)
    packed = kept.view(-1, CHANNELS, inputs).transpose(1, 2).contiguous()
    struct = library.CProduct(inputs, outputs, packed.element_size(), weight=packed.data_ptr(), bias=pointer(bias))
    struct.half = packed.dtype == torch.float16
    return Product(struct, packed, bias)


def shortest(weight: Tensor) -> Tensor:
    for short in (weight.to(kind) for kind in (torch.bfloat16, torch.float16)):
        if torch.equal(short.float(), weight):
            return short.contiguous()
    return weight.contiguous()


def whole_blocks(x: Tensor) -> Tensor:
    """Pad x [out, ...] with zeros to whole blocks of channels."""
    missing = -x.shape[0] % CHANNELS
    return torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing else x.contiguous()
