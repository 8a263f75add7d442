"""One step of the draft: extend paths, deepen every chain by one token, publish at once (anytime speculation)."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ssd.config import EngineConfig
from ssd.draft.arena import Arena, Branches, TreePlan
from ssd.draft.tree import Chain, Tree
from ssd.execution.batch import Row, output_indices
from ssd.execution.pages import OutOfPages, PagePool, PageTable
from ssd.execution.runner import Runner
from ssd.ipc.board import BoardWriter
from ssd.ipc.messages import Admit, Launched, Outcome, Outcomes, Release
from ssd.params import MAX_CHAINS, MAX_LOOKAHEAD
from ssd.speculation.noise import NoiseCache
from ssd.speculation.sampling import perturbed, ranked

log = logging.getLogger("ssd.draft")

# Prompt tokens computed beside other sequences' chains in one step: bounds how long those wait.
_PREFILL_CHUNK = 128
# Its entry on the board; chains have the others.
_LINE = MAX_CHAINS

Paths = Sequence[tuple[Tree, Row]]
Chains = Sequence[tuple[Tree, list[Chain]]]


class DraftEngine:
    """Trees of all sequences, the model that grows them, the board they are published on.

    `vocab_size` is the target's: guesses beyond it would be of no use.
    """

    def __init__(self, config: EngineConfig, runner: Runner, board: BoardWriter, epoch: int, vocab_size: int) -> None:
        model = runner.model
        self._runner, self._board, self._epoch = runner, board, epoch
        self._vocab_size = min(vocab_size, model.shape.outputs)
        self.pool = PagePool(config.draft_num_pages, config.page_size)
        cells = config.max_num_seqs * config.speculation.chains
        self._arena = Arena(model.shape, cells, MAX_LOOKAHEAD + 1, model.dtype, model.device)
        self._noise = NoiseCache(self._vocab_size, model.device)
        self._max_position = model.shape.max_position
        self.trees: dict[int, Tree] = {}

    # -- messages ---------------------------------------------------------------------------------------------------

    def handle(self, message: Admit | Outcomes | Launched | Release) -> None:
        """Apply a message. One that contradicts what is known here drops its sequence: the target goes on without."""
        if isinstance(message, Admit):
            self._drop(message.request)
            self._board.clear(message.slot)
            self.trees[message.request] = Tree(message, self._epoch, PageTable(self.pool))
        elif isinstance(message, Outcomes):
            for row in message.rows:
                tree = self.trees.get(row.request)
                if tree is not None:
                    self._outcome(tree, row)
        elif isinstance(message, Launched):
            for request, round_number, in_flight in message.rows:
                if request in self.trees:
                    self.trees[request].launched(round_number, in_flight)
        else:
            for request in message.requests:
                self._drop(request)

    def _outcome(self, tree: Tree, row: Outcome) -> None:
        try:
            winner = tree.outcome(row)
            if winner is not None:
                self._promote(tree, winner)
        except (ValueError, OutOfPages) as error:
            log.warning("request %d goes on without a draft: %s", tree.request, error)
            self._drop(tree.request)
            return
        self._arena.give_back([chain.cell for chain in tree.chains])
        tree.chains = []
        tree.table.share_computed(tree.tokens, min(tree.computed, tree.base))
        # A chain for this very outcome may have been published while it was on its way: it would hide the line.
        self._board.clear(tree.slot)
        self._publish_line(tree)

    def _promote(self, tree: Tree, winner: Chain) -> None:
        """The winning chain's keys and values become the path's."""
        stop = tree.computed + winner.computed
        tree.table.grow(stop)
        slots = self._runner.cache.slots(tree.table.pages, tree.computed, stop)
        self._arena.promote(winner.cell, winner.computed, self._runner.cache, slots)
        tree.computed = stop

    def _drop(self, request: int) -> None:
        tree = self.trees.pop(request, None)
        if tree is not None:
            tree.table.free()
            self._arena.give_back([chain.cell for chain in tree.chains])

    # -- work -------------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """One forward for everything that can use one; False when there is nothing to do before the next message."""
        began = time.perf_counter()
        paths, budget = [], _PREFILL_CHUNK
        for tree in list(self.trees.values()):
            row = self._path_row(tree, budget)
            if row is not None:
                budget -= len(row.token_ids)
                paths.append((tree, row))
        chains = [(tree, growing) for tree in self.trees.values() if (growing := self._growing(tree))]
        if not paths and not chains:
            return False
        ranks = self._forward(paths, chains)
        for tree, row in paths:
            self._extended(tree, row, [next(ranks) for _ in range(row.outputs)])
        for tree, growing in chains:
            self._deepened(tree, growing, [next(ranks) for _ in growing])
        self._board.tick(time.perf_counter() - began)
        return True

    def _path_row(self, tree: Tree, budget: int) -> Row | None:
        tokens = tree.pending(budget)
        if not tokens or tree.computed + len(tokens) > self._max_position:
            return None
        try:
            tree.table.grow(tree.computed + len(tokens))
        except OutOfPages:
            self._drop(tree.request)
            return None
        return Row(tokens, tree.computed, tree.table.pages, tree.outputs(len(tokens)))

    def _growing(self, tree: Tree) -> list[Chain]:
        """The chains of a tree that want another token, new ones included."""
        for fork, token in tree.new_forks():
            cell = self._arena.take() if len(tree.chains) < MAX_CHAINS else None
            if cell is None:
                break
            tree.chains.append(Chain(fork, [token], cell, entry=len(tree.chains)))
        # One token more than the lookahead: then the winner's bonus candidates are known when it wins.
        return [
            chain
            for chain in tree.chains
            if chain.computed <= tree.lookahead and tree.base + chain.fork + chain.computed < self._max_position
        ]

    def _forward(self, paths: Paths, chains: Chains) -> Iterator[list[int]]:
        """Ranked next tokens, in order: of every path output, then of every chain."""
        rows = [row for _, row in paths]
        branches = [_branches(tree, growing) for tree, growing in chains]
        plan = TreePlan(self._runner.plan(rows), branches, self._runner.cache, self._arena)
        tokens = [token for row in rows for token in row.token_ids]
        tips = [chain.tokens[chain.computed] for _, growing in chains for chain in growing]
        wanted = [*output_indices(rows), *range(len(tokens), len(tokens) + len(tips))]
        logits = self._runner.run(tokens + tips, plan, wanted)[:, : self._vocab_size]
        parts: list[tuple[Tree, Sequence[int]]] = [
            (tree, range(row.stop - row.outputs + 1, row.stop + 1)) for tree, row in paths
        ]
        parts += [(tree, [p + 1 for p in b.positions]) for (tree, _), b in zip(chains, branches, strict=True)]
        return iter(self._ranked(logits, parts))

    @torch.inference_mode()
    def _ranked(self, logits: Tensor, parts: Sequence[tuple[Tree, Sequence[int]]]) -> list[list[int]]:
        """Rank each row of `logits` by the score that decides its sample (ALGORITHM 6); `parts` name, run by run, the
        tree and the positions that the rows are about."""
        if not len(logits):
            return []  # prompt chunks only
        if any(tree.law.temperature > 0 for tree, _ in parts):
            runs = zip(logits.split([len(positions) for _, positions in parts]), parts, strict=True)
            logits = torch.cat([perturbed(run, tree.law, where, self._noise) for run, (tree, where) in runs])
        most = max(max(tree.speculation.fan_out) for tree, _ in parts)
        return ranked(logits.float().contiguous(), most + 1)

    # -- what a step brought ----------------------------------------------------------------------------------------

    def _extended(self, tree: Tree, row: Row, ranks: list[list[int]]) -> None:
        if tree.extended(len(row.token_ids), ranks):
            self._publish_line(tree)

    def _publish_line(self, tree: Tree) -> None:
        """Offer the line to a target that waits for it."""
        if tree.answers is not None and tree.line:
            self._board.publish(tree.slot, [_LINE], [tree.answers], [tree.line[: tree.lookahead]])

    def _deepened(self, tree: Tree, growing: list[Chain], ranks: list[list[int]]) -> None:
        """Every chain is one token longer; what the target can use of it goes to the board."""
        for chain, ranked_tokens in zip(growing, ranks, strict=True):
            chain.computed += 1
            chain.ranks.append(ranked_tokens)
            chain.tokens.append(ranked_tokens[0])
        news = [chain for chain in growing if chain.computed <= tree.lookahead]
        if news:
            keys = [tree.key(chain.fork, chain.tokens[0]) for chain in news]
            self._board.publish(tree.slot, [chain.entry for chain in news], keys, [chain.tokens[1:] for chain in news])


def _branches(tree: Tree, growing: list[Chain]) -> Branches:
    return Branches(
        tree.table.pages,
        tree.base,
        [chain.fork for chain in growing],
        [chain.cell for chain in growing],
        [chain.computed for chain in growing],
    )
