"""Runs an EAGLE-3 or MTP head as a drafter: a token's row also needs features of the token before.

Features of committed tokens are the target's, those of draft tokens the head's own: one forward computes a path up to
the last committed token, each later forward one token. Rows from the head's own features are computed again once
committed. The first token of a text has no row; the row of token p lies at position p - 1."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from ssd.config.engine import EngineConfig
from ssd.draft.chain_cache import ChainCache, ChainTokens
from ssd.draft.drafter import ChainRows, Drafter, PathRow
from ssd.draft.static_shapes import StaticDrafter, TreeRunner
from ssd.draft.tree import Guess, Tree
from ssd.draft.tree_attention import TreeContext, joined
from ssd.execution.batch import FINAL, Row
from ssd.execution.kv_cache import KVCache
from ssd.execution.paged import PagedContext
from ssd.execution.runner import Runner
from ssd.execution.tables import TableContext
from ssd.ipc.features import FeatureArena, extend_tags
from ssd.layers.norm import Residual
from ssd.layers.paged import PagedAttention
from ssd.plugins.drafts.eagle3_model import PairModel
from ssd.speculation.noise import NoiseCache


class HeadContext(TreeContext):
    """The context of a head's forward; `made` keeps the head's features."""

    def __init__(
        self,
        paged: PagedContext | TableContext,
        chains: Sequence[ChainTokens],
        cache: KVCache,
        chain_cache: ChainCache,
        parts: Sequence[Tensor],
        attention: PagedAttention | None = None,
    ) -> None:
        super().__init__(paged, chains, cache, chain_cache, attention)
        self.parts = parts

    @cached_property
    def features(self) -> Tensor:
        return joined(self.parts)

    def keep_hidden(self, layers: int, x: Tensor | Residual) -> None:
        if layers != FINAL:
            self.made = x if isinstance(x, Tensor) else x.value


def warm_up(runner: Runner, rows: int) -> None:
    """Do `Runner.warm_up` for a head, from hidden states that are zero."""
    if isinstance(runner, TreeRunner):
        runner.warm_up(rows)
        return
    head = cast(PairModel, runner.model)
    chain_cache = ChainCache.new(head.shape, 1, 1, head.dtype, head.device)
    for count in (1, rows):
        row = Row([0] * count, 0, range(runner.cache.pages), count)
        features = head.fuse(torch.zeros(count, head.fused, dtype=head.dtype, device=head.device))
        context = HeadContext(runner.context([row]), [], runner.cache, chain_cache, [features])
        runner.attention.warms_up = count == 1
        runner.run(row.token_ids, context, range(count))
    runner.attention.warms_up = False


class FeatureDrafter(Drafter):
    """A drafter that reads hidden states of the target in `features`."""

    recurrent = True

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        noise: NoiseCache,
        vocab_size: int,
        features: FeatureArena,
        chain_cache: ChainCache | None = None,
    ) -> None:
        super().__init__(config, runner, noise, vocab_size, chain_cache)
        self._features = features
        self._read: dict[int, Tensor] = {}  # by request, the target's hidden states for the next forward

    def _read_next(self, tree: Tree, count: int) -> int:
        before, model = tree.computed - 1, self.runner.model
        extend_tags(tree.tags, tree.tokens[len(tree.tags) :])
        rows = self._features.read(tree.slot, before, tree.tags[before : before + count])
        self._read[tree.request] = rows.to(model.device, model.dtype)
        return len(rows)


class HeadDrafter(FeatureDrafter):
    goes_on = False  # a forward reads what the one before has made

    @property
    def _head(self) -> PairModel:
        return cast(PairModel, self.runner.model)

    def blank_guess(self) -> Guess:
        hidden = torch.zeros(1, self._head.fused, dtype=self._head.dtype, device=self._head.device)
        return Guess(0, [0], feature=self._head.fuse(hidden)[0])

    def ready(self, tree: Tree, tokens: list[int]) -> list[int]:
        if not tokens or tree.computed >= tree.base:
            return tokens[:1]
        return tokens[: self._read_next(tree, min(len(tokens), tree.base - tree.computed))]

    def _context(self, paths: Sequence[PathRow], chains: Sequence[ChainRows]) -> HeadContext:
        runner, parts, (placed, own) = self.runner, self._parts(paths, chains), self._placed(paths, chains)
        rows = runner.context([row for _, row in placed])
        return HeadContext(rows, [tokens for _, tokens in own], runner.cache, self.chain_cache, parts, runner.paged)

    def _placed(self, paths: Sequence[PathRow], chains: Sequence[ChainRows]) -> tuple[list[PathRow], list[ChainRows]]:
        rows = [PathRow(tree, Row(row.token_ids, row.start - 1, row.pages, row.outputs)) for tree, row in paths]
        moved = [ChainRows(tree, copy(own)) for tree, own in chains]
        for _, own in moved:
            own.base -= 1
        return rows, moved

    def _parts(self, paths: Sequence[PathRow], chains: Sequence[ChainRows]) -> list[Tensor]:
        parts = [self._before(tree, row) for tree, row in paths]
        parts += [part for tree, own in chains for part in _own(tree, own)]
        self._read.clear()
        return parts

    def _before(self, tree: Tree, row: Row) -> Tensor:
        if row.start < tree.base:
            return self._head.fuse(self._read[tree.request][: len(row.token_ids)])
        return _feature(tree.guesses[row.start - tree.base])

    def _finished(self, guesses: list[Guess], made: Tensor | None, wanted: Sequence[int]) -> list[Guess]:
        assert made is not None
        return [guess._replace(feature=made[index]) for guess, index in zip(guesses, wanted, strict=True)]


class StaticHeadDrafter(StaticDrafter, HeadDrafter):
    """A head's drafter in static shapes."""


def drafter(
    config: EngineConfig, runner: Runner, noise: NoiseCache, vocab_size: int, features: FeatureArena
) -> HeadDrafter:
    if isinstance(runner, TreeRunner):
        return StaticHeadDrafter(config, runner, noise, vocab_size, features=features)
    return HeadDrafter(config, runner, noise, vocab_size, features)


def _own(tree: Tree, tokens: ChainTokens) -> list[Tensor]:
    chains = {chain.cell: chain for chain in tree.chains}
    rows = zip(tokens.forks, tokens.cells, tokens.depths, strict=True)
    before = [chains[cell].guesses[depth - 1] if depth else tree.guesses[fork] for fork, cell, depth in rows]
    return [_feature(guess) for guess in before]


def _feature(guess: Guess) -> Tensor:
    assert guess.feature is not None, "a head's guesses have features"
    return guess.feature
