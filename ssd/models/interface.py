"""The interface of a model family: what the engine calls, and the context that it passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ssd.errors import UsageError
from ssd.kernels.decoder import Views
from ssd.layers.attention import PLAIN, CachePlaces, Scores
from ssd.layers.norm import Residual
from ssd.layers.recurrent import Recurrence, StateSize
from ssd.models.sizes import MOST


class ForwardContext(Protocol):
    """Positions and attention of one forward. The engine makes it; a model only calls it."""

    @property
    def positions(self) -> Tensor:
        """Return the absolute position of every token of the batch, int64 [n]."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: Scores = PLAIN) -> Tensor:
        """Store k and v [n, kv_heads, head_dim], then attend with q [n, heads, head_dim] by `rule`.

        Returns [n, heads * head_dim]."""

    def attend_stored(self, layer: int, q: Tensor, rule: Scores = PLAIN) -> Tensor:
        """Attend to the keys and values of a layer that called `attend` before: layers share them."""

    def recur(self, index: int, recurrence: Recurrence, changes: Tensor, queries: Tensor) -> Tensor:
        """Compute the recurrence `index` of `Shape.states`, and keep the `changes` [n, change] of the tokens.

        Each token's output [n, out] is what its `queries` [n, read] read from the state after its change."""

    def cache_places(self, layer: int) -> CachePlaces | None:
        """Return where a kernel may store keys and values of this layer; None if only `attend` may."""

    def views(self) -> Views | None:
        """Return what tokens attend to; None if our kernels cannot compute all layers in one call."""

    def keep_hidden(self, layers: int, x: Tensor | Residual) -> None:
        """Offer hidden states x [n, width] after `layers` layers; drafts that read them need all calls."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that the engine needs.

    A model reads ids below `vocab_size` and predicts `outputs` of them, fewer only in a draft. `max_position`: longest
    sequence in tokens. `layers` have keys and values; `states` are those of other layers. `no_rollback`: why draft
    tokens cannot be taken back and prefixes not be shared; empty if they can. `sizes`: (kv_heads, head_dim) of each of
    the layers, if they differ. `features`: width of what a draft reads and makes beside each token; 0 for none."""

    vocab_size: int
    outputs: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_position: int
    states: tuple[StateSize, ...] = ()
    no_rollback: str = ""
    sizes: tuple[tuple[int, int], ...] = ()
    features: int = 0

    def __post_init__(self) -> None:
        """Raise `UsageError` for sizes that no model has, before anything is allocated."""
        for name in ("vocab_size", "outputs", "layers", "heads", "kv_heads", "head_dim", "max_position"):
            most = MOST.get(name, 2**31)
            if not 1 <= getattr(self, name) <= most:
                raise UsageError(f"{name} {getattr(self, name)} is not between 1 and {most}")
        for kv_heads in {self.kv_heads, *(heads for heads, _ in self.sizes)}:
            if self.heads % kv_heads:
                raise UsageError(f"heads {self.heads} are no multiple of kv_heads {kv_heads}")


class Model(Protocol):
    shape: Shape
    dtype: torch.dtype
    device: torch.device

    def forward(self, token_ids: Tensor, context: ForwardContext) -> Tensor:
        """Return the hidden states [n, width], after the last norm, of token ids int64 [n]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [m, outputs] of hidden states [m, width]."""
