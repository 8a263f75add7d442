"""Linear layers in 8-bit integers: a quarter of float32's bytes to read, and exact sums."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from ssd.kernels.groups import (
    Grouped,
    Groups,
    Parts,
    Stack,
    find_groups,
    grouped_product,
    rounded_to_4_bits,
    stacked,
    takes,
)

# Rows that oneDNN optimises a weight's layout for, as in `ssd.layers.linear`.
_ROWS_HINT = 16
# Output channels rounded at a time, so that a large weight is never copied as a whole.
_CHANNELS = 1024
# A weight's integers are from -LEVELS to LEVELS.
LEVELS = 127
# The scale of channels and rows that are all zero.
_TINY = 1e-30
# A row's numbers become 16-bit integers from -_LEVELS to _LEVELS. Each is 256 a + b; two bytes hold a and b with 128
# added.
_LEVELS = 32639.0
_ZERO_POINT = 128


class Int8Linear:
    """y = x W^T + b for float32 x [n, in] -> y [n, out] on a CPU; W in 8 bits, or in the groups of its checkpoint.

    Inputs are rounded to 16 bits (docs/performance.md). Sums of integers are exact, so a row's result has the same bits
    in any batch."""

    def __init__(
        self, weight: Tensor | Grouped, bias: Tensor | None = None, parts: Parts = 2, light: bool = False
    ) -> None:
        """`weight` [out, in], `bias` [out]; drop other references to `weight` to free it.

        `light`: weights are rounded to 4 bits where a kernel takes them. `parts`: bytes that inputs are rounded to;
        oneDNN takes 2."""
        self.out_features, self.in_features = weight.shape
        self.product: Callable[[Tensor], Tensor]
        weight = _lightened(weight) if light else weight
        groups = find_groups(weight) or _rounded(weight) if isinstance(weight, Tensor) else weight
        if takes(groups):
            self.product = grouped_product(groups, bias, parts)
        else:
            dense = weight if isinstance(weight, Tensor) else weight.dequantized()
            rounded, scales = round_to_int8(dense, _weight_levels())
            self.product = _OneDnnProduct(rounded, scales, bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x)


def _lightened(weight: Tensor | Grouped) -> Tensor | Grouped:
    if isinstance(weight, Stack):
        parts = [_lightened(part) for part in weight.parts]
        assert all(isinstance(part, Groups) for part in parts)
        return stacked([part for part in parts if isinstance(part, Groups)])
    found = find_groups(weight) or weight if isinstance(weight, Tensor) else weight
    if isinstance(found, Groups) and found.bits == 4:
        return found
    floats = weight if isinstance(weight, Tensor) else weight.dequantized()
    return rounded_to_4_bits(floats) or weight


def _rounded(weight: Tensor) -> Groups:
    rounded, scales = round_to_int8(weight, LEVELS)
    return Groups(rounded.view(torch.uint8).bitwise_xor_(128), scales[:, None], None, 128)


class _OneDnnProduct:
    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        self._weight, self._scales, self._bias = _pack(weight), scales / _LEVELS, bias
        self._zeros = torch.zeros(weight.shape[0], dtype=torch.long)
        # A tensor, as torch would make one from a number in every call.
        self._levels = torch.tensor(_LEVELS, dtype=torch.float32)
        # Added to a 16-bit integer, this makes a float32 whose last two bytes are that integer: at 1.5 * 2^23 the unit
        # in the last place is 1.
        self._to_bytes = torch.full((weight.shape[1],), 1.5 * 2**23 + 257 * _ZERO_POINT, dtype=torch.float32)

    def __call__(self, x: Tensor) -> Tensor:
        n, width = x.shape
        largest = x.abs().amax(-1, keepdim=True).clamp_min_(_TINY)
        # No fused multiply-add: its use, and so the rounding, may depend on a row's place in the batch.
        integers = (x.contiguous() * (self._levels / largest)).add_(self._to_bytes)
        rows = integers.view(torch.uint8).as_strided((2, n, width), (1, 4 * width, 4)).contiguous()
        low, high = _multiply(rows, _ZERO_POINT, self._weight, self._scales, self._zeros).unbind()
        y = torch.add(low, high, alpha=256).mul_(largest)
        return y if self._bias is None else y.add_(self._bias)


def round_to_int8(weight: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Return `weight` as int8 [out, in] from -levels to levels, and the channels' scales float32 [out]."""
    rounded, scales = torch.empty(weight.shape, dtype=torch.int8), torch.empty(weight.shape[0], dtype=torch.float32)
    parts = zip(weight.split(_CHANNELS), rounded.split(_CHANNELS), scales.split(_CHANNELS), strict=True)
    for part, part_rounded, part_scales in parts:
        part_scales.copy_(part.abs().amax(1)).clamp_min_(_TINY).div_(levels)
        part_rounded.copy_((part / part_scales[:, None]).round_())
    return rounded, scales


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.onednn.qlinear_prepack(weight, [_ROWS_HINT, weight.shape[1]])
    return packed


def _multiply(rows: Tensor, zero_point: int, weight: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Compute (rows - zero_point) W^T * scales: uint8 [..., in] -> float32 [..., out]."""
    product: Tensor = torch.ops.onednn.qlinear_pointwise(
        rows, 1.0, zero_point, weight, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return product


@cache
def _weight_levels() -> int:
    # Without VNNI pairs of 8-bit products are added in 16 bits, which overflow with weights of more than 7 bits.
    weight, rows = torch.full((16, 64), 127, dtype=torch.int8), torch.full((1, 64), 255, dtype=torch.uint8)
    product = _multiply(rows, 0, _pack(weight), torch.ones(16, dtype=torch.float32), torch.zeros(16, dtype=torch.long))
    return LEVELS if bool((product == 64 * 127 * 255).all()) else 63
