"""Weights of few bits in groups, and their products (groups.c, grouped.c, rounded.c)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor

from ssd.kernels import library
from ssd.kernels.cpu import Product, chain, multiply_floats, shortest, whole_blocks
from ssd.kernels.form import Form
from ssd.kernels.library import call, pointer

Parts = Literal[0, 1, 2]
"""Bytes of an input that is rounded to an integer; 0: it stays float32."""

# GGUF's formats that `find_groups` knows: bits and zero.
_FOUND = ((4, 0), (8, 128))
_FOUND_GROUP = 32
_POWERS = 2  # as in groups.h


@dataclass(frozen=True)
class Groups:
    """A weight [out, in] of numbers steps * (codes - zero), or steps * codes + offsets.

    `codes` uint8 [out, in]. `steps` and `offsets` float32 [out, groups], for in / groups inputs each. If all are whole
    multiples, -128 to 127, of float16 numbers, `units` may have these numbers, float32 [out, spans]: for the steps,
    then for any offsets. `e4m3`: codes are FP8 numbers, without offsets and zero, for GPUs."""

    codes: Tensor
    steps: Tensor
    offsets: Tensor | None
    zero: int = 0
    units: tuple[Tensor, ...] = ()
    e4m3: bool = False
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.offsets is not None and self.zero:
            raise ValueError(f"a weight with offsets has the zero 0, not {self.zero}")

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def group(self) -> int:
        """Return the number of inputs of a group."""
        return self.shape[1] // self.steps.shape[1]

    @cached_property
    def table(self) -> Tensor | None:
        """Return the codes, if some have more than 4 bits but at most 16 differ (as of MXFP4), uint8 [16]; else None.

        Only for our CPU kernels."""
        if int(self.codes.max()) < 16 or not multiply_floats(self.steps):
            return None
        used, codes = torch.zeros(256, dtype=torch.uint8), self.codes.contiguous()
        call().codes_used(codes.data_ptr(), codes.numel(), used.data_ptr())
        found = used.nonzero().flatten().to(torch.uint8)
        return torch.cat((found, found[-1:].expand(16 - len(found)))) if len(found) <= 16 else None

    @property
    def bits(self) -> int:
        """Return the bits that a code takes in a packed weight."""
        most = int(self.codes.max())
        small = most < 16 or self.table is not None
        return 4 if small else 6 if most < 64 and self.group % 8 == 0 else 8

    @property
    def heads(self) -> list[Tensor]:
        return [part for part in (self.steps, self.offsets) if part is not None]

    @property
    def kind(self) -> tuple[object, ...]:
        """Return the properties that two weights must share to be joined into one."""
        spans = self.units[0].shape[1] if self.units else 0
        return self.bits, self.table is None, self.group, self.zero, len(self.heads), spans, self.e4m3

    def dequantized(self) -> Tensor:
        """Compute the weight in float32, each number rounded once, and return it in `dtype`."""
        if self.offsets is None:
            numbers = self.codes.view(torch.float8_e4m3fn).float() if self.e4m3 else self.codes.float() - self.zero
            return (numbers.view(*self.steps.shape, -1) * self.steps[..., None]).flatten(1).to(self.dtype)
        numbers = self.codes.double().view(*self.steps.shape, -1) * self.steps[..., None]
        return numbers.add_(self.offsets[..., None]).float().flatten(1).to(self.dtype)

    def map(self, change: Callable[[Tensor], Tensor]) -> Groups:
        offsets = None if self.offsets is None else change(self.offsets)
        codes, steps, units = change(self.codes), change(self.steps), tuple(map(change, self.units))
        return replace(self, codes=codes, steps=steps, offsets=offsets, units=units)

    def uncut(self, piece: tuple[slice, ...]) -> Groups:
        """Return the weight in groups so small that these slices of outputs and inputs cut none."""
        start, stop, _ = (*piece, slice(None), slice(None))[1].indices(self.shape[1])
        repeats = self.group // math.gcd(self.group, start, stop)

        def finer(of: Tensor) -> Tensor:
            return of.repeat_interleave(repeats, 1)

        offsets = None if self.offsets is None else finer(self.offsets)
        return self if repeats == 1 else replace(self, steps=finer(self.steps), offsets=offsets, units=())

    def __getitem__(self, piece: tuple[slice, ...]) -> Groups | None:
        """Return the weight of some outputs and, with a second slice, of some inputs; None if that cuts a group."""
        rows, columns = (*piece, slice(None), slice(None))[:2]
        start, stop, _ = columns.indices(self.shape[1])
        if start % self.group or stop % self.group:
            return None
        span = self.shape[1] // self.units[0].shape[1] if self.units else self.group
        whole = self if start % span == 0 == stop % span else replace(self, units=())

        def part(of: Tensor) -> Tensor:
            inputs = self.shape[1] // of.shape[1]
            return of[rows, start // inputs : stop // inputs]

        return whole.map(part)


@dataclass(frozen=True)
class Stack:
    """Weights [out, in] one below the other, each in groups of its own kind."""

    parts: tuple[Groups, ...]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]))

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    def dequantized(self) -> Tensor:
        return torch.cat([part.dequantized() for part in self.parts])


Grouped = Groups | Stack


def outputs_of(weight: Tensor | Groups, which: slice | Tensor) -> Tensor | Groups:
    """Return the weight of the outputs `which`: a slice, or int64 [n]."""
    return weight[which] if isinstance(weight, Tensor) else weight.map(lambda part: part[which])


def equal(one: Tensor | Groups, other: Tensor | Groups) -> bool:
    """Return True if two weights have the same numbers in the same form."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    parts = [(one.codes, other.codes), (one.steps, other.steps)]
    if one.offsets is not None and other.offsets is not None:
        parts.append((one.offsets, other.offsets))
    alike = (one.zero, one.e4m3, one.offsets is None) == (other.zero, other.e4m3, other.offsets is None)
    return alike and all(torch.equal(*pair) for pair in parts)


def find_groups(weight: Tensor) -> Groups | None:
    """Return the groups of a float32 weight that comes from GGUF's Q4_0, Q4_1 or Q8_0; None for any other."""
    outputs, inputs = weight.shape
    if inputs % _FOUND_GROUP or not multiply_floats(weight):
        return None
    weight, codes = weight.contiguous(), torch.empty(outputs, inputs, dtype=torch.uint8)
    steps, offsets = torch.empty(2, outputs, inputs // _FOUND_GROUP, dtype=torch.float32)
    addresses = codes.data_ptr(), steps.data_ptr(), offsets.data_ptr()
    for bits, zero in _FOUND:
        if call().find_groups(weight.data_ptr(), outputs, inputs, bits, *addresses):
            return Groups(codes, steps, None if zero else offsets, zero)
    return None


def rounded_to_4_bits(weight: Tensor) -> Groups | None:
    """Round a float32 weight to 4 bits, with a step and an offset of 8 bits for 32 inputs; None if it cannot be."""
    outputs, inputs = weight.shape
    if inputs % _FOUND_GROUP or not multiply_floats(weight):
        return None
    weight, codes = weight.contiguous(), torch.empty(outputs, inputs, dtype=torch.uint8)
    lines, units = weight.new_empty(outputs, 2, inputs // _FOUND_GROUP), weight.new_empty(outputs, 2, 1)
    addresses = codes.data_ptr(), lines.data_ptr(), units.data_ptr()
    call().round_groups(weight.data_ptr(), outputs, inputs, *addresses)
    (steps, offsets), own = lines.unbind(1), units.unbind(1)
    return Groups(codes, steps, offsets, units=own)


def grouped_product(weight: Grouped, bias: Tensor | None, parts: Parts = 0) -> Product:
    """Pack a weight that it `takes`, and b [out], for x W^T + b.

    Without `parts` the bits are those of the dequantised weight's `float_product`. Else inputs are rounded to 8 or 16
    bits, with a scale for every 32; all processors give the same bits."""
    if isinstance(weight, Groups):
        return _packed(weight, bias, parts)
    sizes = [part.shape[0] for part in weight.parts]
    biases = [None] * len(sizes) if bias is None else bias.split(sizes)
    return chain([_packed(part, own, parts) for part, own in zip(weight.parts, biases, strict=True)])


def _packed(weight: Groups, bias: Tensor | None, parts: Parts) -> Product:
    outputs, inputs = weight.shape
    multiples, heads, bits = multiples_of(weight), weight.heads, weight.bits
    wide = _POWERS if _are_powers(heads) else not all(torch.equal(part.half().float(), part) for part in heads)
    struct = library.CProduct(inputs, outputs, 0, bits, weight.group, weight.zero, len(heads) - 1, wide, parts)
    head_bytes, units = {0: 2, 1: 4, _POWERS: 1}[wide], None
    if weight.table is not None:
        struct.named, struct.table[:] = 1, weight.table.tolist()
    if multiples is not None:
        heads, units, head_bytes = multiples, torch.cat(weight.units), 1
        struct.wide, struct.span = 0, inputs // weight.units[0].shape[1]
    heads = [part.contiguous() for part in heads]
    form = Form(bits, weight.group, len(heads), head_bytes, int(struct.span))
    codes, bias = weight.codes.contiguous(), None if bias is None else whole_blocks(bias)
    packed = torch.zeros(form.nbytes(outputs, inputs), dtype=torch.uint8)
    offsets = heads[1] if len(heads) == 2 else None
    addresses = codes.data_ptr(), heads[0].data_ptr(), pointer(offsets), pointer(units), packed.data_ptr()
    call().pack_groups(struct, *addresses)
    struct.weight, struct.bias = packed.data_ptr(), pointer(bias)
    return Product(struct, packed, bias)


def _are_powers(heads: Sequence[Tensor]) -> bool:
    # Normal numbers of float32.
    bits = heads[0].view(torch.int32)
    return len(heads) == 1 and bool(((bits & 0x7FFFFF == 0) & (bits > 0) & (bits < 0x7F800000)).all())


def multiples_of(weight: Groups) -> list[Tensor] | None:
    """Return the steps, and any offsets, as multiples of units; None if a byte cannot hold one exactly."""
    found = []
    for part, unit in zip(weight.heads, weight.units, strict=False):
        each = unit.repeat_interleave(part.shape[1] // unit.shape[1], 1)
        count = torch.where(each == 0, 0.0, part / each).round_()
        held = torch.equal(count.clamp(-128, 127) * each, part) and torch.equal(unit.half().float(), unit)
        if not held:
            return None
        found.append(count)
    return found or None


def rows_apart(weight: Tensor | Groups) -> Product:
    """Lay a weight out output after output: for `Product.rows` and `Product.dots` alone."""
    if isinstance(weight, Tensor):
        kept = shortest(weight)
        struct = library.CProduct(
            weight.shape[1], weight.shape[0], kept.element_size(), weight=kept.data_ptr(), rowwise=1
        )
        struct.half = kept.dtype == torch.float16
        return Product(struct, kept)
    outputs, inputs = weight.shape
    heads = [part.contiguous().view(torch.uint8) for part in weight.heads]
    kept = torch.cat([*heads, weight.codes], dim=1)
    struct = library.CProduct(inputs, outputs, 0, 8, weight.group, weight.zero, len(heads) - 1, weight=kept.data_ptr())
    struct.rowwise = 1
    return Product(struct, kept)


def takes(weight: Grouped) -> bool:
    parts = weight.parts if isinstance(weight, Stack) else (weight,)
    return all(part.group % 4 == 0 and multiply_floats(part.steps) for part in parts)


def stacked(weights: Sequence[Groups]) -> Grouped:
    """Join weights [out, in] one below the other; neighbours of one kind become one `Groups`."""
    runs = [list(run) for _, run in groupby(weights, lambda weight: weight.kind)]
    parts = [run[0] if len(run) == 1 else _together(run) for run in runs]
    return parts[0] if len(parts) == 1 else Stack(tuple(parts))


def _together(weights: Sequence[Groups]) -> Groups:
    offsets = [weight.offsets for weight in weights if weight.offsets is not None]
    return replace(
        weights[0],
        codes=torch.cat([weight.codes for weight in weights]),
        steps=torch.cat([weight.steps for weight in weights]),
        offsets=torch.cat(offsets) if offsets else None,
        units=tuple(map(torch.cat, zip(*(weight.units for weight in weights), strict=True))),
    )


def exact_offsets(zeros: Tensor | int, steps: Tensor) -> Tensor | None:
    """Convert `zeros` to float32 offsets; return None if float32 would round one."""
    offsets = -zeros * steps
    return offsets if torch.equal(offsets.double(), -zeros * steps.double()) else None
