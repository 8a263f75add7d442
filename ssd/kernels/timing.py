"""The CPU's products on this machine: time by rows, and bytes a second beside a loop that only reads the same bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from ssd.kernels.cpu import Product
from ssd.kernels.groups import Groups, Parts, grouped_product
from ssd.kernels.library import call

ROWS = (1, 2, 3, 4, 5, 6, 8, 16, 64)
_ROUNDED: tuple[tuple[str, Parts], ...] = (("int16", 2), ("int8", 1))
_INPUTS, _OUTPUTS, _GROUP = 1024, 4096, 32
_BYTES = 2**26  # of weights of a kind: more than most caches hold
_REPEATS = 15


class Speed(NamedTuple):
    weights: str
    inputs: str
    bytes: int
    reading: float
    seconds: dict[int, float]

    @property
    def of_reading(self) -> float:
        return self.reading / self.seconds[1]


def speeds(threads: int, rows: Sequence[int] = ROWS) -> Iterator[Speed]:
    """Yield the speed of each kind of weights and inputs; 1 must be among `rows`. torch keeps that many `threads`."""
    torch.set_num_threads(threads)
    for weights, bits, offsets in (("Q4_1", 4, True), ("Q4_0", 4, False), ("Q6", 6, True), ("Q8_0", 8, False)):
        weight = _drawn(bits, offsets)
        for inputs, parts in _ROUNDED:
            matrices = [grouped_product(weight, None, parts)]
            matrices += [grouped_product(weight, None, parts) for _ in range(_BYTES // matrices[0].bytes - 1)]
            works = [partial(_read, matrices), *(partial(_multiply, matrices, torch.randn(n, _INPUTS)) for n in rows)]
            reading, *seconds = _by_turns(works)
            size = sum(matrix.bytes for matrix in matrices)
            yield Speed(weights, inputs, size, reading, dict(zip(rows, seconds, strict=True)))


def _drawn(bits: int, offsets: bool) -> Groups:
    codes = torch.randint(0, 1 << bits, (_OUTPUTS, _INPUTS), dtype=torch.uint8)
    steps, more = torch.rand(2, _OUTPUTS, _INPUTS // _GROUP).half().float()
    return Groups(codes, steps, more if offsets else None, 0 if offsets else 1 << bits - 1)


def _read(matrices: Sequence[Product]) -> None:
    for matrix in matrices:
        call().read_only(matrix.struct.weight, matrix.bytes)


def _multiply(matrices: Sequence[Product], x: Tensor) -> None:
    for matrix in matrices:
        matrix(x)


def _by_turns(works: Sequence[Callable[[], None]]) -> list[float]:
    times: list[list[float]] = [[] for _ in works]
    for _ in range(_REPEATS):
        for work, own in zip(works, times, strict=True):
            begin = time.perf_counter()
            work()
            own.append(time.perf_counter() - begin)
    return [median(own) for own in times]
