"""Normalisations of a token's numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class RMSNorm:
    """x [..., size] -> x / rms(x) * weight, the statistics in float32 (Zhang, Sennrich, arXiv 1910.07467)."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight, self._eps = weight, eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self._weight.shape, self._weight, self._eps)


class OffsetRMSNorm:
    """x [..., size] -> x / rms(x) * (1 + weight), rounded once, at the end; Gemma's."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._wide = torch.promote_types(weight.dtype, torch.float32)
        self._weight, self._eps = 1 + weight.to(self._wide), eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.to(self._wide), self._weight.shape, self._weight, self._eps).to(x.dtype)


class LayerNorm:
    """x [..., size] -> (x - mean(x)) / deviation(x) * weight + bias (Ba, Kiros, Hinton, arXiv 1607.06450)."""

    def __init__(self, weight: Tensor, bias: Tensor, eps: float) -> None:
        self._weight, self._bias, self._eps = weight, bias, eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self._weight.shape, self._weight, self._bias, self._eps)
