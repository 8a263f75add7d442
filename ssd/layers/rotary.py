"""Rotary position embedding (Su et al., arXiv 2104.09864) with the scalings that checkpoints name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ssd.errors import UsageError
from ssd.kernels import cpu


class Rotary:
    """Tables of cosines and signed sines for positions 0..max_position-1 of heads of `head_dim` numbers."""

    def __init__(self, inverse_frequencies: Tensor, max_position: int, dtype: torch.dtype) -> None:
        angles = torch.arange(max_position, dtype=torch.float32)[:, None] * inverse_frequencies.float().cpu()
        cos, sin = angles.cos(), angles.sin()
        device = inverse_frequencies.device
        self._cos = torch.cat((cos, cos), dim=-1).to(device, dtype)
        self._sin = torch.cat((-sin, sin), dim=-1).to(device, dtype)
        self._half = inverse_frequencies.shape[0]
        self._kernel = cpu.serve(self._cos)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [n, 1, head_dim], for int64 `positions` [n]."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)

    def __call__(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate x [n, heads, head_dim]: the two halves of a head are the coordinates of its planes."""
        cos, sin = table
        if self._kernel:
            return cpu.rotate(x, cos, sin)
        return torch.addcmul(x * cos, x.roll(self._half, -1), sin)


def inverse_frequencies(head_dim: int, config: Mapping[str, Any]) -> Tensor:
    """float32 [head_dim / 2] from a checkpoint's config; raises `UsageError` for a scaling that is not known.

    Old configs keep `rope_theta` beside `rope_scaling`; new ones keep both in `rope_parameters`.
    """
    scaling: dict[str, Any] = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if (part := scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UsageError(f"partial_rotary_factor {part} is not supported: heads are rotated whole")
    if head_dim < 2 or head_dim % 2:
        raise UsageError(f"heads of {head_dim} numbers cannot be rotated in pairs")
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if kind == "default":
        return plain
    if kind == "linear":
        return plain / float(scaling["factor"])
    if kind == "llama3":
        return _llama3(plain, scaling)
    raise UsageError(f"rope scaling {kind!r} is not supported (default, linear, llama3 are)")


def _llama3(plain: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Llama 3.1's scaling: long waves are slowed by `factor`, short ones kept, those between interpolated."""
    factor, low, high = (float(scaling[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    waves_in_context = float(scaling["original_max_position_embeddings"]) * plain / (2 * math.pi)
    smooth = ((waves_in_context - low) / (high - low)).clamp(0, 1)
    return plain / factor * (1 - smooth) + plain * smooth
