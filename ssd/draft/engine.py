"""One step of the draft: extend paths, deepen every chain by one token, publish at once (anytime speculation)."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence

from ssd import failpoints
from ssd.config import EngineConfig
from ssd.draft.arena import Branches
from ssd.draft.choice import Choice, Growing
from ssd.draft.head import HeadLevel
from ssd.draft.level import Chains, Level, Paths, rows_of
from ssd.draft.smaller import SmallerDraft, Tip
from ssd.draft.static import StaticLevel, TreeRunner
from ssd.draft.tree import Chain, Guess, Tree, confirmed
from ssd.execution.batch import Row
from ssd.execution.pages import OutOfPages, PageTable
from ssd.execution.runner import Runner
from ssd.ipc.board import LINE, BoardWriter, Key
from ssd.ipc.features import FeatureArena
from ssd.ipc.laws import LawArena
from ssd.ipc.messages import Admit, Launched, Outcome, Outcomes, Release, Retune
from ssd.monitor.lanes import SILENT, Lane, State
from ssd.speculation.noise import NoiseCache

log = logging.getLogger("ssd.draft")

# Prompt tokens computed beside other sequences' chains in one step: bounds how long those wait.
_PREFILL_CHUNK = 128


class DraftEngine:
    """Trees of all sequences, the models that grow them, the board they are published on.

    Of the `runners`, smallest first, the last one decides what is published; the others help it (cascade). `vocab_size`
    is the target's: guesses beyond it would be of no use. `laws` is where the ratio rule looks up what tokens were
    drawn from, and `features` what the draft reads of the target if it is an EAGLE-3 head.
    """

    def __init__(
        self,
        config: EngineConfig,
        runners: Sequence[Runner],
        board: BoardWriter,
        epoch: int,
        vocab_size: int,
        laws: LawArena | None = None,
        features: FeatureArena | None = None,
        lane: Lane = SILENT,
    ) -> None:
        self._board, self._laws, self._epoch, self._lane = board, laws, epoch, lane
        noise = NoiseCache(vocab_size, runners[-1].model.device)
        *smaller, self.level = (
            StaticLevel(config, runner, noise, vocab_size)
            if isinstance(runner, TreeRunner)
            else Level(config, runner, noise, vocab_size)
            for runner in runners
        )
        if features is not None:
            self.level = HeadLevel(config, runners[-1], noise, vocab_size, features)
        self.smaller: SmallerDraft | None = None
        for level in smaller:
            self.smaller = SmallerDraft(level, self.smaller)
        self.trees: dict[int, Tree] = {}
        self._choice = Choice(self.level.arena, self.level.max_position, self._forget_cells)

    # -- messages ---------------------------------------------------------------------------------------------------

    def handle(self, message: Admit | Outcomes | Launched | Retune | Release) -> None:
        """Apply a message. One that contradicts what is known here drops its sequence: the target goes on without."""
        if isinstance(message, Admit):
            self._drop(message.request)
            self._board.clear(message.slot)
            table = PageTable(self.level.pool, message.cache_salt)
            self.trees[message.request] = Tree(message, self._epoch, table, self.level.recurrent)
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
        self._lane.enter(State.PROMOTE, tree.request)
        prepared = [chain.tokens[0] for chain in tree.chains if chain.fork == row.accepted]
        try:
            winner = tree.outcome(row)
            if winner is not None:
                self._promote(tree, winner)
        except (ValueError, OutOfPages) as error:
            log.warning("request %d goes on without a draft: %s", tree.request, error)
            self._drop(tree.request)
            return
        self._choice.looked_up(prepared, row.token)
        self._forget_chains(tree)
        if not tree.recurrent:
            tree.table.share_computed(tree.tokens, min(tree.computed, tree.base))
        # A chain for this very outcome may have been published while it was on its way: it would hide the line.
        self._board.clear(tree.slot)
        self._publish_line(tree)

    def _promote(self, tree: Tree, winner: Chain) -> None:
        """The winning chain's keys and values become the path's, unless they are computed again."""
        if tree.recurrent or winner.cell is None or not winner.computed:
            return
        tree.table.grow(tree.computed + winner.computed)
        self.level.promote(tree.table, tree.computed, winner.cell, winner.computed)
        tree.computed += winner.computed
        if self.smaller is not None:
            self.smaller.promote(tree, winner.cell, winner.tokens)

    def _forget_chains(self, tree: Tree) -> None:
        cells = [chain.cell for chain in tree.chains if chain.cell is not None]
        self.level.arena.give_back(cells)
        self._forget_cells(cells)
        tree.chains = []

    def _forget_cells(self, cells: Sequence[int]) -> None:
        """These places of the arena will hold other chains."""
        if self.smaller is not None:
            self.smaller.forget_chains(cells)

    def _drop(self, request: int) -> None:
        tree = self.trees.pop(request, None)
        if tree is not None:
            tree.table.free()
            self._forget_chains(tree)
            if self.smaller is not None:
                self.smaller.release(request)

    # -- work -------------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """One forward for everything that can use one; False when there is nothing to do before the next message."""
        began = time.perf_counter()
        pieces, budget = [], _PREFILL_CHUNK
        # The shortest rest first: those that the target waits for now are not kept waiting by a long prompt.
        for tree in sorted(self.trees.values(), key=lambda tree: tree.wanted - tree.computed):
            tokens = self._piece(tree, budget)
            if tokens:
                budget -= len(tokens)
                pieces.append((tree, tokens))
        for tree, chains in self._choice.fork(self.trees.values()):
            # Without a token yet: an outcome that comes too early for its chain was foreseen all the same.
            self._publish(tree, chains)
        growing = self._choice.growing(self.trees.values())
        if not pieces and not growing:
            return False
        self._lane.enter(*_busy_with(pieces, growing))
        lines = [self._line_tip(tree, tokens) for tree, tokens in pieces]
        tips = [self._chain_tip(tree, chain) for tree, chains in growing for chain in chains]
        if self.smaller is not None:
            self.smaller.propose(list(self.trees.values()), lines + tips)
        failpoints.reach("draft.step")
        paths = [self._path_row(tree, tokens, tip) for (tree, tokens), tip in zip(pieces, lines, strict=True)]
        right = self._forward(paths, lines, growing, tips)
        if tips and not pieces:
            self._choice.took(len(tips), time.perf_counter() - began)
        deeper = right[len(lines) :]
        depths = 1 + sum(deeper or right) / len(deeper or right)
        self._board.tick(time.perf_counter() - began, depths, len(tips) + sum(deeper))
        self._lane.enter(State.OTHER)
        return True

    def _forward(
        self, paths: Sequence[Paths], lines: Sequence[Tip], growing: Sequence[Growing], tips: Sequence[Tip]
    ) -> list[int]:
        """One forward, and what it brings; returns how many guesses of a smaller draft were right at each tip."""
        began = time.perf_counter()
        found = iter([tip.found for tip in tips])
        helped = [(tree, [(chain, next(found)) for chain in own]) for tree, own in growing]
        chains = [Chains(tree, _branches(tree, own)) for tree, own in helped]
        guesses = self.level.forward(paths, chains)
        seconds = time.perf_counter() - began
        right = [
            self._extended(tree, row, tip.found, [next(guesses) for _ in range(row.outputs)])
            for (tree, row), tip in zip(paths, lines, strict=True)
        ]
        for tree, own in helped:
            right += self._deepened(tree, own, guesses)
        if self.smaller is not None:
            guessed = [len(tip.found) for tip in (*lines, *tips)]
            self.smaller.judge(rows_of(paths, chains), seconds, zip(guessed, right, strict=True))
        return right

    def _piece(self, tree: Tree, budget: int) -> list[int]:
        """The next path tokens to compute; none for a tree that had to be dropped for them."""
        tokens = self.level.ready(tree, tree.pending(budget))
        if not tokens or tree.computed + len(tokens) > self.level.max_position:
            return []
        try:
            tree.table.grow(tree.computed + len(tokens))
        except OutOfPages:
            self._drop(tree.request)
            return []
        if len(tokens) > 1:
            failpoints.reach("draft.prefill")
        return tokens

    def _path_row(self, tree: Tree, tokens: list[int], tip: Tip) -> Paths:
        """A row over the tokens and what a smaller draft thinks that follows them."""
        try:
            tree.table.grow(tree.computed + len(tokens) + len(tip.found))
        except OutOfPages:
            tip.found.clear()
        outputs = tree.outputs(len(tokens)) + len(tip.found)
        return Paths(tree, Row(tokens + tip.found, tree.computed, tree.table.pages, outputs))

    def _line_tip(self, tree: Tree, tokens: list[int]) -> Tip:
        """Where a smaller draft may go on with the line: past the token that this forward adds to it."""
        extends = tree.in_flight is None and tree.computed + len(tokens) == tree.base + len(tree.line)
        most = min(tree.lookahead - len(tree.line) - 1, self.level.max_position - tree.base - len(tree.line))
        return Tip(tree, [], max(0, most) if extends else 0)

    def _chain_tip(self, tree: Tree, chain: Chain) -> Tip:
        left = self.level.max_position - tree.base - chain.fork - len(chain.tokens)
        return Tip(tree, chain.tokens, max(0, min(tree.lookahead - chain.computed, left)), chain.fork, chain.cell)

    # -- what a step brought ----------------------------------------------------------------------------------------

    def _extended(self, tree: Tree, row: Row, help: Sequence[int], guesses: list[Guess]) -> int:
        """The path is longer by the tokens that were pending, and by what of a smaller draft's `help` was right."""
        own = row.outputs - len(help)
        grew = tree.extended(len(row.token_ids) - len(help), guesses[:own])
        stands = confirmed(guesses[own - 1 :], help)[1:] if help else []
        for guess in stands:
            grew = tree.extended(1, [guess]) or grew
        if grew:
            self._publish_line(tree)
        return len(stands)

    def _publish_line(self, tree: Tree) -> None:
        """Offer the line to a target that waits for it."""
        if tree.answers is not None and tree.line:
            line = [tree.guesses[index] for index in range(min(len(tree.line), tree.lookahead))]
            self._show_laws(tree, LINE, tree.answers, 0, line)
            self._post(tree, [LINE], [tree.answers], [tree.line[: tree.lookahead]])

    def _show_laws(self, tree: Tree, entry: int, key: Key, start: int, guesses: Sequence[Guess]) -> None:
        """What the tokens from the `start`-th of an entry on were drawn from."""
        if self._laws is not None and tree.ratio_rule:
            tokens = [guess.token for guess in guesses]
            laws = [guess.law for guess in guesses if guess.law is not None]
            self._laws.write(tree.slot, entry, key, start, tokens, laws)

    def _deepened(
        self, tree: Tree, growing: Sequence[tuple[Chain, Sequence[int]]], guesses: Iterator[Guess]
    ) -> list[int]:
        """Every chain is longer by a token, and by what of a smaller draft's help was right; what the target can use
        goes to the board. Returns how much of the help was right."""
        right, news = [], []
        for chain, help in growing:
            stands = confirmed([next(guesses) for _ in range(1 + len(help))], help)
            before = chain.computed
            chain.computed += len(stands)
            chain.guesses += stands
            chain.tokens += [guess.token for guess in stands]
            right.append(len(stands) - 1)
            if before < tree.lookahead:
                news.append(chain)
                key = tree.key(chain.fork, chain.tokens[0])
                self._show_laws(tree, chain.entry, key, before, chain.guesses[before : tree.lookahead])
        if news:
            self._publish(tree, news)
        return right

    def _publish(self, tree: Tree, chains: Sequence[Chain]) -> None:
        """What the target can use of them."""
        keys = [tree.key(chain.fork, chain.tokens[0]) for chain in chains]
        ids = [chain.tokens[1 : tree.lookahead + 1] for chain in chains]
        self._post(tree, [chain.entry for chain in chains], keys, ids)

    def _post(self, tree: Tree, entries: Sequence[int], keys: Sequence[Key], ids: Sequence[Sequence[int]]) -> None:
        """Show the target tokens, and before them what they were drawn from."""
        if self._laws is not None:
            self._laws.show()
        self._board.publish(tree.slot, entries, keys, ids)


def _busy_with(pieces: Sequence[tuple[Tree, list[int]]], growing: Sequence[Growing]) -> tuple[State, int]:
    """What a step with these pieces of paths and these chains is, and its tokens or the deepest depth it brings."""
    if any(len(tokens) > tree.lookahead + 1 for tree, tokens in pieces):
        return State.PREFILL, sum(len(tokens) for _, tokens in pieces)
    depths = [chain.computed + 1 for _, chains in growing for chain in chains]
    depths += [len(tree.line) + 1 for tree, _ in pieces if tree.in_flight is None]
    return State.DEPTH, max(depths, default=1)


def _branches(tree: Tree, growing: Sequence[tuple[Chain, Sequence[int]]]) -> Branches:
    branches = Branches(tree.table.pages, tree.base)
    for chain, help in growing:
        assert chain.cell is not None, "a chain without a place does not grow"
        branches.add(chain.fork, chain.cell, chain.computed, [chain.tokens[-1], *help])
    return branches
