"""The gpt-oss family (arXiv 2508.10925): learned attention sinks, a window in every second layer, clamped experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from ssd.layers.attention import sinks_of
from ssd.layers.linear import Linear
from ssd.layers.norm import silu_mul
from ssd.layers.rotary import Rotary
from ssd.models.families.llama import SPLITS, Attention, FeedForward, Llama
from ssd.models.families.qwen3_moe import Experts
from ssd.models.interface import Shape
from ssd.models.split import Split, Splits
from ssd.models.weights import Weights
from ssd.plugins.families.gemma3 import layer_types
from ssd.system.fields import Config, number

# The rotation of a config that names none.
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_SPLITS: Splits = {**SPLITS, "self_attn": Split(0, 0)}  # the sinks, by heads


class GptOssAttention(Attention):
    def __init__(self, config: Config, shape: Shape, weights: Weights, layer: int, rotary: Rotary) -> None:
        super().__init__(config, shape, weights, layer, rotary)
        self._scores = replace(self._scores, sinks=sinks_of(weights("sinks", shape.heads)))


class ClampedFeedForward(FeedForward):
    """down((up(x) + 1) * gate(x) * sigmoid(alpha * gate(x))), with gate(x) <= limit and -limit <= up(x) <= limit."""

    def __init__(self, config: Config, weights: Weights, summed: bool = True) -> None:
        super().__init__({**config, "mlp_bias": True}, weights, summed)
        self._alpha, self._limit = number(config, "swiglu_alpha", 1.702), number(config, "swiglu_limit", 7.0)

    def __call__(self, x: Tensor) -> Tensor:
        gate_up = self._gate_up(x)
        gate, up = gate_up.chunk(2, dim=-1)
        # gate * sigmoid(alpha * gate) = silu(alpha * gate) / alpha, and for SiLU there is a kernel.
        gate.clamp_(max=self._limit).mul_(self._alpha)
        up.clamp_(-self._limit, self._limit).add_(1).div_(self._alpha)
        return self._down(silu_mul(gate_up))


class GptOssExperts(Experts):
    """Experts with biases; a softmax over the chosen experts' scores weighs them."""

    router, inner, expert = "router", "intermediate_size", ClampedFeedForward

    def router_of(self, weights: Weights, experts: int, width: int) -> Linear:
        return Linear(weights("weight", experts, width), weights("bias", experts))

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        best, chosen = scores.topk(self._chosen)
        return torch.softmax(best, dim=-1, dtype=torch.promote_types(best.dtype, torch.float32)), chosen


class GptOss(Llama):
    attention = GptOssAttention
    slides = True
    defaults: ClassVar[Config] = {
        "attention_bias": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "sliding_window_pattern": 2,
    }
    refused = ("mlp_bias",)
    splits = _SPLITS

    def __init__(
        self, config: Config, weights: Weights, dtype: torch.dtype, device: torch.device, max_position: int
    ) -> None:
        config = {**self.defaults, **config}
        if not config.get("rope_parameters") and not config.get("rope_scaling"):
            config["rope_parameters"] = _ROPE
        super().__init__({**config, "layer_types": layer_types(config)}, weights, dtype, device, max_position)

    def feed_forward(self, config: Config, weights: Weights, layer: int) -> Callable[[Tensor], Tensor]:
        return GptOssExperts(config, weights)
