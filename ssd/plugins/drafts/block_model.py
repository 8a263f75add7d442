"""A block drafter: layers that predict several tokens in one pass, from hidden states of the target.

Layouts: DFlash (z-lab), DSpark (arXiv 2607.05147, deepseek-ai/DeepSpec), vLLM's `speculators`. The rows of a block are
known tokens, and a mask for each further place."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cached_property
from itertools import repeat

import torch
from torch import Tensor

from ssd.kernels.attention import KVSpans
from ssd.kernels.guess import GuessStep
from ssd.layers.linear import Table
from ssd.layers.norm import RMSNorm
from ssd.layers.rotary import Rotary, frequencies
from ssd.models.families.llama import (
    NORMS,
    Attention,
    FeedForward,
    Layer,
    check_activation,
    decoder_of,
    guess_step,
    kernel_of,
    shape_of,
    through_layers,
)
from ssd.models.families.qwen3 import Qwen3Attention
from ssd.models.head import Predicting
from ssd.models.interface import ForwardContext
from ssd.models.weights import LinearLayer, Weights
from ssd.plugins.drafts.block_config import fields_of
from ssd.plugins.drafts.eagle3_config import EMBEDDING, TARGET_EMBEDDING
from ssd.plugins.drafts.eagle3_model import predicting
from ssd.system.fields import Config, number

MASK = -1
"""Stands for a mask among the token ids of a forward."""


class BlockDraft(Predicting):
    """A block drafter. Among the ids of `forward`, MASK stands for a mask."""

    def __init__(
        self, config: Config, weights: Weights, dtype: torch.dtype, device: torch.device, max_position: int
    ) -> None:
        check_activation(config)
        self.fields, self.shape = fields_of(config), shape_of(config, max_position)
        self.dtype, self.device = dtype, device
        width, eps = int(config["hidden_size"]), number(config, "rms_norm_eps", 1e-6)
        self._rotary = Rotary(frequencies(self.shape.head_dim, config, max_position), max_position, dtype, device)
        own = weights.has(EMBEDDING)
        embedding = weights.whole(EMBEDDING if own else TARGET_EMBEDDING, self.shape.vocab_size, width)
        self.head, self._embed = predicting(config, weights, self.shape, device, embedding, not own)
        self.fused = len(self.fields.layers) * width
        normed = config.get("model_type") != "llama" or weights.has("layers.0.self_attn.q_norm.weight")
        attention = Qwen3Attention if normed else Attention
        below = [weights.below(f"layers.{index}") for index in range(self.shape.layers)]
        self._attentions = [
            attention(config, self.shape, layer.below("self_attn"), index, self._rotary)
            for index, layer in enumerate(below)
        ]
        norms = [[RMSNorm(layer(f"{name}.weight", width), eps) for name in NORMS[:2]] for layer in below]
        self._layers = [
            Layer(first, own, second, FeedForward(config, layer.below("mlp")))
            for layer, own, (first, second) in zip(below, self._attentions, norms, strict=True)
        ]
        self._fuse = weights.linear(weights.stacked([("fc", width)], self.fused), None)
        self._fused_norm = RMSNorm(weights("hidden_norm.weight", width), eps)
        self._norm = RMSNorm(weights("norm.weight", width), eps)
        self._mask = self._embed(torch.tensor([self.fields.mask], device=device))[0]
        self._first: tuple[Table, LinearLayer] | None = None
        if rank := self.fields.rank:
            markov = weights.below("markov_head")
            second = markov.linear(markov.whole("markov_w2.weight", self.shape.outputs, rank), None)
            self._first = Table(markov.whole("markov_w1.weight", self.shape.vocab_size, rank)), second
        self._decoder = decoder_of(self._layers, self._rotary) if self.fields.causal else None

    def remember(self, states: Tensor, first: int, slots: Sequence[int], keys: Tensor, values: Tensor) -> None:
        """Store keys and values of committed tokens in `slots` of [layers, slots, kv_heads, dim].

        `states` [n, fused]: the target's hidden states after each of `layers`, side by side; positions begin at
        `first`."""
        positions, x = range(first, first + len(states)), self._fused_norm(self._fuse(states))
        if self._decoder is not None:
            spans = KVSpans([(keys, values)], array("q", slots), range(len(slots)), [1] * len(slots))
            self._decoder.remember(x, array("q", positions), spans)
            return
        where, every = (torch.tensor(numbers, device=self.device) for numbers in (slots, positions))
        turn = self._rotary.at(every)
        for layer, attention in enumerate(self._attentions):
            keys[layer][where], values[layer][where] = attention.keys_and_values(x, turn)

    def forward(self, token_ids: Tensor, context: ForwardContext) -> Tensor:
        masks = token_ids == MASK
        x = torch.where(masks[:, None], self._mask, self._embed(token_ids.masked_fill(masks, 0)))
        if self._decoder is not None and (views := context.views()) is not None:
            return self._norm(self._decoder(x, views, 0, len(self._layers)))
        return through_layers(x, self._layers, repeat(self._rotary.at(context.positions)), self._norm, context)

    def bias(self, before: Tensor) -> Tensor | None:
        """Return what a first-order head adds to logits after tokens `before` int64 [n]: [n, outputs] or None."""
        if self._first is None:
            return None
        first, second = self._first
        return second(first(before))

    @cached_property
    def guess_step(self) -> GuessStep | None:
        if self._decoder is None:
            return None
        if self._first is None:
            return guess_step(self._embed, self._decoder, self._norm, self.head, self._mask)
        first, second = self._first[0].product, kernel_of(self._first[1])
        if first is None or second is None:
            return None
        return guess_step(self._embed, self._decoder, self._norm, self.head, self._mask, (first, second))
