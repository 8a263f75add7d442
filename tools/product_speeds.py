"""Times the CPU's products by rows, and of one row the bytes a second beside a loop that only reads the same bytes.

    python -m tools.product_speeds --threads 2

Weights of 64 MiB of each kind, on this machine as it is now; nothing is kept."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ssd.kernels import cpu
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


@click.command()
@click.option("--threads", type=click.IntRange(1, 256), help="Default: as many as the cores of this process.")
def main(threads: int | None) -> None:
    if not cpu.multiply_floats(torch.empty(1, 1)):
        raise click.ClickException("this machine has no kernels of ours: no C compiler, or neither AVX2 nor NEON")
    threads = threads or len(os.sched_getaffinity(0))
    table = Table(
        f"{threads} threads", "inputs", *(f"{n} ms" for n in ROWS), "5 over 1", "8 over 1", "GB/s", "of reading"
    )
    for speed in speeds(threads):
        ratios = [f"{speed.seconds[n] / speed.seconds[1]:.2f}" for n in (5, 8)]
        rate = f"{speed.bytes / speed.seconds[1] / 1e9:.1f}"
        times = [f"{1e3 * seconds:.2f}" for seconds in speed.seconds.values()]
        table.add_row(speed.weights, speed.inputs, *times, *ratios, rate, f"{speed.of_reading:.2f}")
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
