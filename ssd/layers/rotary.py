"""Rotary position embedding (Su et al., arXiv 2104.09864) with the scalings that checkpoints name."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ssd.errors import UsageError
from ssd.kernels import cpu
from ssd.layers.fields import Config, mapping, number


class Rotary:
    """Owns `tables` of cosines and signed sines, each [max_position, head_dim]."""

    def __init__(self, inverse_frequencies: Tensor, max_position: int, dtype: torch.dtype) -> None:
        angles = torch.arange(max_position, dtype=torch.float32)[:, None] * inverse_frequencies.float().cpu()
        cos, sin = angles.cos(), angles.sin()
        device = inverse_frequencies.device
        self.tables = (
            torch.cat((cos, cos), dim=-1).to(device, dtype),
            torch.cat((-sin, sin), dim=-1).to(device, dtype),
        )
        self._half = inverse_frequencies.shape[0]
        self._kernel = cpu.serve(self.tables[0])

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return (cos, sin), each [n, 1, head_dim], for `positions` int64 [n]."""
        cos, sin = self.tables
        return cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)

    def __call__(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate x [n, heads, head_dim]; number i of a head is paired with number i + head_dim / 2."""
        cos, sin = table
        if self._kernel:
            return cpu.rotate(x, cos, sin)
        return torch.addcmul(x * cos, x.roll(self._half, -1), sin)


def inverse_frequencies(head_dim: int, config: Config) -> Tensor:
    """The inverse frequencies float32 [head_dim / 2] by a config. Raises `UsageError` for unknown scalings.

    Old configs have `rope_theta` beside `rope_scaling`; new ones have both in `rope_parameters`."""
    scaling = rope_parameters(config)
    theta = number(scaling, "rope_theta", number(config, "rope_theta", 10000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise UsageError("rope_parameters that differ by kind of layer are not supported in this family")
    if (part := scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UsageError(f"partial_rotary_factor {part} is not supported: heads are rotated whole")
    if head_dim < 2 or head_dim % 2:
        raise UsageError(f"heads of {head_dim} numbers cannot be rotated in pairs")
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if kind == "default":
        return plain
    if kind == "linear":
        return plain / number(scaling, "factor")
    if kind == "llama3":
        # transformers prefers the one outside of the scaling.
        known = number(config, "original_max_position_embeddings", scaling.get("original_max_position_embeddings"))
        return _llama3(plain, scaling, known)
    raise UsageError(f"rope scaling {kind!r} is not supported (default, linear, llama3 are)")


def rope_parameters(config: Config) -> Config:
    """The `rope_parameters` of a config, or its old `rope_scaling`; {} if it has neither.

    Raises `UsageError` if it has both and they differ: readers disagree which one counts."""
    new, old = mapping(config, "rope_parameters"), mapping(config, "rope_scaling")
    if new and old and not old.items() <= new.items():
        raise UsageError("rope_parameters and rope_scaling contradict each other: remove one of them")
    return new or old


def _llama3(plain: Tensor, scaling: Config, known: float) -> Tensor:
    """Llama 3.1's scaling of a model trained on `known` positions.

    Long waves are slowed by `factor`, short ones kept, those between interpolated."""
    factor, low, high = (number(scaling, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    if low >= high:
        raise UsageError(f"low_freq_factor {low} is not below high_freq_factor {high}")
    waves_in_context = known * plain / (2 * math.pi)
    smooth = ((waves_in_context - low) / (high - low)).clamp(0, 1)
    return plain / factor * (1 - smooth) + plain * smooth
