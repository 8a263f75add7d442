"""The draft's step: compute paths, fork chains, run forwards, publish their tokens at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from pkgutil import resolve_name

from ssd.config.engine import EngineConfig
from ssd.config.params import MAX_CHAINS
from ssd.draft.cascade import SmallerDraft, forward_with_guesses
from ssd.draft.chain_scheduler import ChainScheduler, Growing
from ssd.draft.depth_policy import DepthPolicy
from ssd.draft.drafter import Drafter, PathRow
from ssd.draft.forward import forward, path_rows
from ssd.draft.grammar import DraftGrammar
from ssd.draft.publisher import Publisher
from ssd.draft.rehearsal import Rehearsal
from ssd.draft.static_shapes import StaticDrafter, TreeRunner
from ssd.draft.tree import Chain, Guess, Tree
from ssd.execution.core_team import CoreTeam
from ssd.execution.pages import OutOfPages, PageTable
from ssd.execution.runner import Runner
from ssd.grammar.background import BackgroundCompiler
from ssd.grammar.matcher import GrammarCompiler
from ssd.ipc.board import DraftBoard
from ssd.ipc.draft_probs import DraftProbsArena
from ssd.ipc.features import FeatureArena
from ssd.ipc.messages import Admit, Launched, Outcomes, Rehearse, Release, Retune, Verified
from ssd.ipc.trace_ring import NO_TRACE, State, TraceRing
from ssd.models.checkpoint import inspect, stop_token_ids
from ssd.models.draft_kinds import kind_named
from ssd.speculation.noise import NoiseCache
from ssd.system import failpoints

log = logging.getLogger("ssd.draft")

# A forward with more tokens than this for each sequence and chain counts as a prefill.
_USUAL_ROWS = 4


class DraftEngine:
    """Owns the trees of all sequences and the drafters that grow them.

    The draft's process passes it messages (`handle`) and calls `step` until there is nothing to do. It never waits for
    the target. Its state can always be built again from the committed tokens."""

    tree_type: type[Tree] = Tree
    most_chains = MAX_CHAINS

    def __init__(
        self,
        config: EngineConfig,
        runners: Sequence[Runner],
        board: DraftBoard,
        epoch: int,
        vocab_size: int,
        draft_probs: DraftProbsArena | None = None,
        features: FeatureArena | None = None,
        trace: TraceRing = NO_TRACE,
        team: CoreTeam | None = None,
    ) -> None:
        """Take `runners`, smallest first; the last one decides what is published."""
        self._board, self._epoch, self._trace, self._team = board, epoch, trace, team
        noise = NoiseCache(vocab_size, runners[-1].model.device)
        self.drafter = _drafter(config, runners[-1], noise, vocab_size, features)
        self.smaller: list[SmallerDraft] = []  # of a cascade, smallest first
        for runner in runners[:-1]:
            below = self.smaller[-1] if self.smaller else None
            self.smaller.append(SmallerDraft(_drafter(config, runner, noise, vocab_size), below))
        self._publisher = Publisher(board, draft_probs, runners[-1])
        self.trees: dict[int, Tree] = {}
        self._depths = DepthPolicy(self.drafter.ends)
        self._rehearsal: Rehearsal | None = None
        self._grammars = BackgroundCompiler(lambda: _compiler(config))
        self._scheduler = ChainScheduler(
            self.drafter.chain_cache, self.drafter.max_position, self._forget_cells, self.most_chains
        )

    def prepare(self) -> None:
        """Load the tokenizer for grammars, before there are requests."""
        self._grammars.prepare()

    # -- messages ---------------------------------------------------------------------------------------------------

    def handle(self, message: Admit | Outcomes | Launched | Retune | Release | Rehearse) -> None:
        """Apply a message; drop sequences whose tree it contradicts: they go on without a draft."""
        if self._rehearsal is not None:
            self._rehearsal.close()
            self._rehearsal = None
        if isinstance(message, Admit):
            self._drop(message.request)
            self._board.clear(message.slot)
            table = PageTable(self.drafter.pool, message.cache_salt)
            new = self.trees[message.request] = self.tree_type(message, self._epoch, table, self.drafter.recurrent)
            new.shares_cores = self._team is not None
            if message.structured is not None:
                compiled = self._grammars.compile(message.structured, (message.owner, message.cache_salt))
                new.grammar = DraftGrammar(compiled, message.prompt_length)
        elif isinstance(message, Outcomes):
            self._depths.note_outcome(time.perf_counter())
            for row in message.rows:
                tree = self.trees.get(row.request)
                if tree is not None:
                    self._outcome(tree, row)
        elif isinstance(message, Launched):
            self._launched(message)
        elif isinstance(message, Retune):
            for request, speculation in message.rows:
                if request in self.trees:
                    self.trees[request].retune(speculation)
        elif isinstance(message, Rehearse):
            self._use_cores(message.in_turn)
            if message.rows and not self.trees:
                self._rehearsal = Rehearsal(self.drafter, message.rows, message.text)
        else:
            for request in message.requests:
                self._drop(request)

    def _launched(self, message: Launched) -> None:
        for launch in message.rows:
            if launch.request in self.trees:
                self._give_back(self.trees[launch.request].launched(launch))

    def _outcome(self, tree: Tree, row: Verified) -> None:
        self._trace.enter(State.PROMOTE, tree.request)
        prepared = [chain.tokens[0] for chain in tree.chains if chain.fork == row.accepted]
        try:
            winner = tree.outcome(row)
            if winner is not None:
                self._promote(tree, winner)
        except (ValueError, OutOfPages) as error:
            log.warning("request %d goes on without a draft: %s", tree.request, error)
            self._drop(tree.request)
            return
        self._scheduler.note_bonus(prepared, row.token)
        self._scheduler.note_outcome(tree, row.accepted, row.token)
        self._forget_chains(tree)
        if not tree.recurrent:
            tree.table.share_computed(tree.tokens, min(tree.computed, tree.base))
        # A chain for this outcome may be on the board: the target would find it before the trunk that answers its miss.
        self._board.clear(tree.slot)
        self._scheduler.end_trunk(tree)
        self._publisher.trunk(tree)

    def _promote(self, tree: Tree, winner: Chain) -> None:
        """Copy the winning chain's computed keys and values to the path. Raises OutOfPages."""
        if tree.recurrent or winner.cell is None or not winner.computed:
            return
        tree.table.grow(tree.computed + winner.computed)
        self.drafter.promote(tree.table, tree.computed, winner.cell, winner.computed, tree.slot)
        tree.computed += winner.computed
        for smaller in self.smaller:
            smaller.promote(tree, winner.cell, winner.tokens)

    def _forget_chains(self, tree: Tree) -> None:
        self._publisher.forget(tree)
        self._give_back(tree.chains.clear())

    def _give_back(self, chains: Sequence[Chain]) -> None:
        cells = [chain.cell for chain in chains if chain.cell is not None]
        self.drafter.chain_cache.give_back(cells)
        self._forget_cells(cells)

    def _forget_cells(self, cells: Sequence[int]) -> None:
        for smaller in self.smaller:
            smaller.forget_chains(cells)

    def _drop(self, request: int) -> None:
        tree = self.trees.pop(request, None)
        if tree is not None:
            tree.table.free()
            self._forget_chains(tree)
            for smaller in self.smaller:
                smaller.release(request)

    # -- work -------------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Run forwards for all trees; return False if nothing is to do before the next message."""
        began = time.perf_counter()
        if self._rehearsal is not None:
            rows = self._rehearsal.step()
            self._board.tick(time.perf_counter() - began, self._rehearsal.depths, rows)
            return rows > 0
        paths = path_rows(self.trees.values(), self.drafter, self._drop)
        growing = self._fork(self.drafter.most_tokens - sum(len(row.token_ids) for _, row in paths))
        if not paths and not growing:
            self._publisher.post()
            return False
        self._use_cores(all(tree.speculation.mode == "sd" for tree in self.trees.values()))
        self._trace.enter(*_busy_with(paths, growing))
        failpoints.reach("draft.step")
        if self.smaller:
            trees, post, depths = self.trees.values(), self._publisher.post, 1
            found = forward_with_guesses(self.drafter, self.smaller[-1], trees, paths, growing, post)
        else:
            depths = self.drafter.block or 1
            if self.drafter.goes_on:
                depths = self._depths.depths(self.trees.values(), began)
            found, depths = forward(self.drafter, paths, growing, self._publisher.post, depths)
        self._publish(paths, growing, found)
        self._note_step(time.perf_counter() - began, depths, paths, found)
        self._trace.enter(State.OTHER)
        return True

    def _use_cores(self, in_turn: bool) -> None:
        if self._team is not None:
            self._team.use(all_cores=in_turn)

    def _fork(self, most: int) -> list[Growing]:
        growing, started = self._scheduler.growing(self.trees.values(), most)
        for tree, chains in started:
            # Posted without tokens: the target learns which outcomes were prepared, even those that come too late.
            self._publisher.chains(tree, chains)
        return growing

    def _publish(self, paths: Sequence[PathRow], growing: Sequence[Growing], found: Sequence[list[Guess]]) -> None:
        """Extend paths and chains by the guesses of a forward, and publish usable tokens."""
        rest = iter(found)
        for (tree, row), guesses in zip(paths, rest, strict=False):
            grew = tree.extended(len(row.token_ids), guesses[: row.outputs])
            self._scheduler.end_trunk(tree)
            for before, guess in pairwise(guesses[row.outputs - 1 :]):
                # Corrected: the smaller draft's later guesses are void.
                if tree.ended or tree.trunk[-1] != before.token:
                    break
                grew = tree.extended(1, [guess]) or grew
                self._scheduler.end_trunk(tree)
            if grew or tree.ended:
                self._publisher.trunk(tree)
        for tree, chains in growing:
            self._extend_chains(tree, chains, [next(rest) for _ in chains])

    def _extend_chains(self, tree: Tree, chains: Sequence[Chain], found: Sequence[list[Guess]]) -> None:
        news = []
        for chain, drafted in zip(chains, found, strict=True):
            before, guesses = chain.computed, _corrected(tree, chain, drafted)
            chain.computed += len(guesses)
            chain.guesses += guesses
            chain.tokens += [guess.token for guess in guesses]
            if before < tree.lookahead:
                news.append(chain)
                self._publisher.chain(tree, chain, before)
        if news:
            self._publisher.chains(tree, news)

    def _note_step(self, seconds: float, depths: int, paths: Sequence[PathRow], found: Sequence[list[Guess]]) -> None:
        """Learn a step's time; report it with the mean tokens added to chains, else to paths."""
        chains = found[len(paths) :]
        if chains and not paths:
            self._scheduler.note_step(len(chains), seconds / depths)
        extra = [len(guesses) - 1 for guesses in chains]
        extra = extra or [len(guesses) - path.row.outputs for path, guesses in zip(paths, found, strict=True)]
        first = sum(len(path.row.token_ids) for path in paths)
        rows = first + sum(map(len, chains)) + (0 if chains else sum(extra))
        if first > _USUAL_ROWS * len(found):
            self._board.tick()  # a prefill: its time does not count as a tree step's
        else:
            self._depths.note_step(seconds, depths)
            self._board.tick(seconds, 1 + sum(extra) / len(extra), rows)


@lru_cache(1)  # a new engine after a lost target needs the same
def _compiler(config: EngineConfig) -> GrammarCompiler:
    checkpoint = inspect(Path(config.target), weights=False)
    return GrammarCompiler(checkpoint.directory, config.vocab_size, stop_token_ids(checkpoint))


def _drafter(
    config: EngineConfig, runner: Runner, noise: NoiseCache, vocab_size: int, features: FeatureArena | None = None
) -> Drafter:
    if config.features is not None and features is not None:
        kind = resolve_name(kind_named(config.features.kind).drafter)
        found: Drafter = kind(config, runner, noise, vocab_size, features)
        return found
    if isinstance(runner, TreeRunner):
        return StaticDrafter(config, runner, noise, vocab_size)
    return Drafter(config, runner, noise, vocab_size)


def _corrected(tree: Tree, chain: Chain, guesses: Sequence[Guess]) -> list[Guess]:
    found, text = list[Guess](), [*tree.trunk[: chain.fork], *chain.tokens]
    for guess in guesses:
        found.append(tree.corrected(guess, text))
        if found[-1].token != guess.token:
            break
        text.append(guess.token)
    return found


def _busy_with(paths: Sequence[PathRow], growing: Sequence[Growing]) -> tuple[State, int]:
    if any(len(row.token_ids) > tree.lookahead + 1 for tree, row in paths):
        return State.PREFILL, sum(len(row.token_ids) for _, row in paths)
    depths = [chain.computed + 1 for _, chains in growing for chain in chains]
    depths += [len(tree.trunk) + 1 for tree, _ in paths if tree.in_flight is None]
    return State.DEPTH, max(depths, default=1)
