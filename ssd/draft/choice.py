"""Which outcomes get a chain, and which chains the next step grows (`ssd.speculation.eviction`)."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from ssd.draft.arena import Arena
from ssd.draft.tree import Chain, Tree
from ssd.params import MAX_CHAINS
from ssd.speculation.eviction import gain, outcome_probability, worth_growing
from ssd.speculation.learner import Learner, LineFit


class Growing(NamedTuple):
    """Chains of one sequence that become longer."""

    tree: Tree
    chains: list[Chain]


class Choice:
    """Shares `arena` and the time of steps out among the chains of all sequences; `forget` hears of places that change
    hands."""

    def __init__(self, arena: Arena, max_position: int, forget: Callable[[Sequence[int]], None]) -> None:
        self._arena, self._max_position, self._forget = arena, max_position, forget
        self._learner, self._step = Learner(), LineFit(slope=0.0)

    def took(self, chains: int, seconds: float) -> None:
        """A step of so many chains, and nothing else, took so long."""
        self._step.note(chains, seconds)

    def looked_up(self, prepared: Sequence[int], token: int) -> None:
        """`token` followed where these were prepared, best first."""
        if prepared:
            self._learner.looked_up(len(prepared), 1 + prepared.index(token) if token in prepared else None)

    def growing(self, trees: Collection[Tree]) -> list[Growing]:
        """The chains that the next step makes longer: of those that want it the ones that are worth its time."""
        wanting = [(gain, tree.request, chain.entry) for gain, tree, chain in self._placed(trees) if gain > 0]
        wanting.sort(reverse=True)
        count = worth_growing([gain for gain, _, _ in wanting], self._step.line())
        chosen = {(request, entry) for _, request, entry in wanting[:count]}
        found = [Growing(tree, [c for c in tree.chains if (tree.request, c.entry) in chosen]) for tree in trees]
        return [growing for growing in found if growing.chains]

    def fork(self, trees: Collection[Tree]) -> list[Growing]:
        """A chain for every outcome that has become predictable, the likeliest ones first; returns those that are
        new."""
        misses, found = self._learner.misses(), list[tuple[Tree, Chain]]()
        new: dict[int, Growing] = {}
        for tree in trees:
            ranks = Counter[int]()
            for fork, token in tree.new_forks():
                ranks[fork] += 1
                chance = outcome_probability(fork, tree.verified, ranks[fork], tree.acceptance.value, misses)
                found.append((tree, Chain(fork, [token], None, tree.entries, chance)))
                tree.entries += 1
        found.sort(key=lambda new: new[1].probability, reverse=True)
        cells = self._cells(trees)
        for tree, chain in found:
            if chain.entry < MAX_CHAINS:
                chain.cell = cells(chain.probability)
                if chain.cell is not None:
                    insort(tree.chains, chain, key=lambda one: one.entry)
                    new.setdefault(tree.request, Growing(tree, [])).chains.append(chain)
        return list(new.values())

    def _cells(self, trees: Collection[Tree]) -> Callable[[float], int | None]:
        """Gives cells to chains that come with the probability of their outcome, likeliest first: free ones, then those
        of less likely chains, which stay as long as they are, their tokens on the board."""
        losers: list[Chain] | None = None

        def cell(probability: float) -> int | None:
            nonlocal losers
            free = self._arena.take()
            if free is not None:
                return free
            if losers is None:
                placed = [chain for _, _, chain in self._placed(trees)]
                losers = sorted(placed, key=lambda chain: chain.probability, reverse=True)
            if not losers or losers[-1].probability >= probability:
                return None
            taken, losers[-1].cell = losers[-1].cell, None
            losers.pop()
            assert taken is not None
            self._forget([taken])
            return taken

        return cell

    def _placed(self, trees: Collection[Tree]) -> list[tuple[float, Tree, Chain]]:
        """The chains that have a cell, and what another token of each is worth."""
        return [
            (self._gain(tree, chain), tree, chain) for tree in trees for chain in tree.chains if chain.cell is not None
        ]

    def _gain(self, tree: Tree, chain: Chain) -> float:
        """0 for a chain that wants no more. It wants one token beyond the lookahead: then the winner's bonus candidates
        are known when it wins."""
        if chain.computed > tree.lookahead or tree.base + chain.fork + chain.computed >= self._max_position:
            return 0.0
        return gain(chain.probability, chain.computed, tree.acceptance.value)
