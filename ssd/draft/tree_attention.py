"""The forward context of a draft step: paths attend over pages, chains over the shared path and their own cell."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from ssd.draft.chain_cache import ChainCache, ChainTokens, KernelChains
from ssd.draft.torch_chains import TorchChains
from ssd.execution.batch import BaseContext
from ssd.execution.kv_cache import KVCache
from ssd.execution.paged import PagedContext
from ssd.execution.tables import TableContext
from ssd.kernels.attention import View
from ssd.kernels.decoder import Views
from ssd.layers.attention import PLAIN, Scores
from ssd.layers.paged import PagedAttention


class TreeContext(BaseContext):
    """The forward context of a draft step: paged rows first, then the chain tokens of every sequence."""

    parts: Sequence[Tensor] = ()
    """Features that a draft reads beside tokens, one part after the other: [n, width], or [width] of one token."""
    made: Tensor | None = None
    """The features that the draft makes of the tokens, [n, width]."""

    def __init__(
        self,
        paged: PagedContext | TableContext,
        chains: Sequence[ChainTokens],
        cache: KVCache,
        chain_cache: ChainCache,
        attention: PagedAttention | None = None,
    ) -> None:
        super().__init__()
        self._paged, self._tokens, self._device = paged, chains, cache.keys.device
        self._chains: KernelChains | TorchChains | None = None
        if chains and attention is None and cache.served:
            self._chains = KernelChains(chains, cache, chain_cache)
        elif chains:
            own = self.positions[paged.positions.shape[0] :]
            self._chains = TorchChains(chains, cache, chain_cache, attention, own)
        elif self._device.type != "cpu":  # now: a copy sent after the launches would wait for them
            self.positions  # noqa: B018

    def _chain_positions(self) -> list[int]:
        return [position for own in self._tokens for position in own.positions]

    @cached_property
    def positions(self) -> Tensor:
        own = torch.tensor(self._chain_positions(), dtype=torch.long, device=self._device)
        return torch.cat((self._paged.positions, own))

    def views(self) -> Views | None:
        paged, chains = self._paged, self._chains
        if not isinstance(paged, PagedContext) or (paged.places and paged.view is None):
            return None
        if chains is None:
            return paged.views()
        if isinstance(chains, TorchChains) or chains.own is not chains.stored:  # no kernel lets a token see later ones
            return None
        view = View(chains.shared, chains.own)
        positions = array("q", self._chain_positions())
        return Views([view] if paged.view is None else [paged.view, view], paged.places + positions)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: Scores = PLAIN) -> Tensor:
        split = self._paged.positions.shape[0]
        parts = []
        if split:
            parts.append(self._paged.attend(layer, q[:split], k[:split], v[:split], rule))
        if self._chains is not None:
            self._chains.store(layer, k[split:], v[split:])
            parts.append(self._chains.attend(layer, q[split:], rule))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def attend_stored(self, layer: int, q: Tensor, rule: Scores = PLAIN) -> Tensor:
        split = self._paged.positions.shape[0]
        parts = [self._paged.attend_stored(layer, q[:split], rule)] if split else []
        if self._chains is not None:
            parts.append(self._chains.attend(layer, q[split:], rule))
        return torch.cat(parts)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Join parts, [n, width] or [width], to the features of all tokens, [n, width]."""
    return torch.cat([part if part.dim() == 2 else part[None] for part in parts])
