"""Time the products of known models at few rows, and look whether a row's bits depend on its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ssd.kernels.groups import Groups
from ssd.layers.quantized import packed_product
from tools.gpu_report.job import TINY, Job, Row
from tools.gpu_report.timing import captured, copy_bandwidth, device_seconds
from tools.inflate.sizes import LIKE, Like

Product = Callable[[Tensor], Tensor]
GROUP = 64
BITS = {"bf16": 16, "fp8": 8, "int4": 4}
_MODELS = ("llama-8b", "qwen3-32b")
# Bytes of the weights that take turns: several times the L2 cache.
_ROTATED = 2**30


def rows(job: Job, *, counts: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)) -> Iterator[Row]:
    """Yield a row for each weight and kind: microseconds by number of rows, and the share of the copy bandwidth at 8.

    bf16 is torch's product (cuBLAS); the others are the engine's packed products with bf16 inputs. Weights take turns
    so that no cache holds them."""
    likes = {"tiny": TINY} if job.tiny else {name: LIKE[name] for name in _MODELS}
    rotated = 2**16 if job.tiny else _ROTATED
    device = torch.device(job.device)
    rate = copy_bandwidth(device, 16 * rotated if job.tiny else 2**32, 10)
    for model, like in likes.items():
        for name, (outputs, inputs) in shapes(like).items():
            if job.left() < 0:
                return
            yield from _product(f"{model} {name}", (outputs, inputs), counts, rotated, rate, device)


def shapes(like: Like) -> dict[str, tuple[int, int]]:
    """Return [outputs, inputs] of a model's five weights."""
    sizes = like.sizes
    heads, width = sizes.num_attention_heads * sizes.head_dim, sizes.hidden_size
    return {
        "qkv": (heads + 2 * sizes.num_key_value_heads * sizes.head_dim, width),
        "o": (width, heads),
        "gate_up": (2 * sizes.intermediate_size, width),
        "down": (width, sizes.intermediate_size),
        "head": (like.vocab_size, width),
    }


def _product(
    name: str,
    shape: tuple[int, int],
    counts: Sequence[int],
    rotated: int,
    rate: float,
    device: torch.device,
) -> Iterator[Row]:
    size = shape[0] * shape[1]
    inputs = torch.randn(max(counts), shape[1], device=device, dtype=torch.bfloat16)
    for kind, bits in BITS.items():
        products = [made_product(kind, shape, device) for _ in range(max(1, min(64, rotated * 8 // (size * bits))))]
        found = {}
        for count in counts:
            graph = captured(partial(_run, products, inputs[:count]))
            found[count] = 1e6 * device_seconds(graph, 5) / len(products)
        read = size * bits / 8
        yield {
            "name": f"{name}, {kind}",
            **{f"us at {count}": found[count] for count in counts},
            **({"of_copy at 8": read / found[8] * 1e6 / rate} if 8 in found else {}),
            "mb": read / 1e6,
            **_same_bits(products[0], inputs),
        }
        del products
        torch.cuda.empty_cache()


def _run(products: Sequence[Product], inputs: Tensor) -> None:
    for product in products:
        product(inputs)


def made_product(kind: str, shape: tuple[int, int], device: torch.device) -> Product:
    if kind == "bf16":
        weight = torch.empty(shape, device=device, dtype=torch.bfloat16).normal_(0, 0.02)
        return lambda x: F.linear(x, weight)
    most = 16 if kind == "int4" else 120  # below the NaN of e4m3
    codes = torch.randint(0, most, shape, device=device, dtype=torch.uint8)
    steps = torch.full((shape[0], shape[1] // GROUP), 2.0**-8, device=device)
    e4m3 = kind == "fp8"
    return packed_product(
        Groups(codes, steps, None, zero=0 if e4m3 else 8, e4m3=e4m3, dtype=torch.bfloat16)  # type: ignore[arg-type]
    )


def _same_bits(product: Product, inputs: Tensor) -> Row:
    """Put one row everywhere in batches: are its results the same bits at every place of a batch of 64, and of 16?
    And in batches of 1, 8 and 64?"""
    found: Row = {}
    alone = {}
    for count in (1, 8, 16, 64):
        if count <= len(inputs):
            batch = inputs[:count].clone()
            results = []
            for place in {0, count // 2, count - 1}:
                moved = batch.clone()
                moved[place] = inputs[0]
                results.append(product(moved)[place])
            alone[count] = results[0]
            found[f"same at any place of {count}"] = all(bool((one == results[0]).all()) for one in results)
    found["same in any batch"] = all(bool((one == alone[1]).all()) for one in alone.values())
    return found
