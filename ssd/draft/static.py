"""Draft steps in a few fixed shapes, so that on a GPU a whole one is a single launch (a CUDA graph): the forward and
what is guessed from it, the noise of the target's draws included.

Shapes, and what fills them, are as in `ssd.execution.static`; what fits none, pieces of prompts above all, runs as it
is. But for the recording all of this runs on a CPU too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ssd.config import EngineConfig
from ssd.draft.guesser import candidates_of
from ssd.draft.level import Chains, Level, Paths, cells, wanted_of
from ssd.draft.runs import Run, Store, TreeTensors
from ssd.draft.tree import Guess
from ssd.execution.graphs import Recorder, once
from ssd.execution.rooms import LONGEST_ROW, Room, fitting, rooms_of_draft
from ssd.execution.runner import Runner
from ssd.execution.tables import Tables
from ssd.models.interface import Model
from ssd.params import MAX_FAN_OUT, MAX_LOOKAHEAD
from ssd.speculation.noise import NoiseCache, gumbels_of
from ssd.speculation.sampling import highest, warmed


class _Ranking:
    """A step in one shape, and what it leaves: the likeliest `ids` int64 [tokens, count] after each token, best first;
    if `warm`, those of the logits with temperature and noise, else the logits too, in the first rows of `kept`."""

    def __init__(self, runner: TreeRunner, batch: TreeTensors, kept: Tensor, warm: bool) -> None:
        self._runner, self._batch, self._kept, self._warm = runner, batch, kept, warm
        self.ids = torch.empty(0)
        self.run: Callable[[], None] = self._compute

    def _compute(self) -> None:
        runner, batch = self._runner, self._batch
        plan = batch.tree_plan(runner.tables.tensor, runner.store, runner.attention)
        logits = runner.model.logits(runner.model.forward(batch.ids, plan))
        scores = logits[:, : runner.guessed].float()
        if self._warm:
            keys, inverse = batch.draws
            scores = warmed(scores, inverse, gumbels_of(keys, scores.shape[1]))
        else:
            self._kept[: len(logits)] = logits
        self.ids = highest(scores.contiguous(), min(1 + MAX_FAN_OUT, scores.shape[1]))


class _Step:
    """A shape's tensors, and the steps that read them."""

    def __init__(self, runner: TreeRunner, room: Room, kept: Tensor) -> None:
        self.batch = TreeTensors(*room.sizes, runner.model.device)
        self.rankings = [_Ranking(runner, self.batch, kept, warm) for warm in (False, True)]


class TreeRunner(Runner):
    """A runner of a draft for `config`, whose steps have static shapes, recorded where `capture` and there is a GPU.
    What it says goes on in the `guessed` ids that target and draft both know. Logits that it gives are overwritten by
    the next step."""

    def __init__(self, model: Model, config: EngineConfig, attention: str = "auto", *, capture: bool = True) -> None:
        sizes = cells(config), MAX_LOOKAHEAD + 1
        pages = Store.pages(config.draft_num_pages, config.page_size, *sizes)
        super().__init__(model, pages, config.page_size, config.deterministic, attention)
        self.store = Store(self.cache, config.draft_num_pages, *sizes)
        self.guessed = min(config.vocab_size, model.shape.outputs)
        self.tables = Tables(config.max_num_seqs, self.table_pages, self.store.dummy_page, model.device)
        self._capture = capture and model.device.type == "cuda"
        found = rooms_of_draft(config.max_num_seqs, cells(config))
        most = max(room.tokens for room in found)
        self._kept = torch.zeros(most, model.shape.outputs, dtype=model.dtype, device=model.device)
        self._steps = {room: _Step(self, room, self._kept) for room in found}

    def runs(self, paths: Sequence[Paths], chains: Sequence[Chains]) -> list[Run]:
        """The rows of a step."""
        runs = [self.store.path(tree, row) for tree, row in paths]
        return runs + [run for tree, branches in chains for run in self.store.chains(tree, branches, LONGEST_ROW)]

    def room(self, runs: Sequence[Run]) -> Room | None:
        """The shape that a step takes; None where it has to run as it is."""
        return fitting([len(run.token_ids) for run in runs], self._steps)

    @torch.inference_mode()
    def ranked(self, runs: Sequence[Run], room: Room) -> list[list[int]]:
        """Run a step: for every token the likeliest ids after it, best first, under laws that filter nothing."""
        warm = any(run.tree.law.temperature > 0.0 for run in runs)
        ids = self._run(runs, room, warm).ids[: sum(len(run.token_ids) for run in runs)]
        found: list[list[int]] = ids.tolist()
        return found

    @torch.inference_mode()
    def logits(self, runs: Sequence[Run], room: Room) -> Tensor:
        """Run a step: the logits [tokens, outputs]."""
        self._run(runs, room, False)
        return self._kept[: sum(len(run.token_ids) for run in runs)]

    def _run(self, runs: Sequence[Run], room: Room, warm: bool) -> _Ranking:
        step = self._steps[room]
        step.batch.fill_runs(runs, self.tables, self.store, warm)
        ranking = step.rankings[warm]
        ranking.run()
        return ranking

    @torch.inference_mode()
    def warm_up(self, rows: int) -> None:
        """Run, and record, every static shape; and forwards that have none."""
        super().warm_up(rows)
        record = Recorder(self.model.device).record if self._capture else once
        # The largest first: the smaller ones find room in its memory.
        for step in sorted(self._steps.values(), key=lambda step: -step.batch.tokens):
            step.batch.fill_runs([], self.tables, self.store, warm=True)
            for ranking in step.rankings:
                ranking.run = record(ranking.run)


class StaticLevel(Level):
    """A draft model at work in static shapes. What the ratio rule and filters want of logits is worked out outside."""

    runner: TreeRunner

    def __init__(self, config: EngineConfig, runner: TreeRunner, noise: NoiseCache, vocab_size: int) -> None:
        super().__init__(config, runner, noise, vocab_size, runner.store.arena())

    def forward(self, paths: Sequence[Paths], chains: Sequence[Chains]) -> Iterator[Guess]:
        runner, wanted = self.runner, wanted_of(paths, chains)
        runs = runner.runs(paths, chains)
        room = runner.room(runs)
        if room is None:
            return super().forward(paths, chains)
        trees = [run.tree for run in runs]
        if any(tree.ratio_rule or tree.law.filters for tree in trees):
            return iter(self._guesses(runner.logits(runs, room)[wanted], paths, chains))
        found, count = runner.ranked(runs, room), candidates_of(trees)
        return iter([Guess(found[index][0], found[index][:count]) for index in wanted])
