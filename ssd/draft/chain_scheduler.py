"""Chooses the outcomes that get a chain, and the chains that the next step grows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from heapq import nlargest
from operator import itemgetter
from typing import NamedTuple

from ssd.config.params import MAX_CHAINS
from ssd.draft.chain_cache import ChainCache
from ssd.draft.chances import Chances, Node
from ssd.draft.tree import Chain, Tree, copied_after
from ssd.speculation import fan_out as outcomes
from ssd.speculation.theory import LinearCost
from ssd.tuning.estimates import Learner, LinearFit

_NEXT = -1  # the entry of a chain that waits
# Least probability of a listed outcome: one that never gets a chain would never be seen to be right.
_LEAST = 1e-6


class Growing(NamedTuple):
    tree: Tree
    chains: list[Chain]


class ChainScheduler:
    """Shares cells of `chain_cache` and the time of steps among the chains of all sequences.

    Probabilities of outcomes follow Theorem 12 with fan-outs, `ssd.draft.chances` in a joint allocation. `forget` is
    called with cells that chains lose. A sequence has at most `most` chains."""

    def __init__(
        self,
        chain_cache: ChainCache,
        max_position: int,
        forget: Callable[[Sequence[int]], None],
        most: int = MAX_CHAINS,
    ) -> None:
        self._chain_cache, self._max_position, self._forget, self._most = chain_cache, max_position, forget, most
        self._learner, self._chances, self._step = Learner(), Chances(), LinearFit(slope=0.0)

    def note_step(self, chains: int, seconds: float) -> None:
        """Learn that a step that only grew `chains` chains took `seconds`."""
        self._step.note(chains, seconds)

    def note_bonus(self, prepared: Sequence[int], token: int) -> None:
        """Learn the bonus `token`, when the tokens `prepared`, best first, had chains."""
        if prepared:
            self._learner.looked_up(len(prepared), 1 + prepared.index(token) if token in prepared else None)

    def note_outcome(self, tree: Tree, accepted: int, token: int) -> None:
        """Learn that `accepted` tokens of the trunk were right and `token` followed."""
        tree.rates = self._chances.rates(tree.law.temperature, tree.rule.shares_noise)
        for fork, node in tree.chains.nodes.items():
            if fork == accepted:
                self._chances.learn(node, token)
            elif fork < accepted and node.in_flight is not None:
                self._chances.learn(node, node.in_flight)

    def end_trunk(self, tree: Tree) -> None:
        """End a trunk that the target waits for once it is less likely than `Verified.least`."""
        if tree.least and tree.answers is not None:
            for node in range(len(tree.chains.nodes), len(tree.trunk)):
                _, tree.reached = self._chances.outcomes(_note_node(tree, node), tree.reached, tree.acceptance.value)
            tree.ended = tree.reached < tree.least

    def growing(self, trees: Collection[Tree], most: int) -> tuple[list[Growing], list[Growing]]:
        """Choose at most `most` chains worth growing in the next step; return them, and the new ones.

        A new outcome gets a cell and a board entry when it pays, and is given up if there is no room for it."""
        wanting = [(self._gain(tree, chain), tree, chain) for tree in trees for chain in self._wanting(tree)]
        wanting = [wants for wants in wanting if wants[0] > 0]
        wanting.sort(key=itemgetter(0), reverse=True)
        count = worth_growing([gain for gain, _, _ in wanting[:most]], self._step.cost())
        chosen = [(tree, chain) for _, tree, chain in wanting[:count]]
        started = self._started(trees, [(tree, chain) for tree, chain in chosen if chain.entry == _NEXT])
        placed = {id(chain) for _, chain in chosen if chain.cell is not None}
        if chosen and not placed:
            return self.growing(trees, most)  # there was room for none of them
        found = [Growing(tree, [chain for chain in tree.chains if id(chain) in placed]) for tree in trees]
        return [growing for growing in found if growing.chains], started

    def _wanting(self, tree: Tree) -> list[Chain]:
        if tree.joint:
            self._allocate(tree)
        else:
            tree.chains.waiting += self._listed(tree)
        return [*(chain for chain in tree.chains if chain.cell is not None), *tree.chains.waiting]

    def _started(self, trees: Collection[Tree], chosen: Sequence[tuple[Tree, Chain]]) -> list[Growing]:
        """Give new chains cells and board entries while there are some, the likeliest first."""
        new, ranks = dict[int, Growing](), dict[int, Counter[int]]()
        cells, begun = self._cells(trees), {id(chain) for _, chain in chosen}
        for tree, chain in sorted(chosen, key=lambda one: one[1].probability, reverse=True):
            if tree.request not in ranks:
                ranks[tree.request] = Counter(other.fork for other in tree.chains)
                tree.chains.waiting = [other for other in tree.chains.waiting if id(other) not in begun]
            if tree.chains.entries < self._most and (cell := cells(chain.probability)) is not None:
                ranks[tree.request][chain.fork] += 1
                chain.cell, chain.rank = cell, ranks[tree.request][chain.fork]
                tree.chains.add(chain)
                new.setdefault(tree.request, Growing(tree, [])).chains.append(chain)
        for tree, _ in new.values():
            for chain in tree.chains:
                chain.fan_out = ranks[tree.request][chain.fork]
        return list(new.values())

    def _listed(self, tree: Tree) -> list[Chain]:
        """Return chains for the F_k likeliest new outcomes of each k, none likelier than one before."""
        listed = listed_outcomes(tree)
        if not listed:
            return []
        ranks, found, misses = Counter[int](), list[Chain](), self._learner.misses()
        for fork, token in listed:
            ranks[fork] += 1
            chance = outcome_probability(fork, tree.verified, ranks[fork], tree.acceptance.value, misses)
            found.append(Chain(fork, [token], None, _NEXT, chance))
        least = dict.fromkeys(ranks, _LEAST)
        for chain in reversed(found):
            chain.probability = least[chain.fork] = max(chain.probability, least[chain.fork])
        return found

    def _allocate(self, tree: Tree) -> None:
        """Let chains wait for the new outcomes among the `budget` likeliest of the whole trunk.

        Older chains not among these lose their cells, unless they have draft probabilities: the arena has room for
        `budget` entries alone."""
        new = []
        for fork in _new_forks(tree):
            node, reached = _note_node(tree, fork), tree.chains.reached
            likely, tree.chains.reached = self._chances.outcomes(node, reached, tree.acceptance.value)
            new += [Chain(fork, [token], None, _NEXT, chance) for token, chance in likely.items()]
        if not new:
            return
        own = list(tree.chains)
        staying = len(own) if tree.rule.needs_draft_probs else 0
        placed = [] if staying else [chain for chain in own if chain.cell is not None]
        rivals = [*placed, *tree.chains.waiting, *new]
        kept = nlargest(max(0, tree.speculation.budget - staying), rivals, key=lambda chain: chain.probability)
        chosen = {id(chain) for chain in kept}
        lost = [chain for chain in placed if id(chain) not in chosen]
        cells = [chain.cell for chain in lost if chain.cell is not None]
        self._chain_cache.give_back(cells)
        self._forget(cells)
        for chain in lost:
            chain.cell = None
        tree.chains.waiting = [chain for chain in kept if chain.entry == _NEXT]

    def _cells(self, trees: Collection[Tree]) -> Callable[[float], int | None]:
        """Return a function that takes a free cell, or that of a less likely chain, which stops growing.

        Call it with falling probabilities."""
        losers: list[Chain] | None = None

        def cell(probability: float) -> int | None:
            nonlocal losers
            free = self._chain_cache.take()
            if free is not None:
                return free
            if losers is None:
                placed = [chain for tree in trees for chain in tree.chains if chain.cell is not None]
                losers = sorted(placed, key=lambda chain: chain.probability, reverse=True)
            if not losers or losers[-1].probability >= probability:
                return None
            taken, losers[-1].cell = losers[-1].cell, None
            losers.pop()
            assert taken is not None
            self._forget([taken])
            return taken

        return cell

    def _gain(self, tree: Tree, chain: Chain) -> float:
        # K + 1 tokens are grown: if the chain wins, the candidates after all of its tokens are known.
        if chain.computed > tree.lookahead or tree.base + chain.fork + chain.computed >= self._max_position:
            return 0.0
        return gain(chain.probability, chain.computed, tree.acceptance.value)


def listed_outcomes(tree: Tree) -> list[tuple[int, int]]:
    """Return (fork, token) of each outcome to prepare by fan-outs, at nodes newly predictable."""
    found: list[tuple[int, int]] = []
    for fork in _new_forks(tree):
        guess, fan_out = tree.guesses[fork], tree.speculation.fan_out
        found += outcomes.forks(fork, tree.trunk[: tree.in_flight], guess.candidates, fan_out)
    return found


def _new_forks(tree: Tree) -> Iterator[int]:
    if tree.in_flight is None or tree.speculation.mode != "ssd":
        return iter(())
    # A winner that lost its cell has its guesses, but its keys and values are not computed again yet.
    return tree.chains.new_forks(min(tree.in_flight, tree.computed - tree.base), tree.guesses)


def _note_node(tree: Tree, fork: int) -> Node:
    guess, in_flight = tree.guesses[fork], tree.trunk[fork] if fork < tree.verified else None
    copied = copied_after(tree, tree.trunk[:fork])
    node = Node(guess.candidates, guess.scores, in_flight, copied, tree.law.temperature, tree.rule.shares_noise)
    tree.chains.nodes[fork] = node
    return node


def outcome_probability(
    accepted: int, in_flight: int, rank: int, acceptance: float, misses: tuple[float, float]
) -> float:
    """Return the probability of `accepted` right tokens of `in_flight`, then the `rank`-th candidate.

    Ranks begin at 1. Tokens are accepted independently with probability `acceptance` (arXiv 2603.03251, Section 4). The
    first F candidates miss the bonus token with probability c F^-r, `misses` = (c, r)."""
    c, r = misses
    reached = acceptance**accepted * (1 - acceptance if accepted < in_flight else 1.0)
    missed_before = 1.0 if rank == 1 else min(1.0, c * (rank - 1) ** -r)
    return reached * max(0.0, missed_before - min(1.0, c * rank**-r))


def gain(probability: float, depth: int, acceptance: float) -> float:
    """Return the expected tokens from a chain's next token."""
    return probability * acceptance ** (depth + 1)


def worth_growing(gains: Sequence[float], step: LinearCost) -> int:
    """Return how many chains the next tree step should grow for the most expected tokens per second.

    `gains` fall. `step` is the seconds of a step by its chains. Chains that cost nothing all grow."""
    best, most, total = 0, 0.0, 0.0
    for count, more in enumerate(gains, 1):
        total += more
        rate = total / max(1e-9, step.at(count))
        if rate >= most:
            best, most = count, rate
    return best
