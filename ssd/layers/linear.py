"""Linear layers, packed once for the few rows of decoding and verification; and rows of a weight that ids look up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ssd.kernels import cpu
from ssd.kernels.gpu import fuses
from ssd.kernels.groups import Grouped, Groups, Parts, find_groups, grouped_product, rows_apart, takes

log = logging.getLogger("ssd.layers")

# Rows that oneDNN optimises a weight's layout for: verifications of a few sequences (docs/performance.md).
_ROWS_HINT = 16
INVARIANT_ROWS = 16
Activations = Literal["float32", "int16", "int8"]
PARTS: Mapping[Activations, Parts] = {"float32": 0, "int16": 2, "int8": 1}
"""Bytes that the inputs of a layer with weights of few bits are rounded to; 0: not rounded."""


class Linear:
    """y = x W^T + b for x [n, in] -> y [n, out], where a CPU's row does not depend on the number of rows.

    In bfloat16 this needs at least 32 inputs and up to `INVARIANT_ROWS` rows; beyond, oneDNN changes kernels with AMX.
    """

    def __init__(self, weight: Tensor | Grouped, bias: Tensor | None = None, parts: Parts = 0) -> None:
        """`weight` [out, in], `bias` [out]; drop other references to `weight` to free it.

        `parts`: bytes that inputs are rounded to, if the weight has few bits and `takes` it; 0: none are."""
        self.out_features, self.in_features = weight.shape
        groups = find_groups(weight) if isinstance(weight, Tensor) else weight
        if not isinstance(weight, Tensor) and fuses(weight.device):
            self.product = _packed_product(weight, bias)
        elif groups is not None and takes(groups):
            self.product = grouped_product(groups, bias, parts)
        else:
            self.product = _dense_product(weight if isinstance(weight, Tensor) else weight.dequantized(), bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x)


def _packed_product(weight: Grouped, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    from ssd.layers import quantized

    if quantized.takes(weight):
        return quantized.packed_product(weight, bias)
    tell_unpacked("groups of other than a multiple of 16 inputs", weight.dtype)
    return _dense_product(weight.dequantized(), bias)


@cache
def tell_unpacked(what: str, dtype: torch.dtype) -> None:
    log.warning("weights with %s cannot stay packed on a GPU: they become %s", what, str(dtype).removeprefix("torch."))


def _dense_product(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    if cpu.multiply_floats(weight):
        return cpu.float_product(weight, bias)
    if not (weight.is_cpu and weight.dtype in (torch.float32, torch.bfloat16) and torch.backends.mkldnn.is_available()):
        return partial(F.linear, weight=weight, bias=bias)
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return partial(_in_float32, _dense_product(weight.float(), None if bias is None else bias.float()))
    return _OneDnnProduct(weight, bias)


def _in_float32(product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return product(x.float()).to(x.dtype)


class _OneDnnProduct:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT), bias
        self._pad_single = weight.dtype != torch.float32 or self._single_row_differs(weight)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if self._pad_single and rows == 1:
            return self._multiply(x.expand(2, -1).contiguous())[:1]
        # oneDNN compiles and keeps a product for each number of rows: padding leaves four for each power of two.
        more = -rows % (1 << max(0, rows.bit_length() - 3))
        return self._multiply(F.pad(x, (0, 0, 0, more)))[:rows] if more else self._multiply(x)

    def _multiply(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y

    def _single_row_differs(self, weight: Tensor) -> bool:
        # By a trial: for some shapes oneDNN sums a single row in another order than several.
        x = torch.linspace(-1, 1, 2 * weight.shape[1], dtype=weight.dtype).sin().view(2, -1)
        return not torch.equal(self._multiply(x[:1].contiguous()), self._multiply(x)[:1])


class Rows(Protocol):
    def rows(self, ids: Tensor) -> Tensor: ...
    def dots(self, x: Tensor, ids: Tensor) -> Tensor: ...


class Table:
    """Owns a weight [V, width] whose rows are looked up and multiplied one by one.

    The weight stays packed on a CPU with our kernels for float32, and on a GPU if it has few bits."""

    def __init__(
        self, weight: Tensor | Groups, layer: Callable[[Tensor], Tensor] | None = None, dots: bool = False
    ) -> None:
        """Use the packed weight of `layer`, a linear layer with this weight, if there is one.

        `dots`: hundreds of rows are read at a time, so they lie one after another, with codes in 8 bits."""
        self.shape = weight.shape
        exact = isinstance(layer, Linear) or isinstance(weight, Groups)  # others round a weight of floats
        product = getattr(layer, "product", None) if exact else None
        floats = weight.steps if isinstance(weight, Groups) else weight
        if not isinstance(product, cpu.Product) and cpu.multiply_floats(floats):
            product = rows_apart(weight) if dots or isinstance(weight, Tensor) else Linear(weight).product
        elif isinstance(weight, Groups) and not hasattr(product, "rows"):
            product = Linear(weight).product
        self.product = product if isinstance(product, cpu.Product) else None
        """Our CPU kernel's weight; None if the rows lie elsewhere."""
        self._packed: Rows | None = product if hasattr(product, "rows") else None
        self._weight = None
        if self._packed is None:
            self._weight = weight.dequantized() if isinstance(weight, Groups) else weight

    def __len__(self) -> int:
        return self.shape[0]

    def __call__(self, ids: Tensor) -> Tensor:
        """Return the rows [n, width] of `ids` int64 [n]. Raises `IndexError`."""
        return self._packed.rows(ids) if self._packed is not None else self._weight[ids]  # type: ignore[index]

    def dots(self, x: Tensor, ids: Tensor) -> Tensor:
        """Multiply x [n, width] by the rows of `ids` int64 [k] -> [n, k]."""
        return self._packed.dots(x, ids) if self._packed is not None else x @ self._weight[ids].T  # type: ignore[index]
