"""Phi 3 and Phi 4 (arXiv 2404.14219): Llama with fused projections, windows and LongRoPE."""

from __future__ import annotations

from typing import ClassVar

import torch

from ssd.layers.rotary import rope_parameters
from ssd.models.families.llama import SPLITS, Attention, FeedForward, Llama
from ssd.models.split import Split, Splits
from ssd.models.weights import Weights
from ssd.system.fields import Config

_SPLITS: Splits = {**SPLITS, "qkv_proj": Split(0, 0, fused=True), "gate_up_proj": Split(0, 0, blocks=2)}


class Phi3Attention(Attention):
    in_one_call = True

    @staticmethod
    def parts(q_size: int, kv_size: int) -> tuple[tuple[str, int], ...]:
        return (("qkv_proj", q_size + 2 * kv_size),)


class Phi3FeedForward(FeedForward):
    gate_up = ("gate_up_proj",)
    in_one_call = True


class Phi3(Llama):
    attention = Phi3Attention
    slides = True
    partly_rotated = True
    defaults: ClassVar[Config] = {"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
    refused = ("attention_bias", "mlp_bias", "layer_types")
    splits = _SPLITS

    def __init__(
        self, config: Config, weights: Weights, dtype: torch.dtype, device: torch.device, max_position: int
    ) -> None:
        rope = dict(rope_parameters(config))
        if rope.get("rope_type", rope.get("type")) in ("su", "yarn"):  # as older configs name it
            rope["rope_type"] = "longrope"
        rotated = {**config, "rope_parameters": rope or None, "rope_scaling": None}
        super().__init__(rotated, weights, dtype, device, max_position)

    def feed_forward(self, config: Config, weights: Weights, layer: int) -> Phi3FeedForward:
        return Phi3FeedForward(config, weights)
