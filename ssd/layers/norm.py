"""Norms, gated activations between two products, and the sum that norms read."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ssd.kernels import cpu
from ssd.kernels.gpu import fuses


class RMSNorm:
    """x [..., size] -> x / sqrt(mean(x^2) + eps) * weight (arXiv 1910.07467), in float32 at least, rounded once."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.kernel = (weight, eps) if self.fusible and cpu.serve(weight) else None
        size, self._wide = weight.shape[0], torch.promote_types(weight.dtype, torch.float32)
        # Computed by the length of x in place of the mean: this takes torch half the time of its own RMS norm on a CPU.
        self._least = torch.tensor((size * eps) ** 0.5, dtype=self._wide, device=weight.device)
        self.weight, self.least = weight.to(self._wide) * size**0.5, size * eps
        """The weight times sqrt(size), and size * eps: they go with the length of x in place of the mean."""

    def __call__(self, x: Tensor) -> Tensor:
        if self.kernel is not None and x.dtype == torch.float32:
            return cpu.rms_norm(x, *self.kernel)
        if fuses(x.device):
            return self._fused(x)[1]
        wide = x.to(self._wide)
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).hypot_(self._least)
        return (wide / length).mul_(self.weight).to(x.dtype)

    @property
    def fusible(self) -> bool:
        return type(self).__call__ is RMSNorm.__call__

    def added(self, x: Tensor, y: Tensor, behind: RMSNorm | None = None) -> tuple[Tensor, Tensor]:
        """Return x + y, or x + behind(y), and the norm of that sum."""
        if fuses(x.device) and self.fusible and (behind is None or behind.fusible):
            return self._fused(x, y, behind)
        total = x + (y if behind is None else behind(y))
        return total, self(total)

    def _fused(self, x: Tensor, y: Tensor | None = None, behind: RMSNorm | None = None) -> tuple[Tensor, Tensor]:
        from ssd.layers.triton_fused import rms_norm

        own = None if behind is None else (behind.weight, behind.least)
        return rms_norm(x, (self.weight, self.least), y, own)


class OffsetRMSNorm(RMSNorm):
    """Gemma's RMS norm: x [..., size] -> x / rms(x) * (1 + weight)."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__(1 + weight.to(torch.promote_types(weight.dtype, torch.float32)), eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Map (gate, up) [n, 2 * size] -> silu(gate) * up [n, size] (arXiv 2002.05202)."""
    return cpu.silu_mul(gate_up) if cpu.serve(gate_up) else _gated(gate_up, gelu=False)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """Map (gate, up) [n, 2 * size] -> gelu(gate) * up [n, size], GELU by tanh (arXiv 1606.08415)."""
    return _gated(gate_up, gelu=True)


def _gated(gate_up: Tensor, gelu: bool) -> Tensor:
    if fuses(gate_up.device):
        from ssd.layers.triton_fused import gated

        return gated(gate_up, gelu)
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up


class Residual:
    """Owns the sum x [n, width] that layers add to. The last addend waits, so that the next norm adds it too."""

    def __init__(self, x: Tensor) -> None:
        self._x = x
        self._waits: tuple[Tensor, RMSNorm | None] | None = None

    def add(self, y: Tensor, behind: RMSNorm | None = None) -> None:
        self._x, self._waits = self.value, (y, behind)

    @property
    def value(self) -> Tensor:
        if self._waits is not None:
            (y, behind), self._waits = self._waits, None
            self._x = self._x + (y if behind is None else behind(y))
        return self._x

    def normed(self, norm: RMSNorm) -> Tensor:
        if self._waits is None:
            return norm(self._x)
        (self._x, normed), self._waits = norm.added(self._x, *self._waits), None
        return normed
