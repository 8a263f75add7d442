"""The packed form of a weight of few bits, in numbers: its size can be computed without torch."""

from __future__ import annotations

from typing import NamedTuple

CHANNELS = 32
"""Outputs side by side in a packed weight, as in tile.h."""


class Form(NamedTuple):
    """The form that `ssd.kernels.groups.grouped_product` packs a weight in.

    A code has `bits`. A group of `group` inputs has `heads` numbers: its step, and maybe its offset. Each takes
    `head_bytes`. With a `span`, they are multiples of units in float16; `span` inputs share a unit."""

    bits: int
    group: int
    heads: int
    head_bytes: int
    span: int = 0

    def nbytes(self, outputs: int, inputs: int) -> int:
        head_bytes = self.head_bytes * (inputs // self.group) + (2 * (inputs // self.span) if self.span else 0)
        return -(-outputs // CHANNELS) * CHANNELS * (self.heads * head_bytes + inputs * self.bits // 8)
