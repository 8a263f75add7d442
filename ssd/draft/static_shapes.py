"""Draft steps in a few static shapes, so that on a GPU a whole step is one launch of a CUDA graph.

The graph holds the forward, the noise of the target's draws, and the ranking of candidates. Shapes and padding are as
in `ssd.execution.static`; a step that fits no shape, above all a prompt chunk, runs as it is.

Tokens of paths and of chains are alike: each sees some of its sequence's pages and some of one cell of the chain cache;
path tokens see none. The cells lie behind the pages in the same cache, as pages of another size. So all tokens are
stored at once, and one backend reads both parts. Everything but the capture also runs on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssd.config.engine import EngineConfig
from ssd.config.params import MAX_FAN_OUT, MAX_LOOKAHEAD
from ssd.draft import eagle3
from ssd.draft.drafter import ChainRows, Drafter, PathRow, candidates_of, cells, logit_rows, possible, wanted_of
from ssd.draft.eagle3 import HeadDrafter
from ssd.draft.tree import Guess, Tree
from ssd.draft.tree_attention import ChainCache, ChainTokens
from ssd.execution.batch import Row
from ssd.execution.graph_shapes import LONGEST_ROW, GraphShape, draft_shapes, smallest_fitting
from ssd.execution.graphs import GraphPool, once
from ssd.execution.kv_cache import KVCache
from ssd.execution.meanwhile import Task, nothing
from ssd.execution.runner import Runner
from ssd.execution.tables import BatchTensors, Draw, TableContext, Tables
from ssd.kernels.cpu import Ranked
from ssd.layers.attention import Scores, merge
from ssd.layers.paged import PagedAttention, PagedRows
from ssd.models.eagle3 import Eagle3
from ssd.models.interface import Model
from ssd.speculation import outcome
from ssd.speculation.noise import NoiseCache
from ssd.speculation.sampling import Drawing, drawing_of, highest, warmed


class TreeRow(NamedTuple):
    """Tokens of one sequence in a row of a batch.
    Of each: its position, the slot of its keys and values, how many tokens of `pages` it sees, and how many of its
    `own` cell."""

    tree: Tree
    pages: Sequence[int]
    token_ids: Sequence[int]
    positions: Sequence[int]
    slots: Sequence[int]
    seen: Sequence[int]
    cells: Sequence[int]
    own: Sequence[int]


class TreeCache:
    """The layout of a drafter's `cache`: pages, a dummy page, cells, and a dummy cell.
    It has `num_pages` pages, and `cells` cells of `depth` tokens. Nobody writes the dummy cell."""

    def __init__(self, cache: KVCache, num_pages: int, cells: int, depth: int) -> None:
        self.cache, self.dummy_page, self.dummy_cell, self.depth = cache, num_pages, cells, depth
        self._first = (num_pages + 1) * cache.page_size
        self._stop = self._first + (cells + 1) * depth
        for kind in (cache.keys, cache.values):
            kind[:, self._first : self._stop] = 0.0
        self.cells = torch.arange(cells + 1, dtype=torch.int32, device=cache.keys.device)[:, None]

    @staticmethod
    def pages(num_pages: int, page_size: int, cells: int, depth: int) -> int:
        """How many pages the cache must have."""
        return num_pages + 1 + -(-(cells + 1) * depth // page_size)

    def chain_cache(self) -> ChainCache:
        """The cells, all free."""
        keys, values = (
            kind[:, self._first : self._stop].unflatten(1, (-1, self.depth))[:, : self.dummy_cell]
            for kind in (self.cache.keys, self.cache.values)
        )
        return ChainCache(keys, values)

    def own(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of all cells in a layer, each [slots, kv_heads, head_dim]."""
        where = slice(self._first, self._stop)
        return self.cache.keys[layer, where], self.cache.values[layer, where]

    def path(self, tree: Tree, row: Row) -> TreeRow:
        """A row of path tokens."""
        count, positions = len(row.token_ids), range(row.start, row.stop)
        slots = self.cache.slots(row.pages, row.start, row.stop)
        seen = range(row.start + 1, row.stop + 1)
        pages = row.pages[: -(-row.stop // self.cache.page_size)]
        return TreeRow(tree, pages, row.token_ids, positions, slots, seen, [self.dummy_cell] * count, [0] * count)

    def chains(self, tree: Tree, tokens: ChainTokens, longest: int) -> list[TreeRow]:
        """Rows of chain tokens, at most `longest` tokens each."""
        pages = tokens.pages[: -(-(tokens.base + max(tokens.forks)) // self.cache.page_size)]
        seen = [tokens.base + fork for fork in tokens.forks]
        own = [depth + 1 for depth in tokens.depths]
        places = zip(tokens.cells, tokens.depths, strict=True)
        slots = [self._first + cell * self.depth + depth for cell, depth in places]
        columns = tokens.tokens, tokens.positions, slots, seen, tokens.cells, own
        starts = range(0, len(seen), longest)
        return [TreeRow(tree, pages, *(column[start : start + longest] for column in columns)) for start in starts]


class TreeTensors(BatchTensors):
    """What a step reads of its rows. `features` [tokens, width]: those of the tokens before, for an EAGLE-3 head, whose
    rows lie at the position before their token's."""

    columns = (*BatchTensors.columns, "seen", "cells", "own")

    def __init__(self, tokens: int, rows: int, longest: int, model: Model) -> None:
        super().__init__(tokens, rows, longest, model.device)
        self.features: Tensor | None = None
        if isinstance(model, Eagle3):
            self.features = torch.zeros(tokens, model.width, dtype=model.dtype, device=model.device)

    def fill_rows(self, rows: Sequence[TreeRow], tables: Tables, cache: TreeCache, warm: bool) -> None:
        """Write and send the rows and, if `warm`, the noise keys of the token after each token.
        Padding is stored on the dummy page and sees the first token of it."""
        after = 1 if self.features is None else 2
        tables.tell((row.tree.slot, row.pages) for row in rows)
        dummy_slot = cache.dummy_page * cache.cache.page_size
        self.send(
            [len(row.token_ids) for row in rows],
            [row.tree.slot for row in rows],
            tables.dummy,
            _draws(rows, after) if warm else (),
            ids=([token for row in rows for token in row.token_ids], 0),
            positions=([position for row in rows for position in row.positions], 0),
            slots=([slot for row in rows for slot in row.slots], dummy_slot),
            seen=([count for row in rows for count in row.seen], 1),
            cells=([cell for row in rows for cell in row.cells], cache.dummy_cell),
            own=([count for row in rows for count in row.own], 0),
        )

    def tree_context(self, table: Tensor, cache: TreeCache, attention: PagedAttention) -> StaticTreeContext:
        """A new context that reads these tensors."""
        column, device = self._device, self.ids.device
        shared = self._rows(table, cache.cache, column["seen"], causal=False)
        own = PagedRows(
            cache.cells,
            column["cells"].int(),
            torch.arange(self.tokens + 1, dtype=torch.int32, device=device),
            column["own"],
            column["own"] - 1,
            cache.depth,
            1,
            causal=False,
        )
        return StaticTreeContext(column["positions"], column["slots"], shared, own, cache, attention, self.features)


def _draws(rows: Sequence[TreeRow], after: int) -> list[Draw]:
    """What decides the token after each token, `after` its row's position. Chains of one sequence share it at equal
    positions."""
    found: dict[tuple[int, int], Draw] = {}
    for row in rows:
        for position in row.positions:
            place = row.tree.slot, position
            if place not in found:
                found[place] = Draw.of(row.tree.law, position + after)
    return [found[row.tree.slot, position] for row in rows for position in row.positions]


class StaticTreeContext(TableContext):
    """The forward context of a static step, as `ssd.draft.tree_attention.TreeContext` for ragged ones.
    Every token attends to its path and to its cell; log-sum-exp merges the parts."""

    def __init__(
        self,
        positions: Tensor,
        slots: Tensor,
        shared: PagedRows,
        own: PagedRows,
        cache: TreeCache,
        attention: PagedAttention,
        features: Tensor | None = None,
    ) -> None:
        super().__init__(positions, slots, shared, cache.cache, attention)
        self._own, self._tree_cache, self.features = own, cache, features

    def _attend_stored(self, layer: int, q: Tensor, rule: Scores) -> Tensor:
        scale = self._scale if rule.scale is None else rule.scale
        paths = self._cache.keys[layer], self._cache.values[layer]
        shared = self._attention.part(q, *paths, self._rows, scale, rule)
        return merge(shared, self._attention.part(q, *self._tree_cache.own(layer), self._own, scale, rule)).flatten(1)


class _RankedStep:
    """A step in one shape.
    It leaves the likeliest `ids` int64 [tokens, count] after each token, best first, and their `scores`: what tokens
    are drawn by. If those are the logits, these also go to the first rows of `kept`. `hidden` [tokens, width] is what
    the model makes of the tokens."""

    def __init__(self, runner: TreeRunner, batch: TreeTensors, kept: Tensor, drawing: Drawing) -> None:
        self._runner, self._batch, self._kept, self._drawing = runner, batch, kept, drawing
        self.ids = self.scores = self.hidden = torch.empty(0)
        self.run: Callable[[], None] = self._compute

    def _compute(self) -> None:
        runner, batch = self._runner, self._batch
        context = batch.tree_context(runner.tables.tensor, runner.tree_cache, runner.attention)
        self.hidden = runner.model.forward(batch.ids, context)
        logits = runner.model.logits(self.hidden)
        scores, draws = logits[:, : runner.guessed], batch.draws(self._drawing)
        if draws is not None:
            scores = warmed(scores, draws, runner.ids)
        else:
            self._kept[: len(logits)] = logits
        places, self.scores = highest(scores.float().contiguous(), min(1 + MAX_FAN_OUT, scores.shape[1]))
        self.ids = places if runner.ids is None else runner.ids[places]


class _ShapeSteps:
    """The tensors of one shape, and its steps, which read them."""

    def __init__(self, runner: TreeRunner, shape: GraphShape, kept: Tensor) -> None:
        self.batch = TreeTensors(*shape.sizes, runner.model)
        self.ranked = [_RankedStep(runner, self.batch, kept, drawing) for drawing in Drawing]


class TreeRunner(Runner):
    """A draft's runner whose steps have static shapes, captured if `capture` and if there is a GPU.
    The draft predicts `guessed` ids that the target knows, too: `ids`, or the first ones. Ids of texts have no logits
    here. The next step overwrites the logits."""

    def __init__(self, model: Model, config: EngineConfig, attention: str = "auto", *, capture: bool = True) -> None:
        sizes = cells(config), MAX_LOOKAHEAD + 1
        pages = TreeCache.pages(config.draft_num_pages, config.page_size, *sizes)
        super().__init__(model, pages, config.page_size, config.deterministic, attention)
        self.tree_cache = TreeCache(self.cache, config.draft_num_pages, *sizes)
        self.guessed = min(config.vocab_size, model.shape.outputs)
        self.ids: Tensor | None = getattr(getattr(model, "head", None), "ids", None)
        self.tables = Tables(config.max_num_seqs, self.table_pages, self.tree_cache.dummy_page, model.device)
        self._capture = capture and model.device.type == "cuda"
        found = draft_shapes(config.max_num_seqs, cells(config))
        most = max(shape.tokens for shape in found)
        self._kept = torch.zeros(most, model.shape.outputs, dtype=model.dtype, device=model.device)
        self._steps = {shape: _ShapeSteps(self, shape, self._kept) for shape in found}

    def rows(self, paths: Sequence[PathRow], chains: Sequence[ChainRows]) -> list[TreeRow]:
        """The rows of a step."""
        rows = [self.tree_cache.path(tree, row) for tree, row in paths]
        return rows + [row for tree, own in chains for row in self.tree_cache.chains(tree, own, LONGEST_ROW)]

    def shape(self, rows: Sequence[TreeRow]) -> GraphShape | None:
        """The shape that a step takes; None if it fits none."""
        return smallest_fitting([len(row.token_ids) for row in rows], self._steps)

    @torch.inference_mode()
    def ranked(
        self, rows: Sequence[TreeRow], shape: GraphShape, parts: Sequence[Tensor] = (), meanwhile: Task = nothing
    ) -> tuple[Ranked, Tensor | None]:
        """Run a step: the likeliest ids after each token, best first, and what an EAGLE-3 head makes of the tokens,
        [tokens, width]. `parts`: the features that it reads."""
        step, count, made = self._run(rows, shape, drawing_of(row.tree.law for row in rows), parts)
        meanwhile()
        return Ranked(step.ids[:count].tolist(), step.scores[:count].tolist()), made

    @torch.inference_mode()
    def logits(
        self, rows: Sequence[TreeRow], shape: GraphShape, parts: Sequence[Tensor] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Run a step: the logits [tokens, outputs], and what an EAGLE-3 head makes of the tokens."""
        _, count, made = self._run(rows, shape, Drawing.GREEDY, parts)
        return self._kept[:count], made

    def _run(
        self, rows: Sequence[TreeRow], shape: GraphShape, drawing: Drawing, parts: Sequence[Tensor]
    ) -> tuple[_RankedStep, int, Tensor | None]:
        """Launch a step; returns it with the number of its tokens and, for a head, what it makes of them."""
        batch, step = self._steps[shape].batch, self._steps[shape].ranked[drawing]
        count = sum(len(row.token_ids) for row in rows)
        if batch.features is not None:
            batch.features[:count] = eagle3.joined(parts)
        batch.fill_rows(rows, self.tables, self.tree_cache, warm=drawing > Drawing.GREEDY)
        step.run()
        # A copy, since the next step overwrites it.
        return step, count, None if batch.features is None else step.hidden[:count].clone()

    @torch.inference_mode()
    def warm_up(self, rows: int) -> None:
        """Run, and capture, every static shape; and forwards without one."""
        if isinstance(self.model, Eagle3):
            eagle3.warm_up(self, rows)
        else:
            super().warm_up(rows)
        captured = GraphPool(self.model.device).capture if self._capture else once
        # The largest first: the smaller ones fit into its memory.
        for steps in sorted(self._steps.values(), key=lambda steps: -steps.batch.tokens):
            steps.batch.fill_rows([], self.tables, self.tree_cache, warm=True)
            for step in steps.ranked:
                step.run = captured(step.run)


class StaticDrafter(Drafter):
    """A drafter in static shapes. Grammars and the ratio rule work on the logits outside of the graph."""

    runner: TreeRunner

    def __init__(
        self, config: EngineConfig, runner: TreeRunner, noise: NoiseCache, vocab_size: int, **more: Any
    ) -> None:
        super().__init__(config, runner, noise, vocab_size, chain_cache=runner.tree_cache.chain_cache(), **more)

    def forward(
        self, paths: Sequence[PathRow], chains: Sequence[ChainRows], meanwhile: Task = nothing
    ) -> Iterator[Guess]:
        runner, wanted = self.runner, wanted_of(paths, chains)
        rows = runner.rows(*self._placed(paths, chains))
        shape = runner.shape(rows)
        if shape is None:
            return super().forward(paths, chains, meanwhile)
        trees, parts = [row.tree for row in rows], self._parts(paths, chains)
        if outcome.NEEDS_PROBABILITIES or any(tree.ratio_rule or tree.grammar for tree in trees):
            logits, made = runner.logits(rows, shape, parts)
            meanwhile()
            found = self._sampler(logits[wanted, : runner.guessed], logit_rows(paths, chains))
            return iter(self._finished(found, made, wanted))
        ((ids, scores), made), count = runner.ranked(rows, shape, parts, meanwhile), candidates_of(trees)
        guesses = [Guess(ids[index][0], ids[index][:count], scores=scores[index][:count]) for index in wanted]
        if any(tree.law.filters for tree in trees):
            guesses = [possible(guess) for guess in guesses]
        return iter(self._finished(guesses, made, wanted))


class StaticHeadDrafter(StaticDrafter, HeadDrafter):
    """An EAGLE-3 head in static shapes: the features that it reads are sent before a step, what it makes is kept."""
