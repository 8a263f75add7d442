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

    router, inner = "gate", "moe_intermediate_size"  # the router's tensors, the field with an expert's width
    expert: type[FeedForward] = FeedForward

    def __init__(self, config: Config, weights: Weights) -> None:
        experts, self._chosen = count(config, "num_experts"), count(config, "num_experts_per_tok")
        if self._chosen > experts:
            raise UsageError(f"num_experts_per_tok {self._chosen} of {experts} experts")
        self._normalised = flag(config, "norm_topk_prob")
        self._router = self.router_of(weights.below(self.router), experts, int(config["hidden_size"]))
        inner = {**config, "intermediate_size": config[self.inner]}
        self._experts = [
            self.expert(inner, weights.below(f"experts.{index}"), summed=False) for index in range(experts)
        ]
        self._ranks = weights.share.ranks

    def router_of(self, weights: Weights, experts: int, width: int) -> Linear:
        return Linear(weights("weight", experts, width))

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return shares and numbers of the experts chosen by the router's scores, each [n, chosen]."""
        shares, chosen = torch.softmax(scores, dim=-1, dtype=torch.float32).topk(self._chosen)
        return shares / shares.sum(-1, keepdim=True) if self._normalised else shares, chosen

    def __call__(self, x: Tensor) -> Tensor:
        return self.mixed(x, *self.choose(self._router(x)))

    def mixed(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            tokens, rank = torch.where(chosen == index)
            share = shares[tokens, rank, None].to(x.dtype)
            out.index_add_(0, tokens, self._experts[index](x[tokens]) * share)
        return self._ranks.sum(out)


class Qwen3MoE(Qwen3):
    slides = False
    defaults: ClassVar[Config] = {"use_sliding_window": False}
    splits = SPLITS

    def feed_forward(self, config: Config, weights: Weights, layer: int) -> Callable[[Tensor], Tensor]:
        return Experts(config, weights) if has_experts(config, layer) else FeedForward(config, weights)


def has_experts(config: Config, layer: int) -> bool:
    every, dense = count(config, "decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    if any(type(index) is not int for index in dense):
        raise UsageError(f"mlp_only_layers must be a list of layers, is {dense!r}")
    return not (layer in dense or (layer + 1) % every or not int(config["num_experts"]))
