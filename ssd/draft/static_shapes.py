"""Runs draft steps in a few static shapes: on a GPU a whole step is one launch of a CUDA graph.

The graph holds the forward, the noise of the target's draws, and the ranking. A step of more tokens than the largest
shape runs in several: nothing is launched kernel by kernel while a target waits. In a step of several forwards the
graph runs again for the likeliest tokens, which stay on the device; where a target in `sd` waits for a given K, all
later forwards are one graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, islice, repeat
from typing import Any

import torch
from torch import Tensor

from ssd.config.engine import EngineConfig
from ssd.config.params import MAX_FAN_OUT, MAX_LOOKAHEAD
from ssd.draft.drafter import (
    ChainRows,
    Drafter,
    PathRow,
    candidates_of,
    cells,
    logit_rows,
    possible,
    reads_logits,
    wanted_of,
)
from ssd.draft.tree import Guess
from ssd.draft.tree_attention import joined
from ssd.draft.tree_tensors import TreeCache, TreeRow, TreeTensors
from ssd.execution.graph_shapes import LONGEST_ROW, GraphShape, draft_shapes, smallest_fitting
from ssd.execution.graphs import GraphPool, once
from ssd.execution.meanwhile import Task, nothing
from ssd.execution.runner import Runner
from ssd.execution.tables import Tables, Upload
from ssd.kernels.cpu import Ranked
from ssd.models.interface import Model
from ssd.speculation.noise import NoiseCache
from ssd.speculation.sampling import Drawing, drawing_of, highest, read_ids, warmed


class _RankedStep:
    """A step in one shape; `run` launches it, and `more` the later forwards of K tokens.

    It leaves the likeliest `ids` int64 [tokens, count] after each token, best first, their `scores`, and `hidden`
    states [tokens, width]. A greedy step also copies its logits to `kept`."""

    def __init__(self, runner: TreeRunner, batch: TreeTensors, kept: Tensor, drawing: Drawing) -> None:
        self._runner, self._batch, self._kept, self._drawing = runner, batch, kept, drawing
        self.ids = self.scores = self.hidden = torch.empty(0)
        self.run: Callable[[], None] = self._compute
        self.more: Callable[[], None] = self._more

    def _compute(self) -> None:
        runner, batch = self._runner, self._batch
        context = batch.tree_context(runner.tables.tensor, runner.tree_cache, runner.attention)
        self.hidden = runner.model.forward(batch.ids, context)
        logits = runner.model.logits(self.hidden)
        scores = warmed(logits[:, : runner.guessed], batch.draws(self._drawing), runner.ids)
        if self._drawing is Drawing.GREEDY:
            self._kept[: len(logits)] = logits
        places, self.scores = highest(scores.contiguous(), min(1 + MAX_FAN_OUT, scores.shape[1]))
        self.ids = places if runner.ids is None else runner.ids[places]

    def _more(self) -> None:
        first = self.ids, self.scores, self.hidden
        self.go_on(self._runner.later, self._compute)
        self.ids, self.scores, self.hidden = first  # the tensors that a replay of `run` writes

    def go_on(self, forwards: int, forward: Callable[[], None]) -> None:
        """Run `forward` for the likeliest tokens, `forwards` times, with the inputs that `fill_next` sent.

        The runner keeps the results, which the next forward overwrites."""
        runner, batch = self._runner, self._batch
        size = (len(batch.columns) - 1) * batch.tokens
        for index in range(forwards):
            runner.keep(self, index)
            batch.go_on(self.ids[:, 0], runner.next.device[index * size :][:size], self.hidden)
            forward()
        runner.keep(self, forwards)


class _ShapeSteps:
    def __init__(self, runner: TreeRunner, shape: GraphShape, kept: Tensor) -> None:
        self.shape, self.batch = shape, TreeTensors(*shape.sizes, runner.model)
        drawings = Drawing.GREEDY, Drawing.WARM, Drawing.FILTERED
        self.ranked = [_RankedStep(runner, self.batch, kept, drawing) for drawing in drawings]


class TreeRunner(Runner):
    """A draft's runner whose steps have static shapes, captured on a GPU if `capture`.

    The draft predicts `guessed` ids of the target's vocabulary: `ids`, or the first ones; ids of a text get no logits.
    The next step overwrites the logits."""

    def __init__(self, model: Model, config: EngineConfig, attention: str = "auto", *, capture: bool = True) -> None:
        sizes = cells(config), MAX_LOOKAHEAD + 1
        pages = TreeCache.pages(config.draft_num_pages, config.page_size, *sizes)
        super().__init__(model, pages, config.page_size, config.deterministic, attention)
        self.tree_cache = TreeCache(self.cache, config.draft_num_pages, *sizes)
        self.guessed = min(config.vocab_size, model.shape.outputs)
        self._read = partial(read_ids, vocab_size=config.vocab_size, refuse=True)  # SsdError ends the draft
        self.ids: Tensor | None = getattr(getattr(model, "head", None), "ids", None)
        self.tables = Tables(config.max_num_seqs, self.table_pages, self.tree_cache.dummy_page, model.device)
        self._capture = capture and model.device.type == "cuda"
        shapes = draft_shapes(config.max_num_seqs, cells(config))
        self.largest, self._sequences = shapes[-1], config.max_num_seqs
        most = self.largest.tokens
        self._kept = torch.zeros(most, model.shape.outputs, dtype=model.dtype, device=model.device)
        # For steps of several forwards, in any shape: the inputs of later forwards, and the results of all.
        columns = len(TreeTensors.columns) - 1
        self.next = Upload((MAX_LOOKAHEAD * columns * most,), torch.int64, model.device)
        self.later = config.speculation.num_speculative_tokens - 1
        found = MAX_LOOKAHEAD + 1, most, 1 + MAX_FAN_OUT
        self._kept_ids = torch.zeros(found, dtype=torch.int64, device=model.device)
        self._kept_scores = torch.zeros(found, dtype=torch.float32, device=model.device)
        width = model.shape.features
        self._kept_hidden = torch.zeros(min(1, width), *found[:2], width, dtype=model.dtype, device=model.device)
        self._steps = {shape: _ShapeSteps(self, shape, self._kept) for shape in shapes}

    def rows(self, paths: Sequence[PathRow], chains: Sequence[ChainRows], more: Sequence[int] = ()) -> list[TreeRow]:
        """Return the rows of a step; `more` tokens follow the last one of each path, and each token of chains."""
        each, cache = iter(more or repeat(0)), self.tree_cache
        rows = [own for tree, row in paths for own in cache.path(tree, row, LONGEST_ROW, next(each))]
        for tree, own in chains:
            rows += cache.chains(tree, own, LONGEST_ROW, list(islice(each, len(own.tokens))))
        return rows

    def batches(self, rows: Sequence[TreeRow]) -> list[tuple[list[TreeRow], GraphShape]]:
        """Return the rows of a step in batches, each with its shape: one, unless they fit no shape."""
        found, room = list[list[TreeRow]](), 0
        for row in rows:
            if len(row.token_ids) > room or len(found[-1]) == self.largest.rows:
                found.append([])
                room = self.largest.tokens
            found[-1].append(row)
            room -= len(row.token_ids)
        sizes = ([len(row.token_ids) for row in batch] for batch in found)
        return [
            (batch, smallest_fitting(own, self._steps) or self.largest) for batch, own in zip(found, sizes, strict=True)
        ]

    @torch.inference_mode()
    def ranked(
        self, rows: Sequence[TreeRow], parts: Sequence[Tensor] = (), meanwhile: Task = nothing
    ) -> list[tuple[Ranked, Tensor | None]]:
        """Run a step; return for each of its forwards the likeliest ids after each token, best first.

        A draft that reads features also returns those that it makes, [tokens, width]. Later forwards compute the
        tokens that follow (`TreeRow.more`), and are launched before the host reads any; a token without a part in a
        forward has no result."""
        drawing, found = drawing_of(row.tree.law for row in rows), list[list[tuple[Ranked, Tensor | None]]]()
        for batch, shape, own in self._with_features(rows, parts):
            found.append(self._ranked(batch, shape, drawing, own, meanwhile))
            meanwhile = nothing
        forwards = range(max(map(len, found)))
        return [_joined([own[min(index, len(own) - 1)] for own in found]) for index in forwards]

    def _ranked(
        self,
        rows: Sequence[TreeRow],
        shape: GraphShape,
        drawing: Drawing,
        features: Tensor | None,
        meanwhile: Task,
    ) -> list[tuple[Ranked, Tensor | None]]:
        step, count, made = self._run(rows, shape, drawing, features)
        meanwhile()
        if not any(any(row.more) for row in rows):
            return [(Ranked(self._read(step.ids[:count]), step.scores[:count].tolist()), made)]
        batch = self._steps[shape].batch
        forwards = batch.fill_next(rows, self.next, self.tree_cache, warm=drawing > Drawing.GREEDY)
        if forwards == self.later and self._of_trunks(shape):
            step.more()
        else:
            step.go_on(forwards, step.run)
        ids, scores, *hidden = (kept[: forwards + 1, :count] for kept in self._found(step))
        found = iter(hidden[0].clone()) if hidden else repeat(None)
        return [(Ranked(*both), own) for *both, own in zip(self._read(ids), scores.tolist(), found, strict=False)]

    def keep(self, step: _RankedStep, index: int) -> None:
        """Copy the results of forward number `index` of a step, which the next one overwrites."""
        for kept, found in zip(self._found(step), (step.ids, step.scores, step.hidden), strict=False):
            kept[index].copy_(found)

    def _found(self, step: _RankedStep) -> list[Tensor]:
        """Return a step's kept ids and scores [forwards, tokens, count], and the features that were made."""
        rows, count = step.ids.shape
        return [self._kept_ids[:, :rows, :count], self._kept_scores[:, :rows, :count], *self._kept_hidden[:, :, :rows]]

    def _of_trunks(self, shape: GraphShape) -> bool:
        # After a round a trunk has one or two tokens.
        return self.later > 0 and shape.tokens <= 2 * shape.rows < 4 * self._sequences

    @torch.inference_mode()
    def logits(self, rows: Sequence[TreeRow], parts: Sequence[Tensor] = ()) -> tuple[Tensor, Tensor | None]:
        """Run a step; return its logits [tokens, outputs] and the features, if the draft makes any."""
        logits, features = list[Tensor](), list[Tensor]()
        for batch, shape, own in self._with_features(rows, parts):
            _, count, made = self._run(batch, shape, Drawing.GREEDY, own)
            logits.append(self._kept[:count].clone())
            features += [] if made is None else [made]
        return torch.cat(logits), torch.cat(features) if features else None

    def _with_features(
        self, rows: Sequence[TreeRow], parts: Sequence[Tensor]
    ) -> Iterator[tuple[list[TreeRow], GraphShape, Tensor | None]]:
        features, first = joined(parts) if parts else None, 0
        for batch, shape in self.batches(rows):
            stop = first + sum(len(row.token_ids) for row in batch)
            yield batch, shape, None if features is None else features[first:stop]
            first = stop

    def _run(
        self, rows: Sequence[TreeRow], shape: GraphShape, drawing: Drawing, features: Tensor | None = None
    ) -> tuple[_RankedStep, int, Tensor | None]:
        """Launch a batch; return its step, the number of its tokens and the features, if it makes any."""
        batch, step = self._steps[shape].batch, self._steps[shape].ranked[drawing]
        count = sum(len(row.token_ids) for row in rows)
        if features is not None:
            assert batch.features is not None, "the draft reads features"
            batch.features[:count] = features
        batch.fill_rows(rows, self.tables, self.tree_cache, warm=drawing > Drawing.GREEDY)
        step.run()
        # A copy, since the next step overwrites it.
        return step, count, None if batch.features is None else step.hidden[:count].clone()

    @torch.inference_mode()
    def warm_up(self, rows: int) -> None:
        """Run, and capture, every static shape: no forward is without one."""
        captured = GraphPool(self.model.device).capture if self._capture else once
        # The largest first: smaller ones fit into its memory.
        for steps in sorted(self._steps.values(), key=lambda steps: -steps.batch.tokens):
            steps.batch.fill_rows([], self.tables, self.tree_cache, warm=True)
            for step in steps.ranked:
                step.run = captured(step.run)
                if self._of_trunks(steps.shape):
                    step.run()  # a capture computes nothing: `more` would look up whatever its memory holds
                    step.more = captured(step.more)


def _joined(batches: Sequence[tuple[Ranked, Tensor | None]]) -> tuple[Ranked, Tensor | None]:
    if len(batches) == 1:
        return batches[0]
    ids, scores = ([row for own, _ in batches for row in own.ids], [row for own, _ in batches for row in own.scores])
    features = [made for _, made in batches if made is not None]
    return Ranked(ids, scores), torch.cat(features) if features else None


class StaticDrafter(Drafter):
    """A drafter in static shapes; grammars and draft probabilities need logits after the graph."""

    runner: TreeRunner
    goes_on, ends = True, False

    def __init__(
        self, config: EngineConfig, runner: TreeRunner, noise: NoiseCache, vocab_size: int, **more: Any
    ) -> None:
        super().__init__(config, runner, noise, vocab_size, chain_cache=runner.tree_cache.chain_cache(), **more)
        self.most_tokens = runner.largest.tokens

    def forward(
        self, paths: Sequence[PathRow], chains: Sequence[ChainRows], meanwhile: Task = nothing
    ) -> Iterator[Guess]:
        runner = self.runner
        rows = runner.rows(*self._placed(paths, chains))
        if any(reads_logits(row.tree) for row in rows):
            wanted, parts = wanted_of(paths, chains), self._parts(paths, chains)
            logits, made = runner.logits(rows, parts)
            meanwhile()
            found = self._sampler(logits[wanted, : runner.guessed], logit_rows(paths, chains))
            return iter(self._finished(found, made, wanted))
        (guesses,) = self._ranked(paths, chains, rows, meanwhile)
        return iter(guesses)

    def several(
        self, paths: Sequence[PathRow], chains: Sequence[ChainRows], more: Sequence[int], meanwhile: Task = nothing
    ) -> list[list[Guess]] | None:
        rows = self.runner.rows(*self._placed(paths, chains), more)
        if any(reads_logits(row.tree) for row in rows):
            return None
        first, *later = self._ranked(paths, chains, rows, meanwhile)
        outputs = [row.outputs for _, row in paths] + [1] * (len(more) - len(paths))
        found, stops = [], accumulate(outputs)
        for count, stop, further in zip(outputs, stops, more, strict=True):
            found.append(first[stop - count : stop] + [guesses[stop - 1] for guesses in later[:further]])
        return found

    def _ranked(
        self,
        paths: Sequence[PathRow],
        chains: Sequence[ChainRows],
        rows: Sequence[TreeRow],
        meanwhile: Task,
    ) -> list[list[Guess]]:
        wanted, laws = wanted_of(paths, chains), [row.tree.law for row in rows]
        count, steps = candidates_of(row.tree for row in rows), list[list[Guess]]()
        for (ids, scores), made in self.runner.ranked(rows, self._parts(paths, chains), meanwhile):
            guesses = [Guess(ids[index][0], ids[index][:count], scores=scores[index][:count]) for index in wanted]
            if any(law.filters for law in laws):
                guesses = [possible(guess) for guess in guesses]
            steps.append(self._finished(guesses, made, wanted))
        return steps
