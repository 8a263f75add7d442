"""Time the products of known models at few rows, and look whether a row's bits depend on its place.

A kind is a type of weights: bf16 by torch (cuBLAS), fp8 and int4 by the engine's packed products. With ", humming"
behind it the package humming-kernels multiplies, in its batch-invariant mode, with ", humming, varying" in its own
choice of kernels. The engine does not use that package: these rows tell whether it should."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ssd.kernels.groups import Groups
from tools.gpu_report.job import TINY, Job, Row
from tools.gpu_report.timing import captured, copy_bandwidth, device_seconds
from tools.inflate.sizes import LIKE, Like

Product = Callable[[Tensor], Tensor]
GROUP = 64
BITS = {"bf16": 16, "fp8": 8, "int4": 4}
_MODELS = ("llama-8b", "qwen3-32b")
# Bytes of the weights that take turns: several times the L2 cache.
_ROTATED = 2**30
_MOST_OFF = 0.02  # of the largest result: humming-kernels rounds each weight to 16 bits, the engine none


def rows(
    job: Job,
    *,
    counts: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    kinds: Sequence[str] = tuple(BITS),
    models: Sequence[str] = _MODELS,
) -> Iterator[Row]:
    """Yield a row for each weight and kind: microseconds by number of rows, and the share of the copy bandwidth.

    Weights take turns so that no cache holds them. On a CPU, which has no such kernels, Triton's interpreter runs."""
    device = torch.device(job.device)
    if device.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        counts = [count for count in counts if count <= 16]  # more take too long there
    likes = {"tiny": TINY} if job.tiny else {name: LIKE[name] for name in models}
    rotated = 2**12 if job.tiny else _ROTATED
    rate = copy_bandwidth(device, 2**20 if job.tiny else 2**32, 10)
    for model, like in likes.items():
        for name, shape in shapes(like).items():
            for kind in kinds:
                if job.left() < 0:
                    return
                try:
                    yield {"name": f"{model} {name}, {kind}", **_found(kind, shape, counts, rotated, rate, device)}
                except Exception as error:
                    if "humming" not in kind:
                        raise
                    yield {"name": f"{model} {name}, {kind}", "not run": f"{type(error).__name__}: {error}"[:300]}
                if device.type == "cuda":
                    torch.cuda.empty_cache()


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


def _found(
    kind: str, shape: tuple[int, int], counts: Sequence[int], rotated: int, rate: float, device: torch.device
) -> Row:
    """Time one kind of products and look at its results."""
    bits = BITS[kind.partition(",")[0]]
    read = shape[0] * shape[1] * bits / 8
    inputs = torch.randn(max(counts), shape[1], device=device, dtype=torch.bfloat16)
    products = [made_product(kind, shape, device) for _ in range(max(1, min(64, int(rotated / read))))]
    found: Row = {}
    for count in counts:
        seconds = _seconds(partial(_run, products, inputs[:count]), device) / len(products)
        found |= {f"us at {count}": 1e6 * seconds, f"of_copy at {count}": read / seconds / rate}
    return {**found, "mb": read / 1e6, **_off(kind, shape, inputs), **_same_bits(products[0], inputs)}


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    began = time.perf_counter()
    work()  # compiles
    return time.perf_counter() - began if device.type == "cpu" else device_seconds(captured(work), 5)


def _run(products: Sequence[Product], inputs: Tensor) -> None:
    for product in products:
        product(inputs)


def made_product(kind: str, shape: tuple[int, int], device: torch.device) -> Product:
    """Make a product with a random weight."""
    weight = _made_weight(kind, shape, device)
    return partial(F.linear, weight=weight) if isinstance(weight, Tensor) else _product(kind, weight)


def _made_weight(kind: str, shape: tuple[int, int], device: torch.device) -> Tensor | Groups:
    if kind == "bf16":
        return torch.empty(shape, device=device, dtype=torch.bfloat16).normal_(0, 0.02)
    e4m3 = kind.startswith("fp8")
    most = 120 if e4m3 else 16  # below the NaN of e4m3
    codes = torch.randint(0, most, shape, device=device, dtype=torch.uint8)
    steps = torch.full((shape[0], shape[1] // GROUP), 2.0**-8, device=device)
    return Groups(codes, steps, None, zero=0 if e4m3 else 8, e4m3=e4m3, dtype=torch.bfloat16)


def _product(kind: str, weight: Groups) -> Product:
    if "humming" in kind:
        return _hummed(weight, invariant="varying" not in kind)
    from ssd.layers.quantized import packed_product  # after the choice of Triton's interpreter

    return packed_product(weight)


def _hummed(weight: Groups, invariant: bool) -> Product:
    """Return the product of humming-kernels, which compiles on its first call for a number of rows."""
    from humming.layer import HummingLayer

    outputs, inputs = weight.shape
    config = hummed_config(weight)
    layer = HummingLayer(shape_n=outputs, shape_k=inputs, weight_config=config, torch_dtype=torch.bfloat16).cuda()
    layer.load_from_tensors(hummed_tensors(weight))
    layer.transform()
    return partial(layer, compute_config={"use_batch_invariant": invariant, "gemm_type": "dense"})


def hummed_config(weight: Groups) -> dict[str, str | int]:
    """Return the description of a weight for humming-kernels: its int4 is a code from 0 to 15, less 8."""
    return {"quant_method": "humming", "dtype": "float8e4m3" if weight.e4m3 else "int4", "group_size": weight.group}


def hummed_tensors(weight: Groups) -> dict[str, Tensor]:
    """Return a weight's tensors for humming-kernels: inputs one after another in int32, from the lowest bits up."""
    codes = weight.codes if weight.e4m3 else weight.codes[:, ::2] | weight.codes[:, 1::2] << 4
    return {"weight": codes.contiguous().view(torch.int32), "weight_scale": weight.steps.bfloat16()}


def _off(kind: str, shape: tuple[int, int], inputs: Tensor) -> Row:
    """Compare a product with that of the weight in float32: the largest difference over the largest result."""
    weight = _made_weight(kind, shape, inputs.device)
    if isinstance(weight, Tensor):
        return {}
    x = inputs[:8]
    expected = x.float() @ weight.dequantized().float().T
    off = float((_product(kind, weight)(x) - expected).abs().max() / expected.abs().max())
    return {"off": off, "ok": off < _MOST_OFF}


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
