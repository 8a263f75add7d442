"""A block drafter: a few layers that predict several tokens in one pass, from hidden states of the target.

The layouts are those of DFlash (z-lab) and DSpark (arXiv 2607.05147, deepseek-ai/DeepSpec), flat, nested or as vLLM's
`speculators` writes them. Keys and values of the committed text are made of the target's hidden states (`context`);
the rows of a block are a known token, or several, and a mask for each further place. A first-order head adds to the
logits of a place what the token before it says (`bias`)."""

from __future__ import annotations

import torch
from torch import Tensor

from ssd.errors import UsageError
from ssd.layers.attention import Scores
from ssd.layers.norm import Residual, RMSNorm
from ssd.layers.rotary import Rotary, frequencies
from ssd.models.blocks import fields_of
from ssd.models.families.llama import FeedForward, shape_of
from ssd.models.head import predicting
from ssd.models.interface import ForwardContext
from ssd.models.pairs import EMBEDDING, TARGET_EMBEDDING
from ssd.models.weights import Weights
from ssd.system.fields import Config, flag, number

MASK = -1
"""Stands for a mask among the token ids of a forward."""

Turn = tuple[Tensor, Tensor]


class BlockAttention:
    """Attention of a block; keys and values of the committed text are made by the same projections."""

    def __init__(self, config: Config, model: BlockDraft, weights: Weights, layer: int) -> None:
        shape, width, eps = model.shape, int(config["hidden_size"]), number(config, "rms_norm_eps", 1e-6)
        q_size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        bias = flag(config, "attention_bias")

        def linear(parts: list[tuple[str, int]], inputs: int) -> object:
            biases = [weights(f"{name}.bias", size) for name, size in parts] if bias else None
            return weights.linear(weights.stacked(parts, inputs), torch.cat(biases) if biases else None)

        self._q = linear([("q_proj", q_size)], width)
        self._kv = linear([("k_proj", kv_size), ("v_proj", kv_size)], width)
        self._out = linear([("o_proj", width)], q_size)
        normed = config.get("model_type") != "llama"
        self._norms = tuple(
            RMSNorm(weights(f"{name}.weight", shape.head_dim), eps) if normed or weights.has(f"{name}.weight") else None
            for name in ("q_norm", "k_norm")
        )
        self._shape, self._layer, self._rotary = shape, layer, model.rotary
        self._scores = Scores(window=None)

    def keys_and_values(self, x: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
        """Return keys and values [n, kv_heads, head_dim] of x [n, width]."""
        k, v = self._kv(x).view(len(x), 2, self._shape.kv_heads, self._shape.head_dim).unbind(1)  # type: ignore[operator]
        return self._turned(k, 1, turn), v

    def __call__(self, x: Tensor, turn: Turn, context: ForwardContext) -> Tensor:
        q = self._turned(self._q(x).view(len(x), self._shape.heads, self._shape.head_dim), 0, turn)  # type: ignore[operator]
        return self._out(context.attend(self._layer, q, *self.keys_and_values(x, turn), self._scores))  # type: ignore[operator]

    def _turned(self, x: Tensor, which: int, turn: Turn) -> Tensor:
        norm = self._norms[which]
        return self._rotary(x if norm is None else norm(x), turn)


class BlockLayer:
    """Adds attention(norm(x)) to x, then feed_forward(norm(x))."""

    def __init__(self, config: Config, model: BlockDraft, weights: Weights, layer: int) -> None:
        width, eps = int(config["hidden_size"]), number(config, "rms_norm_eps", 1e-6)
        names = "input_layernorm", "post_attention_layernorm"
        self._norms = [RMSNorm(weights(f"{name}.weight", width), eps) for name in names]
        self.attention = BlockAttention(config, model, weights.below("self_attn"), layer)
        self._feed_forward = FeedForward(config, weights.below("mlp"))

    def __call__(self, x: Residual, turn: Turn, context: ForwardContext) -> None:
        x.add(self.attention(x.normed(self._norms[0]), turn, context))
        x.add(self._feed_forward(x.normed(self._norms[1])))


class BlockDraft:
    """A block drafter; see `ssd.models.interface.Model`. Among the ids of `forward`, MASK stands for a mask."""

    def __init__(
        self, config: Config, weights: Weights, dtype: torch.dtype, device: torch.device, max_position: int
    ) -> None:
        if config.get("hidden_act", "silu") != "silu":
            raise UsageError(f"activation {config['hidden_act']!r} is not supported (silu is)")
        self.fields, self.shape = fields_of(config), shape_of(config, max_position)
        self.dtype, self.device = dtype, device
        width, eps = int(config["hidden_size"]), number(config, "rms_norm_eps", 1e-6)
        self.rotary = Rotary(frequencies(self.shape.head_dim, config, max_position), max_position, dtype, device)
        own = weights.has(EMBEDDING)
        embedding = weights.whole(EMBEDDING if own else TARGET_EMBEDDING, self.shape.vocab_size, width)
        self.head, self._embed = predicting(config, weights, self.shape, device, embedding, not own)
        self.fused = len(self.fields.layers) * width
        self._fuse = weights.linear(weights.stacked([("fc", width)], self.fused), None)
        self._hidden_norm = RMSNorm(weights("hidden_norm.weight", width), eps)
        self.layers = [
            BlockLayer(config, self, weights.below(f"layers.{index}"), index) for index in range(self.shape.layers)
        ]
        self._norm = RMSNorm(weights("norm.weight", width), eps)
        mask = torch.tensor([self.fields.mask or 0], device=device)
        self._mask = weights("mask_embedding", width) if self.fields.mask is None else self._embed(mask)[0]
        self._first: tuple[Tensor, Tensor] | None = None
        if rank := self.fields.rank:
            markov = weights.below("markov_head")
            self._first = (
                markov("markov_w1.weight", self.shape.vocab_size, rank),
                markov("markov_w2.weight", self.shape.outputs, rank),
            )

    def context(self, states: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values [n, kv_heads, head_dim] by layer of committed tokens at `positions` int64 [n].

        `states` [n, fused] are the target's hidden states of these tokens, after each of its layers, side by side."""
        x, turn = self._hidden_norm(self._fuse(states)), self.rotary.at(positions)
        return [layer.attention.keys_and_values(x, turn) for layer in self.layers]

    def forward(self, token_ids: Tensor, context: ForwardContext) -> Tensor:
        masks = token_ids == MASK
        total = Residual(torch.where(masks[:, None], self._mask, self._embed(token_ids.masked_fill(masks, 0))))
        turn = self.rotary.at(context.positions)
        for layer in self.layers:
            layer(total, turn, context)
        return total.normed(self._norm)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)

    def logits_of(self, hidden: Tensor, ids: Tensor) -> Tensor:
        return self.head.of(hidden, ids)

    def bias(self, before: Tensor) -> Tensor | None:
        """Return what the tokens `before` int64 [n] add to the logits behind them, [n, outputs]; None if nothing."""
        if self._first is None:
            return None
        first, second = self._first
        return first[before] @ second.T
