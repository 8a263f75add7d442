"""Runs a block drafter: one pass predicts several tokens after a path, and after every chain.

Keys and values of committed tokens are made of the target's hidden states. Later tokens are rows of a block that each
pass computes again, with a mask for each further token wanted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ssd.config.engine import EngineConfig
from ssd.config.params import MAX_LOOKAHEAD
from ssd.draft.chain_cache import ChainCache, ChainTokens
from ssd.draft.drafter import ChainRows, LogitRows, PathRow, cells, ranked_guesses
from ssd.draft.tree import Guess, Tree
from ssd.draft.tree_attention import TreeContext
from ssd.execution.meanwhile import Task, nothing
from ssd.execution.runner import Runner
from ssd.ipc.features import FeatureArena
from ssd.kernels.decoder import Views
from ssd.kernels.guess import GuessStep
from ssd.plugins.drafts.block_config import BLOCK_ROWS, path_cells
from ssd.plugins.drafts.block_model import MASK, BlockDraft
from ssd.plugins.drafts.head_drafter import FeatureDrafter
from ssd.speculation.noise import NoiseCache


def warm_up(runner: Runner, rows: int) -> None:
    """Do `Runner.warm_up` for a block drafter, from hidden states that are zero."""
    model = cast(BlockDraft, runner.model)
    cache = ChainCache.new(model.shape, 1, rows, model.dtype, model.device)
    states = torch.zeros(rows, model.fused, dtype=model.dtype, device=model.device)
    with torch.inference_mode():
        model.remember(states, 0, range(rows), runner.cache.keys, runner.cache.values)
    for count in (1, rows):
        own = ChainTokens(range(runner.cache.pages), 1)
        own.add(0, 0, 0, [0] + [MASK] * (count - 1))
        context = TreeContext(runner.context([]), [own], runner.cache, cache, runner.paged)
        runner.attention.warms_up = count == 1
        runner.run(own.tokens, context, range(count))
    runner.attention.warms_up = False


@dataclass
class _Block:
    """A block: the tokens `known` from the last committed one on, and `cells` for its keys and values.

    Guesses are wanted after the last `outputs` known tokens, and for `more` tokens behind them."""

    tree: Tree
    cells: Sequence[int]
    known: list[int]
    outputs: int
    more: int
    guesses: list[Guess] = field(default_factory=list)

    def parts(self, from_anchor: bool) -> list[tuple[list[int], int]]:
        """Return the parts that a forward runs, each in a cell: tokens, and how many of the last rows predict.

        Unless rows of known tokens predict (`from_anchor`), each output needs a part that ends with a mask."""
        if from_anchor:
            return [(self.known + [MASK] * self.more, self.count)]
        last = len(self.known)
        shorter = [([*self.known[:stop], MASK], 1) for stop in range(last - self.outputs + 1, last)]
        return [*shorter, (self.known + [MASK] * (self.more + 1), self.more + 1)]

    @property
    def count(self) -> int:
        return self.outputs + self.more

    def row(self, step: int) -> LogitRows:
        node = len(self.known) - self.outputs + step  # tokens behind the committed ones, before the guess
        return LogitRows(self.tree, [self.tree.base + node], [node])

    def next_row(self) -> tuple[LogitRows, int]:
        """Return the row of logits of the next guess, and the token before it."""
        done = len(self.guesses)
        row = self.row(done)
        (node,) = row.nodes
        before = [guess.token for guess in self.guesses[self.outputs - 1 :]] if done >= self.outputs else []
        drafts = [*self.known[1 : node + 1], *before][:node]
        token = self.known[node] if done < self.outputs else self.guesses[-1].token
        drafts_known = [] if self.tree.grammar is None else [drafts]
        return row._replace(drafts=drafts_known), token


class BlockDrafter(FeatureDrafter):
    goes_on = False

    def __init__(
        self, config: EngineConfig, runner: Runner, noise: NoiseCache, vocab_size: int, features: FeatureArena
    ) -> None:
        model = cast(BlockDraft, runner.model)
        # Behind the cells of chains are those for the path of each slot.
        self._paths, self._path_cells = cells(config), path_cells(model.fields, MAX_LOOKAHEAD)
        sizes = BLOCK_ROWS, model.dtype, model.device
        cache = ChainCache.new(model.shape, self._paths, *sizes, kept=config.max_num_seqs * self._path_cells)
        super().__init__(config, runner, noise, vocab_size, features, cache)
        self.block = model.fields.block - (not model.fields.from_anchor)

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
        frontiers = len(paths) + sum(len(own.tokens) for _, own in chains)
        return chain.from_iterable(self.several(paths, chains, [0] * frontiers, meanwhile))

    def several(
        self, paths: Sequence[PathRow], chains: Sequence[ChainRows], more: Sequence[int], meanwhile: Task = nothing
    ) -> list[list[Guess]]:
        self._remember(paths)
        blocks = self._blocks(paths, chains, more)
        self._guess([block for block in blocks if block.count], meanwhile)
        return [block.guesses for block in blocks]

    def _remember(self, paths: Sequence[PathRow]) -> None:
        """Store keys and values of committed tokens before the rows."""
        cache = self.runner.cache
        for tree, row in paths:
            if row.start >= tree.base:
                continue
            states, first = self._read.pop(tree.request), row.start - 1
            slots = cache.slots(row.pages, first, first + len(states))
            with torch.inference_mode():
                self._model.remember(states, first, slots, cache.keys, cache.values)
        self._read.clear()  # also of a sequence that got no row

    def _blocks(self, paths: Sequence[PathRow], chains: Sequence[ChainRows], more: Sequence[int]) -> list[_Block]:
        found, rest = list[_Block](), iter(more)
        for tree, row in paths:
            known = [tree.tokens[-1], *tree.trunk[: max(0, row.stop - tree.base)]]
            first = self._paths + tree.slot * self._path_cells
            found.append(_Block(tree, range(first, first + self._path_cells), known, row.outputs, next(rest)))
        for tree, own in chains:
            known_chains = {one.cell: one for one in tree.chains}
            for cell, fork in zip(own.cells, own.forks, strict=True):
                tokens = known_chains[cell].tokens if cell in known_chains else [0]  # of a rehearsal
                known = [tree.tokens[-1], *tree.trunk[:fork], *tokens]
                found.append(_Block(tree, [cell], known, 1, next(rest)))
        return found

    def _guess(self, blocks: Sequence[_Block], meanwhile: Task) -> None:
        """Run the blocks and draw their guesses, each after the one before it."""
        if not blocks:
            self.runner.compute(0, lambda: None, meanwhile)
            return
        tokens, context, wanted = self._inputs(blocks)
        kernel = self._step if self._sampler.only_ranks([block.row(0) for block in blocks]) else None
        if kernel is not None and (views := context.views()) is not None:
            self._guess_in_one_call(kernel, blocks, tokens, views, wanted, meanwhile)
            return
        texts = self.vocabulary.texts([block.tree for block in blocks])
        counts = [block.count for block in blocks]

        def logits() -> Tensor:
            hidden = self.runner.states(tokens, context, wanted)
            return self.vocabulary.logits(hidden, counts, texts)

        found = self.runner.compute(len(tokens), logits, meanwhile)
        starts = list(accumulate(counts, initial=0))
        for step in range(max(counts)):
            places = [place for place, count in enumerate(counts) if step < count]
            rows, before = zip(*(blocks[place].next_row() for place in places), strict=True)
            scores = found[[starts[place] + step for place in places]]
            bias = self._model.bias(torch.tensor(before, device=scores.device))
            if bias is not None:
                scores = scores + F.pad(
                    bias[:, : self.vocabulary.listed], (0, scores.shape[1] - self.vocabulary.listed)
                )
            own = [texts[place] for place in places] if texts else []
            for place, guess in zip(places, self._sampler(scores, rows, own), strict=True):
                blocks[place].guesses.append(guess)

    def _guess_in_one_call(
        self,
        kernel: GuessStep,
        blocks: Sequence[_Block],
        tokens: list[int],
        views: Views,
        wanted: Sequence[int],
        meanwhile: Task,
    ) -> None:
        """Do `_guess` by our kernels, which go on from the best guess of the row before."""
        starts = list(accumulate((block.count for block in blocks), initial=0))
        longest = max(block.count for block in blocks)
        order = [
            (place, number) for number in range(longest) for place, block in enumerate(blocks) if number < block.count
        ]
        asks, count = self._sampler.asks([blocks[place].row(number) for place, number in order])
        asked = dict[int, int]()  # by block, its last ask so far
        for index, (place, number) in enumerate(order):
            block = blocks[place]
            if number < block.outputs:
                asks[index] = asks[index]._replace(before=block.known[number - block.outputs])
            else:
                asks[index] = asks[index]._replace(after=asked[place])
            asked[place] = index
        rows = [wanted[starts[place] + number] for place, number in order]
        (ids, scores), _ = self.runner.compute(
            len(tokens), lambda: kernel(tokens, (), views, rows, asks, self.vocabulary.listed, count), meanwhile
        )
        for (place, _), guess in zip(order, ranked_guesses(ids, scores), strict=True):
            blocks[place].guesses.append(guess)

    def _inputs(self, blocks: Sequence[_Block]) -> tuple[list[int], TreeContext, list[int]]:
        """Return the tokens of a forward over the blocks, its context, and the indices of wanted rows."""
        rows, wanted, tokens, fields = list[ChainTokens](), list[int](), list[int](), self._model.fields
        for block in blocks:
            for cell, (part, count) in zip(block.cells, block.parts(fields.from_anchor), strict=False):
                own = ChainTokens(block.tree.table.pages, block.tree.base - 1)
                # Rows before the last known token never see later ones: they would see the tokens that they predict.
                own.add(0, cell, 0, part, None if fields.causal else max(0, len(part) - part.count(MASK) - 1))
                rows.append(own)
                tokens += part
                wanted += range(len(tokens) - count, len(tokens))
        runner = self.runner
        return tokens, TreeContext(runner.context([]), rows, runner.cache, self.chain_cache, runner.paged), wanted
