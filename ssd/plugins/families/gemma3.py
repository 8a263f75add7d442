"""The text models of Gemma 3 (arXiv 2503.19786): four norms a layer, also on queries and keys.

Most layers see a window only and rotate by a base of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ssd.errors import UsageError
from ssd.layers.attention import Scores
from ssd.layers.norm import OffsetRMSNorm, Residual, RMSNorm, gelu_mul
from ssd.layers.rotary import Rotary, frequencies
from ssd.models.families.llama import (
    SPLITS,
    Attention,
    FeedForward,
    Layer,
    Llama,
    check_activation,
    window_of,
)
from ssd.models.families.qwen3 import Qwen3Attention
from ssd.models.interface import ForwardContext, Shape
from ssd.models.layer_kinds import FULL, SLIDING
from ssd.models.weights import Weights
from ssd.system.fields import Config, count, mapping, number, refuse

ACTIVATION = "gelu_pytorch_tanh"
# Fields that the rotations of all kinds of layers read.
_OF_ALL_KINDS = "max_position_embeddings", "original_max_position_embeddings", "partial_rotary_factor"
# Fields that must be empty: the model does not compute what they ask for.
_REFUSED = ("attn_logit_softcapping", "use_bidirectional_attention", "mlp_bias")


class Gemma3Attention(Qwen3Attention):
    norm = OffsetRMSNorm

    def __init__(self, config: Config, shape: Shape, weights: Weights, layer: int, rotary: Rotary) -> None:
        super().__init__(config, shape, weights, layer, rotary)
        self._scores = Scores(number(config, "query_pre_attn_scalar", 256) ** -0.5, window_of(config, layer))


class Gemma3FeedForward(FeedForward):
    """down(gelu(gate(x)) * up(x))."""

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(gelu_mul(self._gate_up(x)))


class Gemma3Layer(Layer):
    """Adds norm(attention(norm(x))) to x, then norm(feed_forward(norm(x)))."""

    def __init__(self, norms: Sequence[RMSNorm], attention: Attention, feed_forward: FeedForward) -> None:
        super().__init__(norms[0], attention, norms[2], feed_forward)
        self._after = norms[1], norms[3]

    def __call__(self, x: Residual, table: tuple[Tensor, Tensor], context: ForwardContext) -> None:
        x.add(self._attention(x.normed(self._attention_norm), table, context), self._after[0])
        x.add(self._feed_forward(x.normed(self._forward_norm)), self._after[1])


class ByKind(Llama):
    """Base of a family whose kinds of layers, full and sliding, rotate in their own ways."""

    def __init__(
        self, config: Config, weights: Weights, dtype: torch.dtype, device: torch.device, max_position: int
    ) -> None:
        config = self.completed(config)
        self._kinds = layer_types(config)
        super().__init__({**config, "layer_types": self._kinds}, weights, dtype, device, max_position)
        sliding = frequencies(self.shape.head_dim, self.rope(config, SLIDING), max_position)
        self._rotaries = {FULL: self._rotary, SLIDING: Rotary(sliding, max_position, dtype, device)}

    def tables(self, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        tables = {kind: self._rotaries[kind].at(positions) for kind in set(self._kinds)}
        return [tables[kind] for kind in self._kinds]


class Gemma3(ByKind):
    attention: type[Attention] = Gemma3Attention
    norm = OffsetRMSNorm
    tied = True
    defaults: ClassVar[Config] = {"sliding_window": 4096}
    refused: tuple[str, ...] = _REFUSED
    splits = SPLITS

    def __init__(
        self, config: Config, weights: Weights, dtype: torch.dtype, device: torch.device, max_position: int
    ) -> None:
        config = self.completed({**config, "use_sliding_window": True})
        super().__init__(config, weights, dtype, device, max_position)
        embed, scale = self._embed, torch.tensor(int(config["hidden_size"]) ** 0.5, dtype=dtype, device=device)
        self._embed = lambda token_ids: embed(token_ids) * scale
        capped = config.get("final_logit_softcapping") is not None
        self._cap = Scores(softcap=number(config, "final_logit_softcapping") if capped else None)

    def check(self, config: Config) -> None:
        check_activation(config, "hidden_activation", ACTIVATION)
        refuse(config, self.refused)

    def _layer(self, config: Config, weights: Weights, index: int, width: int, eps: float) -> Layer:
        names = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        norms = [self.norm(weights(f"{name}_layernorm.weight", width), eps) for name in names]
        attention = self.attention(config, self.shape, weights.below("self_attn"), index, self._rotary)
        return Gemma3Layer(norms, attention, Gemma3FeedForward(config, weights.below("mlp")))

    def rope(self, config: Config, kind: str) -> Config:
        return rope(config, kind)

    def scaled(self, logits: Tensor) -> Tensor:
        return self._cap.capped(logits)


def layer_types(config: Config) -> list[str]:
    """Return the kind of every layer; in older configs each n-th layer is global."""
    layers = int(config["num_hidden_layers"])
    if (kinds := config.get("layer_types")) is None:
        every = count(config, "sliding_window_pattern", 6)
        return [SLIDING if (index + 1) % every else FULL for index in range(layers)]
    if len(kinds) != layers or not set(kinds) <= {FULL, SLIDING}:
        raise UsageError(f"layer_types must be {layers} of {FULL} and {SLIDING}")
    return list(kinds)


def rope(config: Config, kind: str) -> Config:
    """Return the rotary part of the config for layers of a kind. Old configs scale the global layers only."""
    theta = number(config, "rope_theta", 1e6) if kind == FULL else number(config, "rope_local_base_freq", 1e4)
    parameters, scaling = mapping(config, "rope_parameters"), mapping(config, "rope_scaling")
    if parameters and scaling:
        raise UsageError("rope_parameters and rope_scaling contradict each other: remove one of them")
    if not parameters.keys() <= {FULL, SLIDING}:
        raise UsageError(f"rope_parameters must be those of {FULL} and of {SLIDING}")
    return {
        **{name: config[name] for name in _OF_ALL_KINDS if name in config},
        "rope_theta": theta,
        "rope_parameters": parameters.get(kind) or (scaling if kind == FULL else None),
    }
