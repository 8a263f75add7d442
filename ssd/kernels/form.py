"""The packed form of a weight of few bits, in numbers, without torch."""

from __future__ import annotations

from typing import NamedTuple

CHANNELS = 32
"""Outputs side by side in a packed weight, as in tile.h."""


class Form(NamedTuple):
    """A weight's form in `ssd.kernels.groups.grouped_product`: codes of `bits`, groups of `group` inputs.

    A group has `heads` numbers of `head_bytes` each: its step, and maybe its offset; with a `span`, they are multiples
    of units in float16 for `span` inputs each."""

    bits: int
    group: int
    heads: int
    head_bytes: int
    span: int = 0

    def nbytes(self, outputs: int, inputs: int) -> int:
        head_bytes = self.head_bytes * (inputs // self.group) + (2 * (inputs // self.span) if self.span else 0)
        return -(-outputs // CHANNELS) * CHANNELS * (self.heads * head_bytes + inputs * self.bits // 8)
