"""Runs a decoder over keys and values that are made of the target's hidden states, as far as the text is committed.

For the tokens before the last committed one they are made of the hidden states of these tokens, as `ready` finds them.
The last committed token and draft tokens have the drafter's own, until their states are there: an outcome commits
tokens, and the next forward makes their keys and values again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch

from ssd.draft.drafter import ChainRows, PathRow
from ssd.draft.eagle3 import FeatureDrafter
from ssd.draft.tree import Guess, Tree
from ssd.draft.tree_attention import ChainCache, ChainTokens, TreeContext
from ssd.execution.batch import Row
from ssd.execution.meanwhile import Task, nothing
from ssd.execution.runner import Runner
from ssd.models.block import MASK, BlockDraft


class KVInjectionDrafter(FeatureDrafter):
    """Owns a drafter whose keys and values of the text are injected."""

    @property
    def _model(self) -> BlockDraft:
        return cast(BlockDraft, self.runner.model)

    def ready(self, tree: Tree, tokens: list[int]) -> list[int]:
        missing = tree.base - tree.computed
        if not tokens or missing <= 0:
            return tokens
        there = self._read_next(tree, min(len(tokens), missing))
        return tokens if there == missing else tokens[:there]

    def forward(
        self, paths: Sequence[PathRow], chains: Sequence[ChainRows], meanwhile: Task = nothing
    ) -> Iterator[Guess]:
        self._remember(paths)
        own = [PathRow(tree, _own(tree, row)) for tree, row in paths if row.outputs]
        if own or chains:
            return super().forward(own, chains, meanwhile)
        self.runner.compute(0, lambda: None, meanwhile)
        return iter(())

    def several(
        self, paths: Sequence[PathRow], chains: Sequence[ChainRows], more: Sequence[int], meanwhile: Task = nothing
    ) -> list[list[Guess]] | None:
        if chains or len(paths) != 1 or not paths[0].row.outputs:
            return None
        self._remember(paths)
        return super().several([PathRow(tree, _own(tree, row)) for tree, row in paths], chains, more, meanwhile)

    def _remember(self, paths: Sequence[PathRow]) -> None:
        """Store keys and values of the tokens before those of the rows, as far as these are committed."""
        cache = self.runner.cache
        for tree, row in paths:
            # None were read if `several` has remembered them, and then refused.
            if row.start >= tree.base or tree.request not in self._read:
                continue
            states, first = self._read.pop(tree.request), row.start - 1
            slots = cache.slots(row.pages, first, first + len(states))
            with torch.inference_mode():
                self._model.remember(states, first, slots, cache.keys, cache.values)
        self._read.clear()  # also of a sequence that got no row


def _own(tree: Tree, row: Row) -> Row:
    """Return the part of a row with outputs that is computed: from the last committed token on."""
    first = max(row.start, tree.base - 1)
    return Row(row.token_ids[first - row.start :], first, row.pages, row.outputs)


def warm_up(runner: Runner, rows: int) -> None:
    """Do `Runner.warm_up` for a drafter with injected keys and values, from hidden states that are zero."""
    model = cast(BlockDraft, runner.model)
    cache = ChainCache.new(model.shape, 1, rows, model.dtype, model.device)
    states = torch.zeros(rows, model.fused, dtype=model.dtype, device=model.device)
    with torch.inference_mode():
        model.remember(states, 0, range(rows), runner.cache.keys, runner.cache.values)
    for count in (1, rows):
        own = ChainTokens(range(runner.cache.pages), 1)
        own.add(0, 0, 0, [0] + [0 if model.fields.one_by_one else MASK] * (count - 1))
        context = TreeContext(runner.context([]), [own], runner.cache, cache, runner.paged)
        runner.attention.warms_up = count == 1
        runner.run(own.tokens, context, range(count))
    runner.attention.warms_up = False
