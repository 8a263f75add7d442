"""The text models of Qwen3-Next and Qwen3.5: most layers have a gated delta rule (arXiv 2412.06464).

Other layers have attention with a gate on its output. Vision towers and MTP layers of a checkpoint are left alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ssd.errors import UsageError
from ssd.kernels.library import MAX_WINDOW
from ssd.layers.linear import Linear
from ssd.layers.norm import OffsetRMSNorm, RMSNorm, silu_mul
from ssd.layers.recurrent import GatedDelta, ShortConvolution, StateSize, sigmoid_mul
from ssd.models.families.llama import (
    SPLITS,
    Attention,
    FeedForward,
    Layer,
    Llama,
    check_activation,
)
from ssd.models.families.qwen3 import Qwen3Attention
from ssd.models.families.qwen3_moe import Experts, has_experts
from ssd.models.interface import ForwardContext
from ssd.models.layer_kinds import FULL, LINEAR
from ssd.models.weights import Weights
from ssd.system.fields import Config, count, flag, number, refuse

Parts = Sequence[tuple[str, int]]


class Recurrent(Protocol):
    """Computes a layer from states in place of attention; `sizes` are those of its recurrences."""

    sizes: tuple[StateSize, ...]

    def __init__(self, config: Config, weights: Weights, index: int) -> None: ...
    def __call__(self, x: Tensor, table: tuple[Tensor, Tensor], context: ForwardContext) -> Tensor: ...


def convolved(config: Config, name: str) -> int:
    """Return over how many tokens a short convolution goes."""
    if (window := count(config, name, most=MAX_WINDOW)) < 2:
        raise UsageError(f"{name} must be above 1")
    return window


class GatedAttention(Qwen3Attention):
    """Attention whose output is multiplied by the sigmoid of a gate, made by the query projection."""

    norm = OffsetRMSNorm

    @staticmethod
    def parts(q_size: int, kv_size: int) -> tuple[tuple[str, int], ...]:
        return ("q_proj", 2 * q_size), ("k_proj", kv_size), ("v_proj", kv_size)

    def __call__(self, x: Tensor, table: tuple[Tensor, Tensor], context: ForwardContext) -> Tensor:
        projected, gate = self._gated(x)
        attended = context.attend(self._layer, *self._rotated(projected, table), self._scores)
        return self._out(sigmoid_mul(gate, attended))

    def _projected(self, x: Tensor) -> Tensor:
        return self._gated(x)[0]

    def _gated(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries, keys and values [n, heads + 2 * kv_heads, dim], and the gate [n, heads * dim]."""
        shape, n = self._shape, x.shape[0]
        projected = self._qkv(x).view(n, -1, shape.head_dim)
        queries, gate = projected[:, : 2 * shape.heads].view(n, shape.heads, 2, shape.head_dim).unbind(2)
        return torch.cat((queries, projected[:, 2 * shape.heads :]), dim=1), gate.flatten(1)


class DeltaNet:
    """A short convolution over queries, keys and values, the gated delta rule, and a gated norm a head.

    Its recurrences are `2 * index` and `2 * index + 1` of the model's."""

    def __init__(self, config: Config, weights: Weights, index: int) -> None:
        width, self._index = count(config, "hidden_size"), index
        self._key_heads, self._heads = (count(config, f"linear_num_{kind}_heads") for kind in ("key", "value"))
        self._key_dim, self._value_dim = (count(config, f"linear_{kind}_head_dim") for kind in ("key", "value"))
        if self._heads % self._key_heads:
            raise UsageError(f"linear_num_value_heads {self._heads} are no multiple of {self._key_heads} key heads")
        self._keys, self._values = self._key_heads * self._key_dim, self._heads * self._value_dim
        self._qkvz, self._ba = (
            weights.linear(weights.stacked(parts, width), None)
            for parts in self.parts(weights, 2 * self._keys + self._values, self._values, self._heads)
        )
        channels, window = 2 * self._keys + self._values, convolved(config, "linear_conv_kernel_dim")
        self._convolution = ShortConvolution(weights("conv1d.weight", channels, 1, window)[:, 0], silu=True)
        decay = -weights("A_log", self._heads).float().exp()
        tiled, sizes = flag(config, "linear_value_heads_tiled"), (self._key_heads, self._key_dim, self._value_dim)
        self._delta = GatedDelta(decay, weights("dt_bias", self._heads), *sizes, tiled)
        self._norm = RMSNorm(weights("norm.weight", self._value_dim), number(config, "rms_norm_eps", 1e-6))
        self._out = weights.linear(weights.stacked([("out_proj", width)], self._values), None)
        self.sizes: tuple[StateSize, ...] = self._convolution.size, self._delta.size

    def parts(self, weights: Weights, qkv: int, z: int, heads: int) -> tuple[Parts, Parts]:
        """Return (name, outputs) of the tensors that project to q, k, v and gate z, and of those to b and a."""
        return [("in_proj_qkv", qkv), ("in_proj_z", z)], [("in_proj_b", heads), ("in_proj_a", heads)]

    def __call__(self, x: Tensor, table: tuple[Tensor, Tensor], context: ForwardContext) -> Tensor:
        (mixed, z), ba = self._qkv_and_z(x), self._b_and_a(x)
        mixed = context.recur(2 * self._index, self._convolution, mixed, mixed[:, :0])
        changes, queries = torch.cat((mixed[:, self._keys :], ba), dim=1), mixed[:, : self._keys]
        read = context.recur(2 * self._index + 1, self._delta, changes, queries)
        normed = self._norm(read.view(-1, self._heads, self._value_dim)).flatten(1)
        return self._out(silu_mul(torch.cat((z, normed), dim=1)))

    def _qkv_and_z(self, x: Tensor) -> Sequence[Tensor]:
        return self._qkvz(x).split((2 * self._keys + self._values, self._values), dim=1)

    def _b_and_a(self, x: Tensor) -> Tensor:
        return self._ba(x)


class FusedDeltaNet(DeltaNet):
    """A delta net whose projections are two tensors, each with the parts of a key head side by side."""

    def parts(self, weights: Weights, qkv: int, z: int, heads: int) -> tuple[Parts, Parts]:
        self._apart, ba = weights.stored("in_proj_qkv.weight"), [("in_proj_ba", 2 * heads)]
        return [("in_proj_qkv", qkv), ("in_proj_z", z)] if self._apart else [("in_proj_qkvz", qkv + z)], ba

    def _qkv_and_z(self, x: Tensor) -> Sequence[Tensor]:
        if self._apart:
            return super()._qkv_and_z(x)
        keys, values = self._key_dim, self._values // self._key_heads
        by_key = self._qkvz(x).view(x.shape[0], self._key_heads, -1)
        *qkv, z = by_key.split((keys, keys, values, values), dim=2)
        return torch.cat([part.flatten(1) for part in qkv], dim=1), z.flatten(1)

    def _b_and_a(self, x: Tensor) -> Tensor:
        b, a = self._ba(x).view(x.shape[0], self._key_heads, -1).chunk(2, dim=2)
        return torch.cat((b, a), dim=1).flatten(1)


class SharedExperts(Experts):
    """Experts, and a feed-forward that every token passes, weighted by the sigmoid of a gate."""

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(config, weights)
        width = count(config, "hidden_size")
        inner = {**config, "intermediate_size": count(config, "shared_expert_intermediate_size")}
        self._shared = FeedForward(inner, weights.below("shared_expert"))
        self._gate = Linear(weights("shared_expert_gate.weight", 1, width))

    def __call__(self, x: Tensor) -> Tensor:
        shared = self._shared(x)
        return super().__call__(x) + sigmoid_mul(self._gate(x).expand_as(shared), shared)


class Qwen35(Llama):
    attention: type[Attention] = GatedAttention
    recurrent: type[Recurrent] = DeltaNet  # what most layers have for attention
    norm: type[RMSNorm] = OffsetRMSNorm
    partly_rotated = True
    kind = LINEAR  # of these layers in `layer_types`
    below = "linear_attn", "mlp"  # of a layer: what it has for attention, its feed-forward
    defaults: ClassVar[Config] = {
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    }
    refused: tuple[str, ...] = ("mlp_bias", "sliding_window")
    splits = SPLITS  # for a draft's vocabulary

    def __init__(
        self, config: Config, weights: Weights, dtype: torch.dtype, device: torch.device, max_position: int
    ) -> None:
        if weights.share.ranks.size > 1:
            raise UsageError("layers with a state are not split over ranks: use --tensor-parallel-size 1")
        self._states: list[StateSize] = []
        super().__init__(config, weights, dtype, device, max_position)
        attending = self.layer_types(self.completed(config)).count(FULL)
        self.shape = replace(self.shape, layers=attending, states=tuple(self._states))

    @classmethod
    def completed(cls, config: Config) -> dict[str, Any]:
        return {**cls.defaults, **{name: value for name, value in config.items() if value is not None}}

    @classmethod
    def layer_types(cls, config: Config) -> list[str]:
        """Return the kind of every layer; without a list, `attends` names the layers with attention."""
        layers = count(config, "num_hidden_layers")
        if (kinds := config.get("layer_types")) is None:
            kinds = [FULL if cls.attends(config, index) else cls.kind for index in range(layers)]
        if len(kinds) != layers or not set(kinds) <= {FULL, cls.kind} or FULL not in kinds:
            raise UsageError(f"layer_types must be {layers} of {FULL} and {cls.kind}, at least one of them {FULL}")
        return list(kinds)

    @staticmethod
    def attends(config: Config, layer: int) -> bool:
        return (layer + 1) % count(config, "full_attention_interval", 4) == 0

    def check(self, config: Config) -> None:
        check_activation(config)
        refuse(config, self.refused)
        if not flag(config, "attn_output_gate", True):
            raise UsageError("attn_output_gate false is not supported in this family")

    def _layer(self, config: Config, weights: Weights, index: int, width: int, eps: float) -> Layer:
        kinds = self.layer_types(config)
        kind, before = kinds[index], kinds[:index].count(kinds[index])
        if kind == FULL:
            alike = {**config, "layer_types": None}
            mixer: Any = self.attention(alike, self.shape, weights.below("self_attn"), before, self._rotary)
        else:
            mixer = self.recurrent(config, weights.below(self.below[0]), before)
            self._states += mixer.sizes
        first, second = (self.norm(weights(f"{name}.weight", width), eps) for name in self.norms[:2])
        return Layer(first, mixer, second, self.feed_forward(config, weights.below(self.below[1]), index))


class Qwen35MoE(Qwen35):
    refused = (*Qwen35.refused, "mlp_only_layers")
    splits = SPLITS

    def feed_forward(self, config: Config, weights: Weights, layer: int) -> Callable[[Tensor], Tensor]:
        return SharedExperts({**config, "norm_topk_prob": True}, weights)


class Qwen3Next(Qwen35):
    recurrent = FusedDeltaNet
    splits = SPLITS

    def feed_forward(self, config: Config, weights: Weights, layer: int) -> Callable[[Tensor], Tensor]:
        if not has_experts(config, layer):
            return FeedForward(config, weights)
        return SharedExperts({**config, "norm_topk_prob": flag(config, "norm_topk_prob", True)}, weights)
