"""The StableLM family (`model_type` stablelm): layer norms, and heads of which only the first part is rotated.

An example of a family from outside the engine: this file and a pyproject.toml are all there is to it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ssd.errors import UsageError
from ssd.layers.rotary import Rotary, frequencies
from ssd.models.families.llama import shape_of
from ssd.models.interface import ForwardContext, Shape
from ssd.models.weights import LinearLayer, Weights
from ssd.system.fields import Config


def norm(config: Config, weights: Weights, name: str) -> Callable[[Tensor], Tensor]:
    width, eps = int(config["hidden_size"]), float(config.get("layer_norm_eps", 1e-5))
    weight, bias = weights(f"{name}.weight", width), weights(f"{name}.bias", width)
    return lambda x: F.layer_norm(x, (width,), weight, bias, eps)


def linear(weights: Weights, inputs: int, parts: dict[str, int], bias: bool = False) -> LinearLayer:
    """One projection [inputs] -> [sum of the parts' sizes] from several tensors of the checkpoint."""
    return weights.linear(
        torch.cat([weights(f"{name}.weight", size, inputs) for name, size in parts.items()]),
        torch.cat([weights(f"{name}.bias", size) for name, size in parts.items()]) if bias else None,
    )


class Layer:
    """Attention and feed-forward, one after the other or side by side."""

    def __init__(self, config: Config, shape: Shape, weights: Weights, layer: int) -> None:
        width, inner = int(config["hidden_size"]), int(config["intermediate_size"])
        kv_size = shape.kv_heads * shape.head_dim
        self._norm = norm(config, weights, "input_layernorm")
        side_by_side = config.get("use_parallel_residual", False)
        self._second = None if side_by_side else norm(config, weights, "post_attention_layernorm")
        attention, forward = weights.below("self_attn"), weights.below("mlp")
        parts = {"q_proj": width, "k_proj": kv_size, "v_proj": kv_size}
        self._qkv = linear(attention, width, parts, bool(config.get("use_qkv_bias", False)))
        self._out = linear(attention, width, {"o_proj": width})
        self._gate_up = linear(forward, width, {"gate_proj": inner, "up_proj": inner})
        self._down = linear(forward, inner, {"down_proj": width})
        self._shape, self._layer = shape, layer

    def __call__(self, x: Tensor, rotary: Rotary, table: tuple[Tensor, Tensor], context: ForwardContext) -> Tensor:
        normed = self._norm(x)
        heads = self._shape.heads
        qkv = self._qkv(normed).view(x.shape[0], -1, self._shape.head_dim)
        qk, v = rotary(qkv[:, : heads + self._shape.kv_heads], table), qkv[:, heads + self._shape.kv_heads :]
        attended = x + self._out(context.attend(self._layer, qk[:, :heads], qk[:, heads:], v))
        gate, up = self._gate_up(normed if self._second is None else self._second(attended)).chunk(2, dim=-1)
        return attended + self._down(F.silu(gate) * up)


class StableLM:
    """A StableLM decoder; see `ssd.models.interface.Model`."""

    def __init__(
        self, config: Config, weights: Weights, dtype: torch.dtype, device: torch.device, max_position: int
    ) -> None:
        if config.get("hidden_act", "silu") != "silu":
            raise UsageError(f"activation {config['hidden_act']!r} is not supported (silu is)")
        if config.get("qk_layernorm"):
            raise UsageError("qk_layernorm is not supported")
        self.shape, self.dtype, self.device = shape_of(config, max_position), dtype, device
        turned = frequencies(self.shape.head_dim, {"partial_rotary_factor": 0.25, **config}, max_position, partly=True)
        self._rotary = Rotary(turned, max_position, dtype, device)
        width, model = int(config["hidden_size"]), weights.below("model")
        self._embedding = model("embed_tokens.weight", self.shape.vocab_size, width)
        self._layers = [
            Layer(config, self.shape, model.below(f"layers.{index}"), index) for index in range(self.shape.layers)
        ]
        self._norm = norm(config, model, "norm")
        tied = config.get("tie_word_embeddings", False)
        head = self._embedding if tied else weights("lm_head.weight", self.shape.vocab_size, width)
        self._head = weights.linear(head, None)

    def forward(self, token_ids: Tensor, context: ForwardContext) -> Tensor:
        x, table = self._embedding[token_ids], self._rotary.at(context.positions)
        for layer in self._layers:
            x = layer(x, self._rotary, table, context)
        return self._norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)
