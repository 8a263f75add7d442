"""The EAGLE-3 head: one layer that reads hidden states of its target, or its own (arXiv 2503.01840).

It reads the features of a token and the next token. Its output predicts the token after these two, and stands for
features that the target has not computed yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from ssd.kernels.decoder import Decoder, DecoderLayer
from ssd.kernels.groups import Groups, outputs_of
from ssd.kernels.guess import GuessStep
from ssd.layers.linear import Table
from ssd.layers.norm import Residual, RMSNorm
from ssd.layers.rotary import Rotary, frequencies
from ssd.models.families.llama import Attention, FeedForward, check_activation, guess_step, shape_of
from ssd.models.head import Head, check_ids, embedding_table
from ssd.models.interface import ForwardContext, Shape
from ssd.models.pairs import SHARED
from ssd.models.weights import Weights
from ssd.plugins.drafts.eagle3_config import EMBEDDING, FUSED, LAYER_NAMES, OUTPUTS, TARGET_EMBEDDING
from ssd.system.fields import Config, count, flag, number


class FeatureContext(ForwardContext, Protocol):
    features: Tensor
    """[n, width]: fused hidden states of the target, or the head's own output for that token."""


class PairAttention(Attention):
    """Attention over an embedding and a hidden state side by side."""

    inputs = 2
    in_one_call = True


class PairModel:
    """A head of pairs. `forward` returns the next features [n, `width`]. `fused`: the target's width."""

    shape: Shape
    dtype: torch.dtype
    device: torch.device
    width: int
    fused: int
    fuse: Callable[[Tensor], Tensor]
    """Makes features [n, width] of the target's hidden states [n, fused], those of lower layers first."""


class Eagle3(PairModel):
    """An EAGLE-3 head. Its features are hidden states before the last norm."""

    def __init__(
        self, config: Config, weights: Weights, dtype: torch.dtype, device: torch.device, max_position: int
    ) -> None:
        check_activation(config)
        shape = shape_of(config, max_position)
        width, eps = int(config["hidden_size"]), number(config, "rms_norm_eps", 1e-6)
        self.shape = replace(shape, layers=1, features=width)
        self.dtype, self.device = dtype, device
        self._rotary = Rotary(frequencies(shape.head_dim, config, max_position), max_position, dtype, device)
        own = weights.has(EMBEDDING)
        embedding = weights.whole(EMBEDDING if own else TARGET_EMBEDDING, shape.vocab_size, width)
        self.head, self._embed = predicting(config, weights, shape, device, embedding, not own)
        self.width, self.fused = width, FUSED * count(config, "target_hidden_size", width)
        self.fuse = weights.linear(weights.stacked([("fc", width)], self.fused), None)
        name = next((name for name in LAYER_NAMES if weights.has(f"{name}.hidden_norm.weight")), LAYER_NAMES[0])
        layer = weights.below(name)
        self._token_norm, self._feature_norm, self._forward_norm = (
            RMSNorm(layer(f"{norm}.weight", width), eps)
            for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        )
        self._attention = PairAttention(config, self.shape, layer.below("self_attn"), 0, self._rotary)
        self._feed_forward = FeedForward(config, layer.below("mlp"))
        self._eps, self._normed_residual = eps, flag(config, "norm_before_residual")
        self._norm = RMSNorm(weights("norm.weight", width), eps)

    def forward(self, token_ids: Tensor, context: FeatureContext) -> Tensor:
        features = self._feature_norm(context.features)
        pairs = torch.cat((self._token_norm(self._embed(token_ids)), features), dim=-1)
        x = Residual(features if self._normed_residual else context.features)
        x.add(self._attention(pairs, self._rotary.at(context.positions), context))
        x.add(self._feed_forward(x.normed(self._forward_norm)))
        context.keep_hidden(1, x)
        return x.value

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(self._norm(hidden))

    def logits_of(self, hidden: Tensor, ids: Tensor) -> Tensor:
        return self.head.of(self._norm(hidden), ids)

    @cached_property
    def guess_step(self) -> GuessStep | None:
        norms = [norm.kernel for norm in (self._token_norm, self._feature_norm, self._forward_norm)]
        products = [*self._attention.products, *self._feed_forward.products]
        token, feature, forward = (norm and norm[0] for norm in norms)
        if token is None or feature is None or forward is None or None in products:
            return None
        found = [product for product in products if product is not None]
        layer = DecoderLayer(
            (feature, forward), (), self._eps, found, self._attention.heads, token, self._normed_residual
        )
        return guess_step(self._embed, Decoder([layer], self._rotary.tables), self._norm, self.head)


def predicting(
    config: Config, weights: Weights, shape: Shape, device: torch.device, embedding: Tensor | Groups, theirs: bool
) -> tuple[Head, Table]:
    """Return the head of a draft that reads hidden states, and the table of its embedding.

    The head's rows are the draft's, or the target's. `d2t` has each predicted token's id less its place in the list.
    `theirs`: the embedding is the target's."""
    count, known, width = shape.outputs, shape.vocab_size, int(config["hidden_size"])
    own, ids, table = weights.has(OUTPUTS) and OUTPUTS not in config.get(SHARED, ()), None, None
    if own:
        rows = weights.whole(OUTPUTS, count, width)
    elif weights.has(OUTPUTS):
        rows = table = weights.whole(OUTPUTS, known, width)
    else:
        rows = table = embedding if theirs else weights.whole(TARGET_EMBEDDING, known, width)
    if weights.has("d2t"):
        ids = (torch.arange(count) + weights.integers("d2t", count).cpu()).to(device)
        check_ids(ids, known, "d2t")
        rows = rows if own else outputs_of(rows, ids)
    kept = None if table is None or count == known else Table(table, dots=True)
    head = Head(weights.linear(rows, None), ids, kept)
    return head, embedding_table(embedding, rows if table is None or kept is None else table, head)
