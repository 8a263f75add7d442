"""Time kernels of the engine with other numbers of warps and stages than the engine's own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from ssd.layers import quantized, triton_fused
from tools.gpu_report.gemm import made_product, shapes
from tools.gpu_report.job import TINY, Job, Row
from tools.gpu_report.timing import captured, device_seconds
from tools.inflate.sizes import LIKE, Like

_LAUNCHES = 200
_WARPS, _PRODUCT_WARPS, _STAGES, _OUTPUTS = (4, 8, 16), (2, 4), (2, 3, 4, 6), (64, 128)
_SPLITS = (1, 2, 4, 8)


class Tuned:
    """A kernel whose launches take other options."""

    def __init__(self, kernel: Any, options: dict[str, int]) -> None:
        self._kernel, self._options = kernel, options

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *given, **more: self._kernel[grid](*given, **(more | self._options))


def rows(job: Job) -> Iterator[Row]:
    """Yield microseconds of a norm of 8 rows by warps, then of packed products by outputs, warps, stages and splits."""
    like = TINY if job.tiny else LIKE["llama-8b"]
    device, norm_kernel = torch.device(job.device), triton_fused.norm_kernel
    for width in {like.sizes.hidden_size, 5120}:
        x, added = torch.randn(2, 8, width, device=device, dtype=torch.bfloat16)
        norm = torch.ones(width, device=device), 1e-6
        found = {}
        for count in _WARPS:
            triton_fused.norm_kernel = Tuned(norm_kernel, {"num_warps": count})
            graph = captured(lambda x=x, added=added, norm=norm: _norms(x, norm, added))
            found[f"{count} warps"] = 1e6 * device_seconds(graph, 10) / _LAUNCHES
        triton_fused.norm_kernel = norm_kernel
        yield {"name": f"norm of {width}", **found}
    product_kernel, own = quantized.product_kernel, quantized.BLOCK_N
    for kind, name, outputs in product(("fp8", "int4"), ("qkv", "gate_up"), _OUTPUTS):
        quantized.BLOCK_N = outputs
        shape = shapes(like)[name]
        products = [made_product(kind, shape, device) for _ in range(2 if job.tiny else 8)]
        x = torch.randn(8, shape[1], device=device, dtype=torch.bfloat16)
        for count in _PRODUCT_WARPS:
            found = {}
            for stage in _STAGES:
                quantized.product_kernel = Tuned(product_kernel, {"num_warps": count, "num_stages": stage})
                graph = captured(lambda x=x, products=products: [each(x) for each in products])
                found[f"{stage} stages"] = 1e6 * device_seconds(graph, 5) / len(products)
            yield {"name": f"{name}, {kind}, {outputs} outputs, {count} warps", **found}
        quantized.product_kernel, quantized.BLOCK_N = product_kernel, own
        if job.left() < 0:
            return
    yield from _of_splits(like, device)


def _of_splits(like: Like, device: torch.device) -> Iterator[Row]:
    """Yield microseconds of a packed product of 8 and 64 rows by the number of splits, which the engine reckons."""
    chosen = quantized._splits
    for kind, name in product(("fp8", "int4"), ("qkv", "o", "gate_up", "down")):
        found = {}
        for splits in _SPLITS:
            quantized._splits = lambda blocks, tiles, processors, splits=splits: min(splits, tiles)
            products = [made_product(kind, shapes(like)[name], device) for _ in range(8)]
            for count in (8, 64):
                x = torch.randn(count, shapes(like)[name][1], device=device, dtype=torch.bfloat16)
                graph = captured(lambda x=x, products=products: [each(x) for each in products])
                found[f"{splits} splits, {count} rows"] = 1e6 * device_seconds(graph, 5) / len(products)
        quantized._splits = chosen
        yield {"name": f"{name}, {kind}, splits", **found}


def _norms(x: torch.Tensor, norm: triton_fused.Norm, added: torch.Tensor) -> None:
    for _ in range(_LAUNCHES):
        triton_fused.rms_norm(x, norm, added)
