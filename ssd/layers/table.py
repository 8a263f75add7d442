"""Rows of a weight that are looked up by id: those of an embedding or of a head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from ssd.kernels.cpu import Product, multiply_floats
from ssd.kernels.groups import Groups, rows_apart
from ssd.layers.linear import Linear


class Rows(Protocol):
    """A packed weight [V, width] whose rows can be read."""

    def rows(self, ids: Tensor) -> Tensor: ...
    def dots(self, x: Tensor, ids: Tensor) -> Tensor: ...


class Table:
    """Owns a weight [V, width] whose rows are looked up and multiplied one by one.

    The weight stays packed on a CPU with our kernels for float32, and on a GPU if it has few bits; then rows become
    floats when they are read. Elsewhere it is a tensor."""

    def __init__(
        self, weight: Tensor | Groups, layer: Callable[[Tensor], Tensor] | None = None, dots: bool = False
    ) -> None:
        """Use the packed weight of `layer`, a linear layer with this weight, if there is one.

        `dots`: hundreds of rows are read at a time. Then they lie one after another, with codes in 8 bits: a row of a
        packed weight is spread over as many cache lines as it has numbers."""
        self.shape = weight.shape
        exact = isinstance(layer, Linear) or isinstance(weight, Groups)  # others round a weight of floats
        product = getattr(layer, "product", None) if exact else None
        floats = weight.steps if isinstance(weight, Groups) else weight
        if not isinstance(product, Product) and multiply_floats(floats):
            product = rows_apart(weight) if dots or isinstance(weight, Tensor) else Linear(weight).product
        elif isinstance(weight, Groups) and not hasattr(product, "rows"):
            product = Linear(weight).product
        self.product = product if isinstance(product, Product) else None
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
