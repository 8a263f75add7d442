"""The text models of Gemma 3 (arXiv 2503.19786): four norms a layer, also on queries and keys.

Most layers see a window only and rotate by a base of their own."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ssd.errors import UsageError
from ssd.layers.attention import Scores
from ssd.layers.norm import OffsetRMSNorm, Residual, gelu_mul
from ssd.layers.rotary import Rotary, frequencies
from ssd.models.families.llama import (
    SPLITS,
    Attention,
    FeedForward,
    check_activation,
    head_and_table,
    shape_of,
    text_of,
    through_layers,
    window_of,
)
from ssd.models.families.qwen3 import Qwen3Attention
from ssd.models.head import Predicting
from ssd.models.interface import ForwardContext, Shape
from ssd.models.layer_kinds import FULL, SLIDING
from ssd.models.weights import Weights
from ssd.system.fields import Config, count, mapping, number, refuse

ACTIVATION = "gelu_pytorch_tanh"
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


class Gemma3Layer:
    """Adds norm(attention(norm(x))) to x, then norm(feed_forward(norm(x)))."""

    def __init__(self, config: Config, weights: Weights, attention: Attention) -> None:
        names = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        width, eps = int(config["hidden_size"]), number(config, "rms_norm_eps", 1e-6)
        self._norms = [OffsetRMSNorm(weights(f"{name}_layernorm.weight", width), eps) for name in names]
        self._attention = attention
        self._feed_forward = Gemma3FeedForward(config, weights.below("mlp"))

    def __call__(self, x: Residual, table: tuple[Tensor, Tensor], context: ForwardContext) -> None:
        before_attention, after_attention, before, after = self._norms
        x.add(self._attention(x.normed(before_attention), table, context), after_attention)
        x.add(self._feed_forward(x.normed(before)), after)


class Gemma3(Predicting):
    attention: type[Attention] = Gemma3Attention
    defaults: ClassVar[Config] = {"sliding_window": 4096}
    refused: tuple[str, ...] = _REFUSED
    splits = SPLITS

    def __init__(
        self, config: Config, weights: Weights, dtype: torch.dtype, device: torch.device, max_position: int
    ) -> None:
        config = {**self.defaults, **config}
        check_activation(config, "hidden_activation", ACTIVATION)
        refuse(config, self.refused)
        self.shape, self.dtype, self.device = weights.share.shape(shape_of(config, max_position)), dtype, device
        kinds = self._kinds = layer_types(config)
        self._rotary = {
            kind: Rotary(
                frequencies(self.shape.head_dim, self.rope(config, kind), max_position), max_position, dtype, device
            )
            for kind in set(kinds)
        }
        width, model = int(config["hidden_size"]), text_of(weights)
        self.head, table = head_and_table(config, weights, model, self.shape, width, device, tied=True)
        self._embed = weights.embedding(table, self.shape.vocab_size)
        self._scale = torch.tensor(width**0.5, dtype=dtype, device=device)
        typed = {**config, "layer_types": kinds, "use_sliding_window": True}
        self._layers = [self._layer(typed, model.below(f"layers.{index}"), index) for index in range(len(kinds))]
        self._norm = OffsetRMSNorm(model("norm.weight", width), number(config, "rms_norm_eps", 1e-6))
        capped = config.get("final_logit_softcapping") is not None
        self._cap = Scores(softcap=number(config, "final_logit_softcapping") if capped else None)

    def _layer(self, config: Config, weights: Weights, index: int) -> Gemma3Layer:
        rotary = self._rotary[self._kinds[index]]
        return Gemma3Layer(
            config, weights, self.attention(config, self.shape, weights.below("self_attn"), index, rotary)
        )

    def rope(self, config: Config, kind: str) -> Config:
        """Return the rotary part of the config for layers of a kind; a family may override it."""
        return rope(config, kind)

    def forward(self, token_ids: Tensor, context: ForwardContext) -> Tensor:
        x = self._embed(token_ids) * self._scale
        tables = {kind: rotary.at(context.positions) for kind, rotary in self._rotary.items()}
        context.keep_hidden(0, x)
        return through_layers(x, self._layers, [tables[kind] for kind in self._kinds], self._norm, context)

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
        "rope_theta": theta,
        "rope_parameters": parameters.get(kind) or (scaling if kind == FULL else None),
        "max_position_embeddings": config.get("max_position_embeddings"),
    }
