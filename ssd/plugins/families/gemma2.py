"""Gemma 2 (arXiv 2408.00118): Gemma 3 without norms on queries and keys, with a soft cap on scores."""

from __future__ import annotations

from typing import ClassVar

from ssd.layers.attention import Scores
from ssd.layers.rotary import Rotary
from ssd.models.families.llama import SPLITS, Attention, window_of
from ssd.models.interface import Shape
from ssd.models.weights import Weights
from ssd.plugins.families.gemma3 import Gemma3
from ssd.system.fields import Config, number


class Gemma2Attention(Attention):
    def __init__(self, config: Config, shape: Shape, weights: Weights, layer: int, rotary: Rotary) -> None:
        super().__init__(config, shape, weights, layer, rotary)
        cap = None if config["attn_logit_softcapping"] is None else number(config, "attn_logit_softcapping")
        self._scores = Scores(number(config, "query_pre_attn_scalar", 256) ** -0.5, window_of(config, layer), cap)


class Gemma2(Gemma3):
    attention = Gemma2Attention
    defaults: ClassVar[Config] = {
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }
    refused = ("use_bidirectional_attention", "mlp_bias")
    splits = SPLITS

    def rope(self, config: Config, kind: str) -> Config:
        return config
