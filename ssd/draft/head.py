"""An EAGLE-3 head at work: like any draft, but each row also needs the features of the token before it.

Those of committed tokens are the target's, from the arena; beyond them the head goes on from its own. So a path is
computed in one go up to the last committed token and then token by token, and what had to be guessed upon tokens in
flight is computed again, from true features, as soon as these are committed (`Tree.outcome`).

The first token of a text has none before it, so that there is no row for it: the row of token p lies in place p - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import cast

import torch
from torch import Tensor

from ssd.config import EngineConfig
from ssd.draft.arena import Arena, Branches, TreePlan
from ssd.draft.level import Chains, Level, Paths
from ssd.draft.tree import Guess, Tree
from ssd.execution.batch import Row
from ssd.execution.kv_cache import KVCache
from ssd.execution.paged import PagedPlan
from ssd.execution.runner import Runner
from ssd.execution.tables import TablePlan
from ssd.ipc.features import FeatureArena, extend_tags
from ssd.layers.paged import PagedAttention
from ssd.models.eagle3 import Eagle3
from ssd.speculation.noise import NoiseCache


class HeadPlan(TreePlan):
    """See `ssd.models.eagle3.FeaturePlan`; keeps what the head makes of the tokens."""

    def __init__(
        self,
        paged: PagedPlan | TablePlan,
        branches: Sequence[Branches],
        cache: KVCache,
        arena: Arena,
        features: Tensor,
        attention: PagedAttention | None = None,
    ) -> None:
        super().__init__(paged, branches, cache, arena, attention)
        self.features = self.made = features

    def show(self, layers: int, x: Tensor) -> None:
        self.made = x


def warm_up(runner: Runner, rows: int) -> None:
    """`Runner.warm_up` of a head, from hidden states that are zero."""
    head = cast(Eagle3, runner.model)
    arena = Arena.new(head.shape, 1, 1, head.dtype, head.device)
    for count in (1, rows):
        row = Row([0] * count, 0, range(runner.cache.pages), count)
        features = head.fuse(torch.zeros(count, head.fused, dtype=head.dtype, device=head.device))
        runner.run(row.token_ids, HeadPlan(runner.plan([row]), [], runner.cache, arena, features), range(count))


class HeadLevel(Level):
    """A head with memory of its own. `features` is where the target shows its hidden states."""

    recurrent = True

    def __init__(
        self, config: EngineConfig, runner: Runner, noise: NoiseCache, vocab_size: int, features: FeatureArena
    ) -> None:
        super().__init__(config, runner, noise, vocab_size)
        self._features = features
        self._head = cast(Eagle3, runner.model)
        self._read: dict[int, Tensor] = {}  # by request, what the next forward needs of the target

    def ready(self, tree: Tree, tokens: list[int]) -> list[int]:
        if not tokens or tree.computed >= tree.base:
            return tokens
        before = tree.computed - 1
        extend_tags(tree.tags, tree.tokens[len(tree.tags) :])
        rows = self._features.read(tree.slot, before, tree.tags[before : before + len(tokens)])
        self._read[tree.request] = rows.to(self._head.device, self._head.dtype)
        return tokens[: len(rows)]

    def _plan(self, paths: Sequence[Paths], chains: Sequence[Chains]) -> HeadPlan:
        rows = [Row(row.token_ids, row.start - 1, row.pages, row.outputs) for _, row in paths]
        branches = [copy(branches) for _, branches in chains]
        for moved in branches:
            moved.base -= 1
        parts = [self._before(tree, row) for tree, row in paths]
        parts += [_own(tree, branches) for tree, branches in chains]
        self._read.clear()
        runner = self.runner
        return HeadPlan(runner.plan(rows), branches, runner.cache, self.arena, torch.cat(parts), runner.paged)

    def _before(self, tree: Tree, row: Row) -> Tensor:
        """[n, width]: the features of the tokens before those of a path's row."""
        if row.start < tree.base:
            return self._head.fuse(self._read[tree.request][: len(row.token_ids)])
        return _feature(tree.guesses[row.start - tree.base])[None]

    def _finished(self, guesses: list[Guess], plan: TreePlan, wanted: Sequence[int]) -> list[Guess]:
        assert isinstance(plan, HeadPlan)
        return [guess._replace(feature=plan.made[index]) for guess, index in zip(guesses, wanted, strict=True)]


def _own(tree: Tree, branches: Branches) -> Tensor:
    """[n, width]: the features of the tokens before those of branches, which are all the head's own."""
    chains = {chain.cell: chain for chain in tree.chains}
    rows = zip(branches.forks, branches.cells, branches.depths, strict=True)
    before = [chains[cell].guesses[depth - 1] if depth else tree.guesses[fork] for fork, cell, depth in rows]
    return torch.stack([_feature(guess) for guess in before])


def _feature(guess: Guess) -> Tensor:
    assert guess.feature is not None, "a head's guesses have features"
    return guess.feature
