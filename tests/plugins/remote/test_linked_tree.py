"""The outcome tree of a draft whose target is on another machine."""

from __future__ import annotations

from ssd.draft.chain_scheduler import listed_outcomes
from ssd.ipc.messages import Launch
from ssd.plugins.remote.engine import LinkedTree
from ssd.plugins.remote.link import Trunk
from tests.draft.test_tree import PROMPT, REQUEST, ROUND, compute, grow, outcome, tree_of


def far(in_flight: int) -> LinkedTree:
    """As `after_a_win`, where the target verifies two tokens and the trunk may have `in_flight`."""
    tree = tree_of(kind=LinkedTree)
    assert isinstance(tree, LinkedTree)
    compute(tree, {0: [7, 8, 9]})
    grow(tree, {(0, 7): [1, 2, 3, 4], (0, 8): [5, 6, 5, 6]}, depth=4)
    tree.outcome(outcome(0, 7, None))
    tree.chains.clear()
    assert tree.launched(Launch(REQUEST, ROUND + 1, in_flight, [1, 2])) == []
    return tree


def test_a_trunk_goes_on_beyond_what_is_verified_as_far_as_the_receiver_says() -> None:
    tree = far(in_flight=3)
    assert (tree.trunk, tree.in_flight, tree.ahead) == ([1, 2, 3], 3, [4])
    assert far(in_flight=2).trunk == [1, 2]
    compute(tree, {node: [node + 1, 20, 21] for node in range(4)})
    assert {fork for fork, _ in listed_outcomes(tree)} == {0, 1, 2, 3}
    assert tree.speculated == Trunk(REQUEST, ROUND + 1, len(PROMPT) + 1, [1, 2, 3])


def test_an_expected_outcome_leaves_the_later_chains_as_they_are() -> None:
    tree = far(in_flight=4)
    compute(tree, {node: [node + 1, 20, 21] for node in range(5)})
    grow(tree, {(0, 20): [1], (2, 21): [6], (3, 20): [8, 9], (4, 5): [6, 6]}, depth=1)
    listed_outcomes(tree)
    row = outcome(2, 3, None, ROUND + 1)
    assert tree.expects(row) and not tree.expects(outcome(2, 9, None, ROUND + 1))
    over = tree.advance(row)
    assert [(chain.fork, chain.tokens[0]) for chain in over] == [(0, 20), (2, 21)]
    assert [(chain.fork, chain.tokens, chain.entry) for chain in tree.chains] == [(0, [20, 8], 0), (1, [5, 6], 1)]
    assert (tree.tokens, tree.trunk, tree.round) == ([*PROMPT, 7, 1, 2, 3], [4], ROUND + 2)
    assert tree.launched(Launch(REQUEST, ROUND + 2, 4, [4])) == [] and not listed_outcomes(tree)
    broken = tree.outcome(outcome(0, 20, None, ROUND + 2))
    assert broken is not None and tree.trunk == [8]


def test_a_trunk_takes_in_the_chain_at_its_end() -> None:
    tree = far(in_flight=9)
    compute(tree, {node: [node + 1, 20, 21] for node in range(5)})
    grow(tree, {(4, 5): [6, 7, 8, 9], (4, 20): [1, 1, 1, 1]}, depth=3)
    assert tree.absorbable() is None, "it is short"
    tree.chains.clear()
    grow(tree, {(4, 5): [6, 7, 8, 9], (4, 20): [1, 1, 1, 1]}, depth=4)
    chain = tree.absorbable()
    assert chain is not None and chain.tokens[0] == 5
    tree.absorb(chain)
    assert (tree.trunk, tree.in_flight) == ([1, 2, 3, 4, 5, 6, 7, 8], 8)
    assert [one.tokens[0] for one in tree.chains] == [20]


def test_tokens_of_the_target_s_own_end_what_the_trunk_expected() -> None:
    tree = far(in_flight=4)
    compute(tree, {node: [node + 1, 20, 21] for node in range(5)})
    grow(tree, {(1, 20): [6], (3, 20): [8]}, depth=1)
    assert tree.expects(outcome(0, 1, None, ROUND + 1)) and tree.advance(outcome(0, 1, None, ROUND + 1)) == []
    over = tree.launched(Launch(REQUEST, ROUND + 2, 6, [2, 30]))
    assert [chain.fork for chain in over] == [2] and tree.trunk == [2, 30]
    assert [chain.fork for chain in tree.chains] == [0]
