"""What the engine asks of a model, and what it gives it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ssd.errors import UsageError
from ssd.kernels.decoder import Views
from ssd.layers.attention import PLAIN, Scores
from ssd.model_sizes import MOST


class Plan(Protocol):
    """Where the tokens of one forward stand and what each may see; made by the engine, opaque to a model."""

    @property
    def positions(self) -> Tensor:
        """int64 [n]: the absolute position of every token of the batch."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: Scores = PLAIN) -> Tensor:
        """Store k and v [n, kv_heads, head_dim] of this layer and attend with q [n, heads, head_dim],
        scored as `rule` says. Returns [n, heads * head_dim]."""

    def views(self) -> Views | None:
        """What tokens see, where our kernels can do a layer over it in one call, its attention included; else None."""

    def show(self, layers: int, x: Tensor) -> None:
        """x [n, width] is what the first `layers` layers made of the tokens. A family that tells can be the target of
        an EAGLE-3 head; most plans do not listen."""


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

    def __post_init__(self) -> None:
        """Raise `UsageError` for numbers that no model has, before anything is made of them."""
        for name in ("vocab_size", "outputs", "layers", "heads", "kv_heads", "head_dim", "max_position"):
            most = MOST.get(name, 2**31)
            if not 1 <= getattr(self, name) <= most:
                raise UsageError(f"{name} {getattr(self, name)} is not between 1 and {most}")
        if self.heads % self.kv_heads:
            raise UsageError(f"heads {self.heads} are no multiple of kv_heads {self.kv_heads}")


class Model(Protocol):
    """A model family instance: a function of token ids and a plan, without state."""

    shape: Shape
    dtype: torch.dtype
    device: torch.device

    def forward(self, token_ids: Tensor, plan: Plan) -> Tensor:
        """int64 [n] -> hidden states [n, width], after the last norm."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[m, width] -> [m, outputs]."""
