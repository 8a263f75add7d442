"""What packing and rounding weights gains: all matrix products of one SmolLM2-135M forward, CPU time of one core.

*plain* and *packed* read float32, *Q4_1* the same of weights that have been through that format, *int8* multiplies in
integers.

taskset -c 0 python tools/measure_linear.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import click
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType, dequantize, quantize
from torch import Tensor

from ssd.layers.int8 import Int8Linear
from ssd.layers.linear import Linear

# (out, in) of a layer's four projections, thirty times, and of the head.
SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)] * 30 + [(49152, 576)]


@click.command(help=__doc__)
@click.option("--repeats", default=15, show_default=True)
def main(repeats: int) -> None:
    torch.set_num_threads(1)
    weights = [torch.randn(shape) * 0.02 for shape in SHAPES]
    packed = [Linear(weight) for weight in weights]
    coarse = [Linear(_through_q4_1(weight)) for weight in weights]
    rounded = [Int8Linear(weight) for weight in weights]
    click.echo("rows   plain ms   packed ms   packed GB/s   Q4_1 ms   int8 ms")
    gigabytes = sum(weight.numel() for weight in weights) * 4 / 1e9
    with torch.inference_mode():
        for rows in (1, 2, 5, 8, 16, 64):
            inputs = {size: torch.randn(rows, size) for size in (576, 1536)}
            plain_s = _median(lambda x=inputs: [F.linear(x[w.shape[1]], w) for w in weights], repeats)  # type: ignore[misc]
            packed_s = _median(lambda x=inputs: [layer(x[layer.in_features]) for layer in packed], repeats)  # type: ignore[misc]
            coarse_s = _median(lambda x=inputs: [layer(x[layer.in_features]) for layer in coarse], repeats)  # type: ignore[misc]
            int8_s = _median(lambda x=inputs: [layer(x[layer.in_features]) for layer in rounded], repeats)  # type: ignore[misc]
            figures = f"{plain_s * 1e3:10.1f} {packed_s * 1e3:11.1f} {gigabytes / packed_s:13.1f}"
            click.echo(f"{rows:4} {figures} {coarse_s * 1e3:9.1f} {int8_s * 1e3:9.1f}")


def _through_q4_1(weight: Tensor) -> Tensor:
    kind = GGMLQuantizationType.Q4_1
    return torch.from_numpy(dequantize(quantize(weight.numpy(), kind), kind))


def _median(run: Callable[[], object], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        began = time.thread_time()  # other programs disturb it less than the clock on the wall
        run()
        times.append(time.thread_time() - began)
    return statistics.median(times)


if __name__ == "__main__":
    main()
