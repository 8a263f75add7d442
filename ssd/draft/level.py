"""One draft model at work: pages for paths, an arena for chains, and a forward that ends in guesses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from ssd.config import EngineConfig
from ssd.draft.arena import Arena, Branches, TreePlan
from ssd.draft.guesser import Guesser, Places
from ssd.draft.tree import Guess, Tree
from ssd.execution.batch import Row, output_indices
from ssd.execution.pages import PagePool, PageTable
from ssd.execution.runner import Runner
from ssd.params import MAX_LOOKAHEAD
from ssd.speculation.noise import NoiseCache


class Paths(NamedTuple):
    """A row over the pages of a sequence."""

    tree: Tree
    row: Row


class Chains(NamedTuple):
    """Rows over the arena, of chains of one sequence."""

    tree: Tree
    branches: Branches


class Level:
    """A draft model with memory of its own. Guesses lie below `vocab_size`, that of the target; `noise` is what levels
    on one device share. `recurrent`: see `ssd.draft.tree.Tree`."""

    recurrent = False

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        noise: NoiseCache,
        vocab_size: int,
        arena: Arena | None = None,
    ) -> None:
        model = runner.model
        self.runner = runner
        self.pool = PagePool(config.draft_num_pages, config.page_size)
        sizes = cells(config), MAX_LOOKAHEAD + 1, model.dtype, model.device
        self.arena = arena or Arena.new(model.shape, *sizes)
        self.max_position = model.shape.max_position
        self._vocab_size = min(vocab_size, model.shape.outputs)
        self._guesser = Guesser(noise)

    def ready(self, tree: Tree, tokens: list[int]) -> list[int]:
        """As many of the next path tokens as the next forward can compute."""
        return tokens

    def forward(self, paths: Sequence[Paths], chains: Sequence[Chains]) -> Iterator[Guess]:
        """A guess for every output of the paths' rows, then for every row of the chains."""
        plan = self._plan(paths, chains)
        tokens = [token for _, row in paths for token in row.token_ids]
        tokens += [token for _, branches in chains for token in branches.tokens]
        wanted = wanted_of(paths, chains)
        logits = self.runner.run(tokens, plan, wanted)
        return iter(self._finished(self._guesses(logits, paths, chains), plan, wanted))

    def _guesses(self, logits: Tensor, paths: Sequence[Paths], chains: Sequence[Chains]) -> list[Guess]:
        """The guesses of `forward` by their logits."""
        places = [_places(tree, row) for tree, row in paths]
        places += [Places(tree, [p + 1 for p in branches.positions], branches.depths) for tree, branches in chains]
        return self._guesser(logits[:, : self._vocab_size], places)

    def _plan(self, paths: Sequence[Paths], chains: Sequence[Chains]) -> TreePlan:
        rows, branches = [row for _, row in paths], [branches for _, branches in chains]
        return TreePlan(self.runner.plan(rows), branches, self.runner.cache, self.arena, self.runner.paged)

    def _finished(self, guesses: list[Guess], plan: TreePlan, wanted: Sequence[int]) -> list[Guess]:
        """Hook for drafts that keep more of a forward: what is about the tokens at the indices `wanted`."""
        return guesses

    def promote(self, table: PageTable, start: int, cell: int, count: int) -> None:
        """The first `count` tokens of a chain become those of a path, which has room, from position `start` on."""
        slots = self.runner.cache.slots(table.pages, start, start + count)
        self.arena.promote(cell, count, self.runner.cache, slots)


def cells(config: EngineConfig) -> int:
    """How many chains may have a place."""
    return config.max_num_seqs * config.speculation.chains


def wanted_of(paths: Sequence[Paths], chains: Sequence[Chains]) -> list[int]:
    """Which of the tokens of a forward guesses are wanted of."""
    rows = [row for _, row in paths]
    first = sum(len(row.token_ids) for row in rows)
    return [*output_indices(rows), *range(first, first + sum(len(branches.tokens) for _, branches in chains))]


def rows_of(paths: Sequence[Paths], chains: Sequence[Chains]) -> int:
    """How many tokens a forward computes."""
    return sum(len(row.token_ids) for _, row in paths) + sum(len(branches.tokens) for _, branches in chains)


def _places(tree: Tree, row: Row) -> Places:
    return Places(tree, row.predicted, [position - tree.base for position in row.predicted])
