"""The draft's engine for a target on another machine, which is some rounds ahead (docs/remote.md).

All of the trunk counts as in flight: outcomes are prepared for each place at which a later verification may reject."""

from __future__ import annotations

from collections.abc import Sequence

from ssd.draft.chain_scheduler import Growing
from ssd.draft.drafter import PathRow
from ssd.draft.engine import DraftEngine
from ssd.draft.tree import Chain, Chains, Guess, Tree
from ssd.execution.pages import OutOfPages
from ssd.ipc.messages import Launch, Launched, Verified
from ssd.plugins.remote.link import ABSORBED, MOST_CHAINS, MOST_EXPECTED, LinkBoard, Trunk
from ssd.speculation.acceptance import common_prefix_length


class LinkedChains(Chains):
    def advance(self, count: int, passed: float) -> list[Chain]:
        """Begin the trunk `count` tokens later, of probability `passed`; return the chains before."""
        over = [chain for chain in self if chain.fork < count]
        self._chains = [chain for chain in self if chain.fork >= count]
        self.waiting = [chain for chain in self.waiting if chain.fork >= count]
        for entry, chain in enumerate(self):
            chain.entry = entry
        for chain in (*self, *self.waiting):
            chain.fork -= count
            chain.probability = min(1.0, chain.probability / passed)
        self.entries, self._forks = len(self._chains), max(0, self._forks - count)
        self.nodes = {node - count: known for node, known in self.nodes.items() if node >= count}
        self.reached = min(1.0, self.reached / passed)
        return over


class LinkedTree(Tree):
    """A tree whose trunk becomes as long as the last launch asked for (`Launch.in_flight`)."""

    chains_type = LinkedChains
    chains: LinkedChains
    _reach = 0

    @property
    def speculated(self) -> Trunk:
        return Trunk(self.request, self.round, self.base, self.trunk[:MOST_EXPECTED])

    def expects(self, row: Verified) -> bool:
        known = self.in_flight or 0
        return row.round == self.round and row.accepted < known and self.trunk[row.accepted] == row.token

    def advance(self, row: Verified) -> list[Chain]:
        """Commit an expected outcome and return the chains that fork before it. A `Launched` follows."""
        count = row.accepted + 1
        self.acceptance.note_outcome(count, count)
        self.answers = self.key(row.accepted, row.token)
        self.tokens += self.trunk[:count]
        self.trunk = self.trunk[count:]
        self.guesses = {node - count: guess for node, guess in self.guesses.items() if node >= count}
        self.round, self.in_flight = self.round + 1, None
        return self.chains.advance(count, self.acceptance.value**count)

    def _launched_trunk(self, row: Launch) -> list[int]:
        self._reach = row.in_flight
        if common_prefix_length(self.trunk, row.tokens) == len(row.tokens):
            return [*row.tokens, *self.trunk[len(row.tokens) : row.in_flight]]
        return list(row.tokens)

    def absorbable(self) -> Chain | None:
        """Return the chain that continues the trunk, if it should become part of the trunk."""
        end = self.in_flight
        if end is None or end >= self._reach or end + self.lookahead > MOST_EXPECTED - 2:
            return None
        if end not in self.guesses or self.computed < self.base + end:
            return None
        chain = self.chains.of(end, self.guesses[end].token)
        return chain if chain is not None and chain.cell is not None and chain.computed >= ABSORBED else None

    def absorb(self, chain: Chain) -> None:
        """Make a chain, whose keys and values are in the pages now, the end of the trunk."""
        end = len(self.trunk)
        self.trunk += chain.tokens[: chain.computed]
        self.guesses |= {end + 1 + place: guess for place, guess in enumerate(chain.guesses[: chain.computed])}
        self.in_flight = len(self.trunk)
        self.chains.cut(end, chain.tokens[0])


class LinkedDraftEngine(DraftEngine):
    """A draft's engine that sends the receiver each new trunk before the entries that fork from it."""

    tree_type = LinkedTree
    most_chains = MOST_CHAINS
    _board: LinkBoard
    trees: dict[int, LinkedTree]  # type: ignore[assignment]

    def _launched(self, message: Launched) -> None:
        super()._launched(message)
        for launch in message.rows:
            if launch.request in self.trees:
                self._board.expect(self.trees[launch.request].speculated)

    def _outcome(self, tree: Tree, row: Verified) -> None:
        assert isinstance(tree, LinkedTree)
        if not tree.expects(row):
            super()._outcome(tree, row)
        else:
            self._publisher.post()
            self._scheduler.note_outcome(tree, row.accepted, row.token)
            self._give_back(tree.advance(row))
        if tree.request in self.trees:
            self._board.expect(tree.speculated)

    def _publish(self, paths: Sequence[PathRow], growing: Sequence[Growing], found: Sequence[list[Guess]]) -> None:
        super()._publish(paths, growing, found)
        for tree, _ in growing:
            self._absorb(tree)

    def _absorb(self, tree: Tree) -> None:
        """Extend the trunk by the chain that continues it, if there are pages for it."""
        assert isinstance(tree, LinkedTree)
        chain = tree.absorbable()
        if chain is None:
            return
        try:
            self._promote(tree, chain)
        except OutOfPages:
            return
        tree.absorb(chain)
        self._give_back([chain])
        self._publisher.post()
        self._board.expect(tree.speculated)
