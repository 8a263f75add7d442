"""Weights of few bits in groups, and their products (groups.c, grouped.c, rounded.c)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Literal

import torch
from torch import Tensor

from ssd.kernels import library
from ssd.kernels.cpu import CHANNELS, Product, multiply_floats, whole_blocks
from ssd.kernels.library import call, pointer

Parts = Literal[0, 1, 2]
"""Bytes of an input that is rounded to an integer; 0: it stays float32."""

# GGUF's formats that `find_groups` knows: bits and zero.
_FOUND = ((4, 0), (8, 128))
_FOUND_GROUP = 32


@dataclass(frozen=True)
class Groups:
    """A weight [out, in] of numbers steps * (codes - zero), or steps * codes + offsets.

    `codes` uint8 [out, in]. `steps` and `offsets` float32 [out, groups], for in / groups inputs each."""

    codes: Tensor
    steps: Tensor
    offsets: Tensor | None
    zero: int = 0

    def __post_init__(self) -> None:
        if self.offsets is not None and self.zero:
            raise ValueError(f"a weight with offsets has the zero 0, not {self.zero}")

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def group(self) -> int:
        """Inputs of a group."""
        return self.shape[1] // self.steps.shape[1]

    def dequantized(self) -> Tensor:
        """The weight in float32, each number with one rounding."""
        if self.offsets is None:
            return ((self.codes.float() - self.zero).view(*self.steps.shape, -1) * self.steps[..., None]).flatten(1)
        numbers = self.codes.double().view(*self.steps.shape, -1) * self.steps[..., None]
        return numbers.add_(self.offsets[..., None]).float().flatten(1)

    def __getitem__(self, piece: tuple[slice, ...]) -> Groups | None:
        """The weight of some outputs, and if a second slice says so of some inputs; None if that cuts a group."""
        rows, columns = (*piece, slice(None), slice(None))[:2]
        start, stop, _ = columns.indices(self.shape[1])
        if start % self.group or stop % self.group:
            return None
        groups = slice(start // self.group, stop // self.group)
        offsets = None if self.offsets is None else self.offsets[rows, groups]
        return Groups(self.codes[rows, columns], self.steps[rows, groups], offsets, self.zero)


def outputs_of(weight: Tensor | Groups, which: slice | Tensor) -> Tensor | Groups:
    """The weight of some outputs: a slice, or int64 [n] of them."""
    if isinstance(weight, Tensor):
        return weight[which]
    offsets = None if weight.offsets is None else weight.offsets[which]
    return Groups(weight.codes[which], weight.steps[which], offsets, weight.zero)


def equal(one: Tensor | Groups, other: Tensor | Groups) -> bool:
    """True if two weights have the same numbers, and are in the same form."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    parts = [(one.codes, other.codes), (one.steps, other.steps)]
    if one.offsets is not None and other.offsets is not None:
        parts.append((one.offsets, other.offsets))
    alike = one.zero == other.zero and (one.offsets is None) == (other.offsets is None)
    return alike and all(torch.equal(*pair) for pair in parts)


def find_groups(weight: Tensor) -> Groups | None:
    """The groups of a float32 weight that was dequantised from GGUF's Q4_0, Q4_1 or Q8_0; None for any other."""
    outputs, inputs = weight.shape
    if inputs % _FOUND_GROUP or not multiply_floats(weight):
        return None
    weight, codes = weight.contiguous(), torch.empty(outputs, inputs, dtype=torch.uint8)
    steps, offsets = torch.empty(2, outputs, inputs // _FOUND_GROUP)
    addresses = codes.data_ptr(), steps.data_ptr(), offsets.data_ptr()
    for bits, zero in _FOUND:
        if call().find_groups(weight.data_ptr(), outputs, inputs, bits, *addresses):
            return Groups(codes, steps, None if zero else offsets, zero)
    return None


def grouped_product(weight: Groups, bias: Tensor | None, parts: Parts = 0) -> Product:
    """Pack a weight and b [out] for x W^T + b, for groups of a multiple of 4 inputs.

    Without `parts` the bits are those of the dequantised weight's `float_product`. Else inputs are rounded to 8 or 16
    bits, with a scale for every 32 of them; all processors give the same bits. See `takes`."""
    outputs, inputs = weight.shape
    bits = 4 if int(weight.codes.max()) < 16 else 8
    heads = [part.contiguous() for part in (weight.steps, weight.offsets) if part is not None]
    wide = not all(torch.equal(part.half().float(), part) for part in heads)
    codes, bias = weight.codes.contiguous(), None if bias is None else whole_blocks(bias)
    struct = library.Product(inputs, outputs, 0, bits, weight.group, weight.zero, len(heads) - 1, wide, parts)
    group_bytes = len(heads) * (4 if wide else 2) + weight.group * bits // 8
    channels = -(-outputs // CHANNELS) * CHANNELS
    packed = torch.zeros(channels * weight.steps.shape[1] * group_bytes, dtype=torch.uint8)
    offsets = heads[1] if len(heads) == 2 else None
    call().pack_groups(struct, codes.data_ptr(), heads[0].data_ptr(), pointer(offsets), packed.data_ptr())
    struct.weight, struct.bias = packed.data_ptr(), pointer(bias)
    return Product(struct, packed, bias)


def rows_apart(weight: Tensor | Groups) -> Product:
    """Lay a weight out output after output: for `Product.rows` and `Product.dots` alone."""
    if isinstance(weight, Tensor):
        short = weight.bfloat16()
        kept = (short if torch.equal(short.float(), weight) else weight).contiguous()
        struct = library.Product(
            weight.shape[1], weight.shape[0], kept.element_size(), weight=kept.data_ptr(), rowwise=1
        )
        return Product(struct, kept)
    outputs, inputs = weight.shape
    heads = [part.contiguous() for part in (weight.steps, weight.offsets) if part is not None]
    kept = torch.cat([*(head.view(torch.uint8) for head in heads), weight.codes], dim=1)
    struct = library.Product(inputs, outputs, 0, 8, weight.group, weight.zero, len(heads) - 1, weight=kept.data_ptr())
    struct.rowwise = 1
    return Product(struct, kept)


def takes(weight: Groups) -> bool:
    """True if `grouped_product` takes this weight on this processor."""
    return weight.group % 4 == 0 and multiply_floats(weight.steps)


def stacked(weights: Sequence[Groups]) -> Groups | None:
    """The weights [out, in] one below the other, as one, with the same numbers.

    Its groups divide those of every weight. None if codes would be over 255, or an offset would be rounded."""
    group, zero = gcd(*(weight.group for weight in weights)), max(weight.zero for weight in weights)
    shifted = any(weight.offsets is not None for weight in weights)
    if not shifted and any(int(weight.codes.max()) + zero - weight.zero > 255 for weight in weights):
        return None
    codes = torch.cat([weight.codes if shifted else weight.codes + (zero - weight.zero) for weight in weights])
    steps = torch.cat([weight.steps.repeat_interleave(weight.group // group, 1) for weight in weights])
    if not shifted:
        return Groups(codes, steps, None, zero)
    offsets: list[Tensor] = []
    for weight in weights:
        own = exact_offsets(weight.zero, weight.steps) if weight.offsets is None else weight.offsets
        if own is None:
            return None
        offsets.append(own.repeat_interleave(weight.group // group, 1))
    return Groups(codes, steps, torch.cat(offsets))


def exact_offsets(zeros: Tensor | int, steps: Tensor) -> Tensor | None:
    """The offsets float32 that say the same as `zeros`; None if float32 would round one."""
    offsets = -zeros * steps
    return offsets if torch.equal(offsets.double(), -zeros * steps.double()) else None
