"""The OLMo 2 family (arXiv 2501.00656): Llama with norms after attention and feed-forward.

Queries and keys are normalised over all heads at once."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ssd.layers.norm import Residual, RMSNorm
from ssd.layers.rotary import Rotary
from ssd.models.families.llama import SPLITS, Attention, Layer, Llama
from ssd.models.interface import ForwardContext, Shape
from ssd.models.split import COLUMN, KEYS, Splits
from ssd.models.weights import Weights
from ssd.system.fields import Config, number

OLMO_SPLITS: Splits = {**SPLITS, "q_norm": COLUMN, "k_norm": KEYS}


class Olmo2Attention(Attention):
    def __init__(self, config: Config, shape: Shape, weights: Weights, layer: int, rotary: Rotary) -> None:
        super().__init__(config, shape, weights, layer, rotary)
        self._eps, self._ranks = number(config, "rms_norm_eps"), weights.share.ranks
        self._weights = [
            weights(f"{name}_norm.weight", heads * shape.head_dim)
            for name, heads in (("q", shape.heads), ("k", shape.kv_heads))
        ]
        self._norms = [RMSNorm(weight, self._eps) for weight in self._weights]

    def normalised(self, qk: Tensor) -> Tensor:
        heads = self._shape.heads
        q, k = qk[:, :heads].flatten(1), qk[:, heads:].flatten(1)
        if self._ranks.size == 1:
            return torch.cat([norm(x) for norm, x in zip(self._norms, (q, k), strict=True)], dim=1).view(qk.shape)
        wide = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k)]
        sums = self._ranks.sum(torch.stack([x.square().sum(-1) for x in wide]))
        sizes = q.shape[1] * self._ranks.size, k.shape[1] * self._ranks.size  # copies of key heads are summed, too
        scaled = [
            x * (total / size + self._eps).rsqrt()[:, None] * weight
            for x, total, size, weight in zip(wide, sums, sizes, self._weights, strict=True)
        ]
        return torch.cat(scaled, dim=1).to(qk.dtype).view(qk.shape)


class Olmo2Layer(Layer):
    """Adds norm(attention(x)) to x, then norm(feed_forward(x))."""

    def __call__(self, x: Residual, table: tuple[Tensor, Tensor], context: ForwardContext) -> None:
        x.add(self._attention(x.value, table, context), self._attention_norm)
        x.add(self._feed_forward(x.value), self._forward_norm)


class Olmo2(Llama):
    attention = Olmo2Attention
    layer = Olmo2Layer
    norms = "post_attention_layernorm", "post_feedforward_layernorm", "norm"
    defaults: ClassVar[Config] = {"rms_norm_eps": 1e-5}
    refused = ("mlp_bias",)
    splits = OLMO_SPLITS
