"""What the engine asks of a model, and what it gives it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ssd.layers.attention import PLAIN, Scores


class Plan(Protocol):
    """Where the tokens of one forward stand and what each may see; made by the engine, opaque to a model."""

    @property
    def positions(self) -> Tensor:
        """int64 [n]: the absolute position of every token of the batch."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: Scores = PLAIN) -> Tensor:
        """Store k and v [n, kv_heads, head_dim] of this layer and attend with q [n, heads, head_dim],
        scored as `rule` says. Returns [n, heads * head_dim]."""


@dataclass(frozen=True)
class Shape:
    """The numbers of a model that the engine needs. It reads ids below `vocab_size` and predicts those below `outputs`
    (fewer only in a draft); `max_position` is the longest sequence, in tokens."""

    vocab_size: int
    outputs: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_position: int


class Model(Protocol):
    """A model family instance: a function of token ids and a plan, without state."""

    shape: Shape
    dtype: torch.dtype
    device: torch.device

    def forward(self, token_ids: Tensor, plan: Plan) -> Tensor:
        """int64 [n] -> hidden states [n, width], after the last norm."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[m, width] -> [m, outputs]."""
