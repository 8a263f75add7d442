"""Norms, and the gated activation between two products."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ssd.kernels import cpu


class RMSNorm:
    """x [..., size] -> x / sqrt(mean(x^2) + eps) * weight (Zhang, Sennrich, arXiv 1910.07467).

    Computed in float32 at least, and rounded once, at the end."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.kernel = (weight, eps) if cpu.serve(weight) else None
        size, self._wide = weight.shape[0], torch.promote_types(weight.dtype, torch.float32)
        # By the length of x in place of the mean, as torch's CPU needs half the time of its own RMS norm for it.
        self._least = torch.tensor((size * eps) ** 0.5, dtype=self._wide, device=weight.device)
        self._weight = weight.to(self._wide) * size**0.5

    def __call__(self, x: Tensor) -> Tensor:
        if self.kernel is not None and x.dtype == torch.float32:
            return cpu.rms_norm(x, *self.kernel)
        wide = x.to(self._wide)
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).hypot_(self._least)
        return (wide / length).mul_(self._weight).to(x.dtype)


class OffsetRMSNorm(RMSNorm):
    """Gemma's RMS norm: x [..., size] -> x / rms(x) * (1 + weight)."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__(1 + weight.to(torch.promote_types(weight.dtype, torch.float32)), eps)


class LayerNorm:
    """x [..., size] -> (x - mean(x)) / deviation(x) * weight + bias (Ba, Kiros, Hinton, arXiv 1607.06450)."""

    def __init__(self, weight: Tensor, bias: Tensor, eps: float) -> None:
        self._weight, self._bias, self._eps = weight, bias, eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self._weight.shape, self._weight, self._bias, self._eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """(gate, up) [n, 2 * size] -> silu(gate) * up [n, size] (Shazeer, arXiv 2002.05202)."""
    if cpu.serve(gate_up):
        return cpu.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
