"""Linear layers that multiply 8-bit integers: a quarter of float32's bytes to read, and sums without rounding."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from ssd.kernels import cpu

# Rows the packed layout is laid out for, as in `ssd.layers.linear`.
_ROWS_HINT = 16
# Output channels that are rounded at a time, so that no second copy of a large weight is made.
_CHANNELS = 1024
# The scale of channels and rows that are all zero.
_TINY = 1e-30
# A row's numbers become integers of 16 bits, from -_LEVELS to _LEVELS, and those the numbers 256 a + b of two bytes,
# which stand for a and b with 128 added.
_LEVELS = 32639.0
_ZERO_POINT = 128


class Int8Linear:
    """y = x W^T + b for float32 x [n, in] -> y [n, out] on a CPU; W in 8 bits, x in twice 8.

    Every output channel of W has a scale, and so has every row of x, found when it comes. A row is multiplied as two,
    of its high and its low bytes: with 8 bits alone, the few large numbers of a row leave too few for the others
    (docs/performance.md). Integers are summed exactly: the result of a row is the same bits in any company.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, coarse: bool = False) -> None:
        """`weight` [out, in], `bias` [out]. The caller should drop its own reference to `weight`. With `coarse`, 8 bits
        of x may do: for advice they are as good, and half of the work (docs/performance.md)."""
        self.out_features, self.in_features = weight.shape
        ours = cpu.multiply_int8(self.in_features)
        rounded, scales = _rounded(weight, 127 if ours else _weight_levels())
        self.product: Callable[[Tensor], Tensor]
        if ours:
            self.product = cpu.int8_product(rounded, scales, bias, 1 if coarse else 2, _TINY)
        else:
            self.product = _OneDnnProduct(rounded, scales, bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x)


class _OneDnnProduct:
    """The same as `cpu.int8_product` with 16 bits, in steps of torch's."""

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        self._weight, self._scales, self._bias = _pack(weight), scales / _LEVELS, bias
        self._zeros = torch.zeros(weight.shape[0], dtype=torch.long)
        # Tensors, since a number would be made one in every call.
        self._levels = torch.tensor(_LEVELS)
        # Added to an integer of 16 bits, it makes a float32 of which that is the last two bytes: 1.5 * 2^23 has its
        # units in the last place.
        self._to_bytes = torch.full((weight.shape[1],), 1.5 * 2**23 + 256 * _ZERO_POINT + _ZERO_POINT)

    def __call__(self, x: Tensor) -> Tensor:
        n, width = x.shape
        largest = x.abs().amax(-1, keepdim=True).clamp_min_(_TINY)
        # No fused multiply-add: whether one rounds once or twice may depend on where in a batch a row lies.
        integers = (x.contiguous() * (self._levels / largest)).add_(self._to_bytes)
        rows = integers.view(torch.uint8).as_strided((2, n, width), (1, 4 * width, 4)).contiguous()
        low, high = _multiply(rows, _ZERO_POINT, self._weight, self._scales, self._zeros).unbind()
        y = torch.add(low, high, alpha=256).mul_(largest)
        return y if self._bias is None else y.add_(self._bias)


def _rounded(weight: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """(int8 [out, in] from -levels to levels, float32 [out]): `weight`, rounded, and the scales of its channels."""
    rounded, scales = torch.empty(weight.shape, dtype=torch.int8), torch.empty(weight.shape[0])
    parts = zip(weight.split(_CHANNELS), rounded.split(_CHANNELS), scales.split(_CHANNELS), strict=True)
    for part, part_rounded, part_scales in parts:
        part_scales.copy_(part.abs().amax(1)).clamp_min_(_TINY).div_(levels)
        part_rounded.copy_((part / part_scales[:, None]).round_())
    return rounded, scales


def _pack(weight: Tensor) -> Tensor:
    """int8 [out, in] in the layout of oneDNN's product."""
    packed: Tensor = torch.ops.onednn.qlinear_prepack(weight, [_ROWS_HINT, weight.shape[1]])
    return packed


def _multiply(rows: Tensor, zero_point: int, weight: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """(rows - zero_point) W^T * scales: uint8 [..., in] -> float32 [..., out], summed in integers of 32 bits."""
    product: Tensor = torch.ops.onednn.qlinear_pointwise(
        rows, 1.0, zero_point, weight, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return product


@cache
def _weight_levels() -> int:
    """How many levels a weight has on either side of zero: 127, where the processor sums products of 8 bits in 32.

    Without VNNI it sums pairs of them in 16, which hold products with weights of 7 bits; found by trying.
    """
    weight, rows = torch.full((16, 64), 127, dtype=torch.int8), torch.full((1, 64), 255, dtype=torch.uint8)
    product = _multiply(rows, 0, _pack(weight), torch.ones(16), torch.zeros(16, dtype=torch.long))
    return 127 if bool((product == 64 * 127 * 255).all()) else 63
