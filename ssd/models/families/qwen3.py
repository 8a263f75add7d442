"""The dense Qwen3 family: Llama with a norm on every query and key head (arXiv 2505.09388)."""

from __future__ import annotations

import torch
from torch import Tensor

from ssd.layers.norm import RMSNorm
from ssd.layers.rotary import Rotary
from ssd.models.families.llama import SPLITS, Attention
from ssd.models.families.qwen2 import Qwen2
from ssd.models.interface import Shape
from ssd.models.weights import Weights
from ssd.system.fields import Config, number


class Qwen3Attention(Attention):
    norm: type[RMSNorm] = RMSNorm
    norm_names: tuple[str, str] = ("q_norm", "k_norm")
    in_one_call = True

    def __init__(self, config: Config, shape: Shape, weights: Weights, layer: int, rotary: Rotary) -> None:
        super().__init__(config, shape, weights, layer, rotary)
        eps = number(config, "rms_norm_eps", 1e-6)
        self._q_norm, self._k_norm = (
            self.norm(weights(f"{name}.weight", shape.head_dim), eps) for name in self.norm_names
        )

    @property
    def fused_norms(self) -> tuple[RMSNorm, ...] | None:
        norms = self._q_norm, self._k_norm
        own = type(self).normalised is not Qwen3Attention.normalised or not all(norm.fusible for norm in norms)
        return None if own else norms

    def normalised(self, qk: Tensor) -> Tensor:
        heads = self._shape.heads
        return torch.cat((self._q_norm(qk[:, :heads]), self._k_norm(qk[:, heads:])), dim=1)


class Qwen3(Qwen2):
    attention = Qwen3Attention
    splits = SPLITS
