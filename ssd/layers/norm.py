"""Root-mean-square normalisation (Zhang, Sennrich, arXiv 1910.07467)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


class RMSNorm:
    """x [..., size] -> x / rms(x) * weight, the statistics in float32."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight, self._eps = weight, eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self._weight.shape, self._weight, self._eps)
