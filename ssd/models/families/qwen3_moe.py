"""The Qwen3 family with a mixture of experts in place of a feed-forward (arXiv 2505.09388)."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from ssd.errors import UsageError
from ssd.layers.linear import Linear
from ssd.models.families.llama import SPLITS, FeedForward
from ssd.models.families.qwen3 import Qwen3
from ssd.models.weights import Weights
from ssd.system.fields import Config, count, flag


class Experts:
    """Sums the few feed-forwards that a router chooses for a token, weighted by its probabilities."""

    def __init__(self, config: Config, weights: Weights) -> None:
        experts, self._chosen = count(config, "num_experts"), count(config, "num_experts_per_tok")
        if self._chosen > experts:
            raise UsageError(f"num_experts_per_tok {self._chosen} of {experts} experts")
        self._normalised = flag(config, "norm_topk_prob")
        self._router = Linear(weights("gate.weight", experts, int(config["hidden_size"])))
        inner = {**config, "intermediate_size": config["moe_intermediate_size"]}
        self._experts = [self.expert(inner, weights, index) for index in range(experts)]
        self._ranks = weights.share.ranks

    def expert(self, config: Config, weights: Weights, index: int) -> FeedForward:
        """Make an expert, whose result is this rank's part of it."""
        return FeedForward(config, weights.below(f"experts.{index}"), summed=False)

    def __call__(self, x: Tensor) -> Tensor:
        shares, chosen = torch.softmax(self._router(x), dim=-1, dtype=torch.float32).topk(self._chosen)
        if self._normalised:
            shares = shares / shares.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            tokens, rank = torch.where(chosen == index)
            share = shares[tokens, rank, None].to(x.dtype)
            out.index_add_(0, tokens, self._experts[index](x[tokens]) * share)
        return self._ranks.sum(out)


class Qwen3MoE(Qwen3):
    """A Qwen3 decoder with experts in some or all layers; see `ssd.models.interface.Model`."""

    slides = False
    defaults: ClassVar[Config] = {"use_sliding_window": False}
    splits = SPLITS

    def feed_forward(self, config: Config, weights: Weights, layer: int) -> Callable[[Tensor], Tensor]:
        return Experts(config, weights) if has_experts(config, layer) else FeedForward(config, weights)


def has_experts(config: Config, layer: int) -> bool:
    """Return True if a layer has experts: some or all layers do."""
    every, dense = count(config, "decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    if any(type(index) is not int for index in dense):
        raise UsageError(f"mlp_only_layers must be a list of layers, is {dense!r}")
    return not (layer in dense or (layer + 1) % every or not int(config["num_experts"]))
