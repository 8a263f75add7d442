"""The text models of the Gemma 4 family, `model_type` gemma4_text.

New beside Gemma 3: layers have inputs from a second embedding, the last layers read keys and values of an earlier one,
global layers have larger heads, and a layer may have experts beside its feed-forward."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ssd.errors import UsageError
from ssd.layers.attention import Scores
from ssd.layers.linear import Table
from ssd.layers.norm import Residual, RMSNorm, gelu_mul
from ssd.layers.rotary import Frequencies, Rotary, frequencies
from ssd.models.families.llama import SPLITS, check_activation, head_and_table, shape_of, text_of
from ssd.models.families.qwen3_moe import Experts
from ssd.models.head import Predicting
from ssd.models.interface import ForwardContext
from ssd.models.layer_kinds import FULL, SLIDING
from ssd.models.split import VOCABULARY, Splits
from ssd.models.weights import Weights
from ssd.plugins.families.gemma3 import ACTIVATION, Gemma3FeedForward, rope
from ssd.plugins.families.sizes import gemma4_layers
from ssd.system.fields import Config, count, flag, mapping, number, refuse

_INPUT = "hidden_size_per_layer_input"
_ROPE = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
"""The rotations of a config that names none."""
_SPLITS: Splits = {**SPLITS, "embed_tokens_per_layer": VOCABULARY}


class Gemma4Attention:
    """Attention with norms on queries, keys and values, and scores that are not scaled.

    `source`: the layer whose keys and values, (kv_heads, dim) as `size`, it reads; itself if it has any."""

    def __init__(
        self,
        config: Config,
        weights: Weights,
        kind: str,
        size: tuple[int, int],
        source: int,
        shares: bool,
        rotary: Rotary,
    ) -> None:
        self._heads, width, eps = count(config, "num_attention_heads"), count(config, "hidden_size"), _eps(config)
        self._kv_heads, self._dim = size
        self._source, self._shares, self._rotary = source, shares, rotary
        parts = [("q_proj", self._heads * self._dim)]
        if not shares:
            equal = kind == FULL and flag(config, "attention_k_eq_v")
            parts += [(name, self._kv_heads * self._dim) for name in (("k_proj",) if equal else ("k_proj", "v_proj"))]
            weight = weights("k_norm.weight", self._dim)
            self._k_norm, self._v_norm = RMSNorm(weight, eps), RMSNorm(torch.ones_like(weight), eps)
        self._q_norm = RMSNorm(weights("q_norm.weight", self._dim), eps)
        self._projection = weights.linear(weights.stacked(parts, width), None)
        self._out = weights.linear(weights.stacked([("o_proj", width)], self._heads * self._dim), None)
        self._scores = Scores(1.0, count(config, "sliding_window", 512) if kind == SLIDING else None)

    def __call__(self, x: Tensor, table: tuple[Tensor, Tensor], context: ForwardContext) -> Tensor:
        projected = self._projection(x).view(x.shape[0], -1, self._dim)
        queries = self._q_norm(projected[:, : self._heads])
        if self._shares:
            return self._out(context.attend_stored(self._source, self._rotary(queries, table), self._scores))
        # Keys are values as well where the model has no projection to values.
        keys, values = projected[:, self._heads :][:, : self._kv_heads], projected[:, -self._kv_heads :]
        turned = self._rotary(torch.cat((queries, self._k_norm(keys)), dim=1), table)
        q, k = turned[:, : self._heads], turned[:, self._heads :]
        return self._out(context.attend(self._source, q, k, self._v_norm(values), self._scores))


class Gemma4Experts(Experts):
    router, expert = "router.proj", Gemma3FeedForward

    def __init__(self, config: Config, weights: Weights) -> None:
        chosen = {"num_experts_per_tok": config["top_k_experts"], "norm_topk_prob": True}
        super().__init__({**config, **chosen}, weights)
        width = count(config, "hidden_size")
        self._router_norm = RMSNorm(weights("router.scale", width) * width**-0.5, _eps(config))
        self._scales = weights("router.per_expert_scale", count(config, "num_experts"))
        self._norm = RMSNorm(weights("pre_feedforward_layernorm_2.weight", width), _eps(config))

    def __call__(self, x: Tensor) -> Tensor:
        shares, chosen = self.choose(self._router(self._router_norm(x)))
        return self.mixed(self._norm(x), shares * self._scales[chosen], chosen)


class Gemma4Layer:
    """Adds to x what Gemma 3 adds, then what this layer's input gives, and scales the sum."""

    def __init__(self, config: Config, weights: Weights, attention: Gemma4Attention, shares: bool) -> None:
        width, inner = count(config, "hidden_size"), count(config, "intermediate_size")
        if shares and flag(config, "use_double_wide_mlp"):
            inner *= 2

        def norm(name: str) -> RMSNorm:
            return RMSNorm(weights(f"{name}.weight", width), _eps(config))

        names = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        self._norms = [norm(f"{name}_layernorm") for name in names]
        self._attention = attention
        self._feed_forward = Gemma3FeedForward({**config, "intermediate_size": inner}, weights.below("mlp"))
        self._experts = Gemma4Experts(config, weights) if flag(config, "enable_moe_block") else None
        if self._experts is not None:
            self._beside = [norm(f"post_feedforward_layernorm_{index}") for index in (1, 2)]
        if size := input_width(config):
            self._gate = weights.linear(weights.stacked([("per_layer_input_gate", size)], width), None)
            self._project = weights.linear(weights.stacked([("per_layer_projection", width)], size), None)
            self._input_norm = norm("post_per_layer_input_norm")
        self._scalar = weights("layer_scalar", 1)

    def __call__(
        self, x: Tensor, table: tuple[Tensor, Tensor], given: Tensor | None, context: ForwardContext
    ) -> Tensor:
        before_attention, after_attention, before, after = self._norms
        total = Residual(x)
        total.add(self._attention(total.normed(before_attention), table, context), after_attention)
        made = self._feed_forward(total.normed(before))
        if self._experts is not None:
            made = self._beside[0](made) + self._beside[1](self._experts(total.value))
        total.add(made, after)
        if given is not None:
            total.add(self._project(gelu_mul(torch.cat((self._gate(total.value), given), dim=1))), self._input_norm)
        return total.value * self._scalar


class Gemma4(Predicting):
    defaults: ClassVar[Config] = {"head_dim": 256, _INPUT: 256}
    splits = _SPLITS  # for a draft's vocabulary

    def __init__(
        self, config: Config, weights: Weights, dtype: torch.dtype, device: torch.device, max_position: int
    ) -> None:
        config = {**self.defaults, **config}
        _check(config)
        if weights.share.ranks.size > 1:
            raise UsageError("layers of different sizes are not split over ranks: use --tensor-parallel-size 1")
        kinds, sizes = gemma4_layers(config)
        self.dtype, self.device, self._kinds = dtype, device, kinds
        heads, dim = sizes[0]
        config = {**config, "num_key_value_heads": heads, "head_dim": dim}
        differ = tuple(sizes) if len(set(sizes)) > 1 else ()
        self.shape = replace(shape_of(config, max_position), layers=len(sizes), sizes=differ)
        # The last layer of a kind that has keys and values of its own: layers behind it share these.
        last = {kind: index for index, kind in enumerate(kinds[: len(sizes)])}
        self._rotary = {
            kind: Rotary(_frequencies(config, kind, sizes[index][1], max_position), max_position, dtype, device)
            for kind, index in last.items()
        }
        model, width = text_of(weights), count(config, "hidden_size")
        self.head, table = head_and_table(config, weights, model, self.shape, width, device, tied=True)
        self._embed = weights.embedding(table, self.shape.vocab_size)
        self._scale = torch.tensor(width**0.5, dtype=dtype, device=device)
        if size := input_width(config):
            every = len(kinds) * size
            self._input_table = Table(model.whole("embed_tokens_per_layer.weight", self.shape.vocab_size, every))
            self._input_scale = torch.tensor(size**0.5, dtype=dtype, device=device)
            self._input_projection = weights.linear(model.stacked([("per_layer_model_projection", every)], width), None)
            self._input_norm = RMSNorm(model("per_layer_projection_norm.weight", size), _eps(config))
        self._input_width = size
        self._layers = []
        for index, kind in enumerate(kinds):
            below, shares = model.below(f"layers.{index}"), index >= len(sizes)
            source = last[kind] if shares else index
            attention = Gemma4Attention(
                config, below.below("self_attn"), kind, sizes[source], source, shares, self._rotary[kind]
            )
            self._layers.append(Gemma4Layer(config, below, attention, shares))
        self._norm = RMSNorm(model("norm.weight", width), _eps(config))
        capped = config.get("final_logit_softcapping") is not None
        self._cap = Scores(softcap=number(config, "final_logit_softcapping") if capped else None)

    def forward(self, token_ids: Tensor, context: ForwardContext) -> Tensor:
        x = self._embed(token_ids) * self._scale
        tables = {kind: rotary.at(context.positions) for kind, rotary in self._rotary.items()}
        inputs = self._inputs(token_ids, x)
        context.keep_hidden(0, x)
        for index, (layer, kind) in enumerate(zip(self._layers, self._kinds, strict=True)):
            x = layer(x, tables[kind], None if inputs is None else inputs[:, index], context)
            context.keep_hidden(index + 1, x)
        return self._norm(x)

    def scaled(self, logits: Tensor) -> Tensor:
        return self._cap.capped(logits)

    def _inputs(self, token_ids: Tensor, x: Tensor) -> Tensor | None:
        """Return the layers' inputs [n, layers, width] from tokens and their embeddings x, or None."""
        if not self._input_width:
            return None
        projected = self._input_projection(x).view(len(x), -1, self._input_width) * x.shape[1] ** -0.5
        of_tokens = self._input_table(token_ids).view(projected.shape) * self._input_scale
        return (self._input_norm(projected) + of_tokens) * 2**-0.5


def input_width(config: Config) -> int:
    """Return the width of each layer's input, or 0."""
    return count(config, _INPUT) if config[_INPUT] else 0


def _eps(config: Config) -> float:
    return number(config, "rms_norm_eps", 1e-6)


def _frequencies(config: Config, kind: str, head_dim: int, max_position: int) -> Frequencies:
    parameters = mapping(config, "rope_parameters").get(kind) or _ROPE[kind]
    if parameters.get("rope_type") != "proportional":
        return frequencies(head_dim, rope({**config, "rope_parameters": {kind: parameters}}, kind), max_position)
    turned = int(number(parameters, "partial_rotary_factor", 1.0) * head_dim // 2)
    exponents = torch.arange(0, 2 * turned, 2).float() / head_dim
    inverse = number(parameters, "rope_theta") ** -exponents / number(parameters, "factor", 1.0)
    return Frequencies(F.pad(inverse, (0, head_dim // 2 - turned)))


def _check(config: Config) -> None:
    check_activation(config, "hidden_activation", ACTIVATION)
    if config.get("use_bidirectional_attention") == "all":
        raise UsageError("use_bidirectional_attention of all tokens is not supported: tokens may see no later ones")
    refuse(config, ("attention_bias", "mlp_bias"))
