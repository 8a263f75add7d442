"""The dense Granite 3 family: Llama with factors on embeddings, scores, residuals and logits."""

from __future__ import annotations

import torch
from torch import Tensor

from ssd.layers.attention import Scores
from ssd.layers.rotary import Rotary
from ssd.models.families.llama import SPLITS, Attention, FeedForward, Llama
from ssd.models.interface import ForwardContext, Shape
from ssd.models.weights import Weights
from ssd.system.fields import Config, number


class GraniteAttention(Attention):
    def __init__(self, config: Config, shape: Shape, weights: Weights, layer: int, rotary: Rotary) -> None:
        super().__init__(config, shape, weights, layer, rotary)
        self._scores = Scores(number(config, "attention_multiplier", 1.0))
        self._multiplier = number(config, "residual_multiplier", 1.0)

    def __call__(self, x: Tensor, table: tuple[Tensor, Tensor], context: ForwardContext) -> Tensor:
        return super().__call__(x, table, context) * self._multiplier


class GraniteFeedForward(FeedForward):
    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(config, weights)
        self._multiplier = number(config, "residual_multiplier", 1.0)

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) * self._multiplier


class Granite(Llama):
    attention = GraniteAttention
    splits = SPLITS

    def __init__(
        self, config: Config, weights: Weights, dtype: torch.dtype, device: torch.device, max_position: int
    ) -> None:
        super().__init__(config, weights, dtype, device, max_position)
        embed, multiplier = self._embed, number(config, "embedding_multiplier", 1.0)
        self._embed = lambda token_ids: embed(token_ids) * multiplier
        self._scaling = number(config, "logits_scaling", 1.0)

    def feed_forward(self, config: Config, weights: Weights, layer: int) -> GraniteFeedForward:
        return GraniteFeedForward(config, weights)

    def scaled(self, logits: Tensor) -> Tensor:
        return logits / self._scaling
