"""One step of the draft: extend paths, deepen every chain by one token, publish at once (anytime speculation)."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence

from ssd.config import EngineConfig
from ssd.draft.arena import Arena, Branches, TreePlan
from ssd.draft.guesser import Guesser, Places
from ssd.draft.tree import Chain, Guess, Tree
from ssd.execution.batch import Row, output_indices
from ssd.execution.pages import OutOfPages, PagePool, PageTable
from ssd.execution.runner import Runner
from ssd.ipc.board import LINE, BoardWriter, Key
from ssd.ipc.laws import LawArena
from ssd.ipc.messages import Admit, Launched, Outcome, Outcomes, Release, Retune
from ssd.params import MAX_CHAINS, MAX_LOOKAHEAD

log = logging.getLogger("ssd.draft")

# Prompt tokens computed beside other sequences' chains in one step: bounds how long those wait.
_PREFILL_CHUNK = 128

Paths = Sequence[tuple[Tree, Row]]
Chains = Sequence[tuple[Tree, list[Chain]]]


class DraftEngine:
    """Trees of all sequences, the model that grows them, the board they are published on.

    `vocab_size` is the target's: guesses beyond it would be of no use. `laws` is where the ratio rule looks up what
    tokens were drawn from.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        board: BoardWriter,
        epoch: int,
        vocab_size: int,
        laws: LawArena | None = None,
    ) -> None:
        model = runner.model
        self._runner, self._board, self._laws, self._epoch = runner, board, laws, epoch
        self._vocab_size = min(vocab_size, model.shape.outputs)
        self.pool = PagePool(config.draft_num_pages, config.page_size)
        cells = config.max_num_seqs * config.speculation.chains
        self._arena = Arena(model.shape, cells, MAX_LOOKAHEAD + 1, model.dtype, model.device)
        self._guesser = Guesser(self._vocab_size, model.device)
        self._max_position = model.shape.max_position
        self.trees: dict[int, Tree] = {}

    # -- messages ---------------------------------------------------------------------------------------------------

    def handle(self, message: Admit | Outcomes | Launched | Retune | Release) -> None:
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
            for launch in message.rows:
                if launch.request in self.trees:
                    self.trees[launch.request].launched(launch)
        elif isinstance(message, Retune):
            for request, speculation in message.rows:
                if request in self.trees:
                    self.trees[request].retune(speculation)
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
        guesses = self._forward(paths, chains)
        for tree, row in paths:
            self._extended(tree, row, [next(guesses) for _ in range(row.outputs)])
        for tree, growing in chains:
            self._deepened(tree, growing, [next(guesses) for _ in growing])
        self._board.tick(time.perf_counter() - began, sum(len(growing) for _, growing in chains))
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

    def _forward(self, paths: Paths, chains: Chains) -> Iterator[Guess]:
        """A guess for every path output, then for every chain."""
        rows = [row for _, row in paths]
        branches = [_branches(tree, growing) for tree, growing in chains]
        plan = TreePlan(self._runner.plan(rows), branches, self._runner.cache, self._arena)
        tokens = [token for row in rows for token in row.token_ids]
        tips = [chain.tokens[chain.computed] for _, growing in chains for chain in growing]
        wanted = [*output_indices(rows), *range(len(tokens), len(tokens) + len(tips))]
        logits = self._runner.run(tokens + tips, plan, wanted)[:, : self._vocab_size]
        places = [_places(tree, row) for tree, row in paths]
        places += [
            Places(tree, [p + 1 for p in branch.positions], branch.depths)
            for (tree, _), branch in zip(chains, branches, strict=True)
        ]
        return iter(self._guesser(logits, places))

    # -- what a step brought ----------------------------------------------------------------------------------------

    def _extended(self, tree: Tree, row: Row, guesses: list[Guess]) -> None:
        if tree.extended(len(row.token_ids), guesses):
            self._publish_line(tree)

    def _publish_line(self, tree: Tree) -> None:
        """Offer the line to a target that waits for it."""
        if tree.answers is not None and tree.line:
            line = [tree.guesses[index] for index in range(min(len(tree.line), tree.lookahead))]
            self._show_laws(tree, LINE, tree.answers, 0, line)
            self._board.publish(tree.slot, [LINE], [tree.answers], [tree.line[: tree.lookahead]])

    def _show_laws(self, tree: Tree, entry: int, key: Key, start: int, guesses: Sequence[Guess]) -> None:
        """What the tokens from the `start`-th of an entry on were drawn from, before the board shows the tokens."""
        if self._laws is not None and tree.ratio_rule:
            tokens = [guess.token for guess in guesses]
            laws = [guess.law.numpy(force=True) for guess in guesses if guess.law is not None]
            self._laws.write(tree.slot, entry, key, start, tokens, laws)

    def _deepened(self, tree: Tree, growing: list[Chain], guesses: list[Guess]) -> None:
        """Every chain is one token longer; what the target can use of it goes to the board."""
        for chain, guess in zip(growing, guesses, strict=True):
            chain.computed += 1
            chain.guesses.append(guess)
            chain.tokens.append(guess.token)
        news = [chain for chain in growing if chain.computed <= tree.lookahead]
        if news:
            keys = [tree.key(chain.fork, chain.tokens[0]) for chain in news]
            for chain, key in zip(news, keys, strict=True):
                self._show_laws(tree, chain.entry, key, chain.computed - 1, chain.guesses[-1:])
            self._board.publish(tree.slot, [chain.entry for chain in news], keys, [chain.tokens[1:] for chain in news])


def _places(tree: Tree, row: Row) -> Places:
    return Places(tree, row.predicted, [position - tree.base for position in row.predicted])


def _branches(tree: Tree, growing: list[Chain]) -> Branches:
    return Branches(
        tree.table.pages,
        tree.base,
        [chain.fork for chain in growing],
        [chain.cell for chain in growing],
        [chain.computed for chain in growing],
    )
