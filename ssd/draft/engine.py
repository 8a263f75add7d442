"""The draft's step: compute paths, fork chains, run one forward, publish its tokens at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from ssd.config.engine import EngineConfig
from ssd.config.params import MAX_CHAINS
from ssd.draft.cascade import Cascade
from ssd.draft.chain_scheduler import ChainScheduler, Growing
from ssd.draft.depth_policy import DepthPolicy
from ssd.draft.drafter import Drafter, PathRow
from ssd.draft.eagle3 import HeadDrafter
from ssd.draft.grammar import DraftGrammar
from ssd.draft.rehearsal import Rehearsal
from ssd.draft.static_shapes import StaticDrafter, StaticHeadDrafter, TreeRunner
from ssd.draft.tree import Chain, Guess, Tree
from ssd.execution.batch import Row
from ssd.execution.core_team import CoreTeam
from ssd.execution.pages import OutOfPages, PageTable
from ssd.execution.runner import Runner
from ssd.grammar.background import BackgroundCompiler
from ssd.grammar.matcher import GrammarCompiler
from ssd.ipc.board import TRUNK, DraftBoard, Key, Place
from ssd.ipc.draft_probs import DraftProbsArena
from ssd.ipc.features import FeatureArena
from ssd.ipc.messages import Admit, Launched, Outcomes, Rehearse, Release, Retune, Verified
from ssd.ipc.trace_ring import NO_TRACE, State, TraceRing
from ssd.models.checkpoint import inspect, stop_token_ids
from ssd.speculation.noise import NoiseCache
from ssd.system import failpoints

log = logging.getLogger("ssd.draft")

# Path tokens that one step computes at most, so that a long prompt does not delay other sequences' chains.
_PREFILL_CHUNK = 128
# A forward with more tokens than this for each sequence and chain counts as a prefill.
_USUAL_ROWS = 4


class DraftEngine:
    """Owns the trees of all sequences and the drafters that grow them; publishes their tokens on the board.

    The draft's process passes it the target's messages (`handle`) and calls `step` until there is nothing to do. It
    must never wait for the target. Its state can always be built again from the committed tokens."""

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
        """Take `runners`, smallest first; the last one decides what is published.

        `vocab_size`: the target's. `draft_probs`: given if a rule may need them. `features`: given if the draft is an
        EAGLE-3 head. `team`: given if both models share cores."""
        self._board, self._draft_probs, self._epoch, self._trace, self._team = board, draft_probs, epoch, trace, team
        noise = NoiseCache(vocab_size, runners[-1].model.device)
        smaller = [_drafter(config, runner, noise, vocab_size) for runner in runners[:-1]]
        self.drafter = _drafter(config, runners[-1], noise, vocab_size, features)
        self.cascade = Cascade([*smaller, self.drafter])
        self.trees: dict[int, Tree] = {}
        self._depths = DepthPolicy()
        self._rehearsal: Rehearsal | None = None
        self._grammars = BackgroundCompiler(lambda: _compiler(config))
        self._unposted: dict[int, dict[int, Chain]] = {}  # by request and entry, chains to publish
        self._scheduler = ChainScheduler(
            self.drafter.chain_cache,
            self.drafter.max_position,
            self.cascade.forget_chains,
            self.most_chains,
        )

    def prepare(self) -> None:
        """Load the tokenizer for grammars; call it before there are requests."""
        self._grammars.prepare()

    # -- messages ---------------------------------------------------------------------------------------------------

    def handle(self, message: Admit | Outcomes | Launched | Retune | Release | Rehearse) -> None:
        """Apply a message; drop each sequence whose tree it contradicts.

        The target continues such a sequence without a draft."""
        if self._rehearsal is not None:
            self._rehearsal.close()
            self._rehearsal = None
        if isinstance(message, Admit):
            self._drop(message.request)
            self._board.clear(message.slot)
            table = PageTable(self.drafter.pool, message.cache_salt)
            new = self.tree_type(message, self._epoch, table, self.drafter.recurrent)
            self.trees[message.request] = new
            new.jointly = self._scheduler.jointly(new)
            if message.structured is not None:
                new.grammar = DraftGrammar(self._grammars.compile(message.structured), message.prompt_length)
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
            self._rehearsal = Rehearsal(self.drafter, message.rows) if message.rows and not self.trees else None
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
        nodes = tree.nodes
        if tree.either:
            self._scheduler.compare(tree, row.accepted, row.token)
        try:
            winner = tree.outcome(row)
            if winner is not None:
                self.cascade.promote(tree, winner)
        except (ValueError, OutOfPages) as error:
            log.warning("request %d goes on without a draft: %s", tree.request, error)
            self._drop(tree.request)
            return
        self._scheduler.note_bonus(prepared, row.token)
        self._scheduler.note_outcome(nodes, row.accepted, row.token)
        tree.jointly = self._scheduler.jointly(tree)
        self._forget_chains(tree)
        if not tree.recurrent:
            tree.table.share_computed(tree.tokens, min(tree.computed, tree.base))
        # A chain for this outcome may be on the board: the target would find it before the trunk that answers its miss.
        self._board.clear(tree.slot)
        self._publish_trunk(tree)

    def _forget_chains(self, tree: Tree) -> None:
        self._unposted.pop(tree.request, None)
        self._give_back(tree.chains)
        tree.chains = []

    def _give_back(self, chains: Sequence[Chain]) -> None:
        """Free the cells of chains that are no longer needed."""
        cells = [chain.cell for chain in chains if chain.cell is not None]
        self.drafter.chain_cache.give_back(cells)
        self.cascade.forget_chains(cells)

    def _drop(self, request: int) -> None:
        tree = self.trees.pop(request, None)
        if tree is not None:
            tree.table.free()
            self._forget_chains(tree)
            self.cascade.release(request)

    # -- work -------------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Run one or more forwards for all trees; return False if there is nothing to do before the next message."""
        began = time.perf_counter()
        if self._rehearsal is not None:
            rows = self._rehearsal.step()
            self._board.tick(time.perf_counter() - began, 1.0, rows)
            return rows > 0
        paths = self._prefill()
        growing = self._fork()
        if not paths and not growing:
            self._post()
            return False
        self._use_cores(all(tree.speculation.mode == "sd" for tree in self.trees.values()))
        self._trace.enter(*_busy_with(paths, growing))
        failpoints.reach("draft.step")
        depths = self._depths.depths(self.trees.values(), began) if self.drafter.goes_on else 1
        found, depths = self.cascade.forward(self.trees.values(), paths, growing, self._post, depths)
        self._publish(paths, growing, found)
        self._note_step(time.perf_counter() - began, depths, paths, found)
        self._trace.enter(State.OTHER)
        return True

    def _use_cores(self, in_turn: bool) -> None:
        """Compute on all cores if the models work in turn, else on the draft's own."""
        if self._team is not None:
            self._team.use(all_cores=in_turn)

    def _prefill(self) -> list[PathRow]:
        """Return rows over each sequence's next path tokens without keys and values.

        The sequence with the fewest comes first, so that a long prompt does not delay a sequence whose target waits. A
        sequence is dropped if there are no pages for its tokens."""
        rows, budget = list[PathRow](), _PREFILL_CHUNK
        for tree in sorted(self.trees.values(), key=lambda tree: tree.wanted - tree.computed):
            tokens = self.drafter.ready(tree, tree.pending(budget))
            stop = tree.computed + len(tokens)
            if not tokens or stop > self.drafter.max_position:
                continue
            try:
                tree.table.grow(stop)
            except OutOfPages:
                self._drop(tree.request)
                continue
            if len(tokens) > 1:
                failpoints.reach("draft.prefill")
            budget -= len(tokens)
            rows.append(PathRow(tree, Row(tokens, tree.computed, tree.table.pages, tree.outputs(len(tokens)))))
        return rows

    def _fork(self) -> list[Growing]:
        """Start chains for the outcomes that have become predictable; return all chains that this step grows."""
        for tree, chains in self._scheduler.fork(self.trees.values()):
            # Posted without tokens: an outcome counts as a hit even if it comes before its chain's first token.
            self._post_chains(tree, chains)
        return self._scheduler.growing(self.trees.values())

    def _publish(self, paths: Sequence[PathRow], growing: Sequence[Growing], found: Sequence[list[Guess]]) -> None:
        """Extend paths and chains by the guesses of a forward, and publish the tokens that the target can use."""
        rest = iter(found)
        for (tree, row), guesses in zip(paths, rest, strict=False):
            grew = tree.extended(len(row.token_ids), guesses[: row.outputs])
            for before, guess in pairwise(guesses[row.outputs - 1 :]):
                if tree.trunk[-1] != before.token:  # corrected: the smaller draft's later guesses are void
                    break
                grew = tree.extended(1, [guess]) or grew
            if grew:
                self._publish_trunk(tree)
        for tree, chains in growing:
            self._extend_chains(tree, chains, [next(rest) for _ in chains])

    def _extend_chains(self, tree: Tree, chains: Sequence[Chain], found: Sequence[list[Guess]]) -> None:
        news = []
        for chain, drafted in zip(chains, found, strict=True):
            before, guesses = chain.computed, tree.corrected_chain(chain, drafted)
            chain.computed += len(guesses)
            chain.guesses += guesses
            chain.tokens += [guess.token for guess in guesses]
            if before < tree.lookahead:
                news.append(chain)
                if tree.rule.needs_draft_probs:
                    key = tree.key(chain.fork, chain.tokens[0])
                    self._write_probs(tree, chain.entry, key, before, chain.guesses[before : tree.lookahead])
        if news:
            self._post_chains(tree, news)

    def _note_step(self, seconds: float, depths: int, paths: Sequence[PathRow], found: Sequence[list[Guess]]) -> None:
        """Learn the time of a step; report it on the board with the mean tokens added to chains, else to paths."""
        chains = found[len(paths) :]
        if chains and not paths:
            self._scheduler.note_step(len(chains), seconds / depths)
        extra = [len(guesses) - 1 for guesses in chains]
        extra = extra or [len(guesses) - path.row.outputs for path, guesses in zip(paths, found, strict=True)]
        rows = sum(len(path.row.token_ids) for path in paths) + sum(map(len, chains))
        if rows > _USUAL_ROWS * len(found) * depths:
            self._board.tick()  # a prefill: its time does not count as a tree step's
        else:
            self._depths.note_step(seconds, depths)
            self._board.tick(seconds, 1 + sum(extra) / len(extra), rows)

    # -- the board --------------------------------------------------------------------------------------------------

    def _publish_trunk(self, tree: Tree) -> None:
        """Publish the trunk if the target waits for it."""
        if tree.answers is not None and tree.trunk:
            trunk = [tree.guesses[index] for index in range(min(len(tree.trunk), tree.lookahead))]
            self._write_probs(tree, TRUNK, tree.answers, 0, trunk)
            self._show_probs()
            self._board.publish(tree.slot, [TRUNK], [tree.answers], [tree.trunk[: tree.lookahead]])

    def _post_chains(self, tree: Tree, chains: Sequence[Chain]) -> None:
        """Publish the tokens of chains at once, or if the runner overlaps, while it computes the next ones."""
        self._unposted.setdefault(tree.request, {}).update((chain.entry, chain) for chain in chains)
        if not self.drafter.runner.overlaps:
            self._post()

    def _post(self) -> None:
        """Publish all tokens that are not published yet."""
        if self._unposted:
            self._show_probs()
        for request, own in self._unposted.items():
            tree, chains = self.trees[request], list(own.values())
            keys = [tree.key(chain.fork, chain.tokens[0]) for chain in chains]
            ids = [chain.tokens[1 : tree.lookahead + 1] for chain in chains]
            places = [Place(chain.rank, chain.fan_out) for chain in chains]
            self._board.publish(tree.slot, list(own), keys, ids, places)
        self._unposted.clear()
        self._board.flush()

    def _write_probs(self, tree: Tree, entry: int, key: Key, start: int, guesses: Sequence[Guess]) -> None:
        """Write the draft probabilities of an entry's tokens from the `start`-th on, if the rule needs them."""
        if self._draft_probs is not None and tree.rule.needs_draft_probs:
            tokens = [guess.token for guess in guesses]
            probs = [guess.draft_probs for guess in guesses if guess.draft_probs is not None]
            self._draft_probs.write(tree.slot, entry, key, start, tokens, probs)

    def _show_probs(self) -> None:
        """Make written draft probabilities visible; call this before their tokens are published."""
        if self._draft_probs is not None:
            self._draft_probs.show()


@lru_cache(1)  # a new engine after a lost target needs the same
def _compiler(config: EngineConfig) -> GrammarCompiler:
    """Return the compiler of grammars over the target's vocabulary."""
    checkpoint = inspect(Path(config.target), weights=False)
    return GrammarCompiler(checkpoint.directory, config.vocab_size, stop_token_ids(checkpoint))


def _drafter(
    config: EngineConfig, runner: Runner, noise: NoiseCache, vocab_size: int, features: FeatureArena | None = None
) -> Drafter:
    known = noise, vocab_size
    if isinstance(runner, TreeRunner):
        if features is not None:
            return StaticHeadDrafter(config, runner, *known, features=features)
        return StaticDrafter(config, runner, *known)
    if features is not None:
        return HeadDrafter(config, runner, *known, features)
    return Drafter(config, runner, *known)


def _busy_with(paths: Sequence[PathRow], growing: Sequence[Growing]) -> tuple[State, int]:
    """Return the trace state of a step: a prefill and its tokens, or the deepest depth that it computes."""
    if any(len(row.token_ids) > tree.lookahead + 1 for tree, row in paths):
        return State.PREFILL, sum(len(row.token_ids) for _, row in paths)
    depths = [chain.computed + 1 for _, chains in growing for chain in chains]
    depths += [len(tree.trunk) + 1 for tree, _ in paths if tree.in_flight is None]
    return State.DEPTH, max(depths, default=1)
