"""How a weight of few bits lies in memory, in numbers: what it takes can be told without torch."""

from __future__ import annotations

from typing import NamedTuple

CHANNELS = 32
"""Outputs side by side in a packed weight, as in tile.h."""


class Form(NamedTuple):
    """The form that `ssd.kernels.groups.grouped_product` packs a weight in.

    `bits` of a code. Each `group` of inputs has `heads` numbers of `head_bytes` each: its step, and maybe its offset.
    If `span` is not 0, heads are multiples of units in float16, which so many inputs share."""

    bits: int
    group: int
    heads: int
    head_bytes: int
    span: int = 0

    def nbytes(self, outputs: int, inputs: int) -> int:
        """The bytes of a packed weight [outputs, inputs]."""
        head_bytes = self.head_bytes * (inputs // self.group) + (2 * (inputs // self.span) if self.span else 0)
        return -(-outputs // CHANNELS) * CHANNELS * (self.heads * head_bytes + inputs * self.bits // 8)
