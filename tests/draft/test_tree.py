"""The outcome tree of one sequence: what it prepares for, which chain wins, what is left to compute."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from ssd.config.params import Mode, Speculation
from ssd.draft.chain_scheduler import listed_outcomes
from ssd.draft.engine import _corrected
from ssd.draft.forward import outputs, pending
from ssd.draft.tree import Chain, Guess, Tree
from ssd.execution.pages import PagePool, PageTable
from ssd.ipc.board import Key
from ssd.ipc.messages import Admit, Launch, Verified
from ssd.law import Law

EPOCH, REQUEST, ROUND = 3, 11, 5
PROMPT = [50, 51, 52]
SSD = Speculation("ssd", 3, (2,), "jit")


def tree_of(speculation: Speculation = SSD, temperature: float = 0.0, kind: type[Tree] = Tree) -> Tree:
    """A tree after `Admit`, before any token is computed."""
    admit = Admit(REQUEST, 0, ROUND, PROMPT, Law(temperature), speculation)
    return kind(admit, EPOCH, PageTable(PagePool(64, 4)))


def guesses(ranks: dict[int, list[int]]) -> dict[int, Guess]:
    """Guesses by node: the draft goes on with the best candidate."""
    return {node: Guess(candidates[0], candidates) for node, candidates in ranks.items()}


def compute(tree: Tree, ranks: dict[int, list[int]]) -> None:
    """Compute all pending tokens, as the engine does; `ranks` are by node."""
    known = guesses(ranks)
    while tokens := pending(tree, 100):
        count = len(tokens)
        tree.table.grow(tree.computed + count)
        last = tree.computed + count - tree.base
        wanted = outputs(tree, count)
        tree.extended(count, [known[node] for node in range(last - wanted + 1, last + 1)])


def grow(tree: Tree, chains: dict[tuple[int, int], list[int]], depth: int) -> None:
    """Give `tree` these chains, {(fork, t*): c_1, c_2, ...}, `depth` tokens of each computed."""
    for cell, ((fork, token), rest) in enumerate(chains.items()):
        tokens = [token, *rest][: depth + 1]
        follow = [Guess(following, [following, 99]) for following in tokens[1:]]
        tree.chains.add(Chain(fork, tokens, cell, entry=cell, computed=depth, guesses=follow))


def outcome(accepted: int, token: int, in_flight: int | None, round_number: int = ROUND) -> Verified:
    return Verified(REQUEST, round_number, accepted, token, in_flight)


def after_a_win(in_flight: int, speculation: Speculation = SSD) -> Tree:
    """The round after the prefill: (0, 7) won with its chain 1 2 3 4, of which so many tokens are in flight."""
    tree = tree_of(speculation)
    compute(tree, {0: [7, 8, 9]})
    grow(tree, {(0, 7): [1, 2, 3, 4], (0, 8): [5, 6, 5, 6]}, depth=4)
    winner = tree.outcome(outcome(0, 7, in_flight))
    assert winner is not None
    tree.computed += winner.computed
    tree.chains.clear()
    return tree


# -- what is prepared for ---------------------------------------------------------------------------------------------


def test_nothing_forks_before_the_prompt_is_computed() -> None:
    tree = tree_of()
    assert pending(tree, 2) == PROMPT[:2]
    assert outputs(tree, 2) == 0
    assert not tree.extended(2, [])
    assert listed_outcomes(tree) == []
    assert pending(tree, 2) == PROMPT[2:] and outputs(tree, 1) == 1


def test_the_first_outcome_has_no_accepted_tokens() -> None:
    tree = tree_of()
    compute(tree, {0: [7, 8, 9]})
    assert listed_outcomes(tree) == [(0, 7), (0, 8)]
    assert listed_outcomes(tree) == []


def test_the_token_in_flight_is_no_candidate_and_full_acceptance_excludes_nothing() -> None:
    tree = after_a_win(in_flight=3)
    tree.guesses = guesses({0: [1, 20, 21], 1: [22, 2, 23], 2: [24, 25, 3], 3: [4, 3, 26]})
    assert listed_outcomes(tree) == [(0, 20), (0, 21), (1, 22), (1, 23), (2, 24), (2, 25), (3, 4), (3, 3)]


def test_a_token_that_was_not_taken_may_come_after_full_acceptance() -> None:
    """The chain is 1 2 3 4, the target took two: the token after them may well be 3."""
    tree = after_a_win(in_flight=2)
    tree.guesses = guesses({0: [1, 20, 21], 1: [2, 22, 23], 2: [3, 24, 25]})
    assert listed_outcomes(tree) == [(0, 20), (0, 21), (1, 22), (1, 23), (2, 3), (2, 24)]


def test_of_a_list_the_last_number_belongs_to_full_acceptance() -> None:
    speculation = Speculation("ssd", 3, (1, 2, 1, 4), "jit")
    ranks = list(range(60, 70))
    for in_flight, expected in ((3, [1, 2, 1, 4]), (1, [1, 4]), (0, [4])):
        tree = after_a_win(in_flight, speculation)
        tree.guesses = guesses(dict.fromkeys(range(4), ranks))
        forks = [fork for fork, _ in listed_outcomes(tree)]
        assert [forks.count(node) for node in range(in_flight + 1)] == expected


def test_a_winners_candidates_were_known_when_it_was_drafted() -> None:
    """The promoted candidates give all forks at once: only what the chain had not reached is computed."""
    tree = after_a_win(in_flight=3)
    assert pending(tree, 100) == []
    assert listed_outcomes(tree) == [(0, 99), (1, 99), (2, 99), (3, 4), (3, 99)]


def test_a_winner_without_a_place_is_known_but_not_computed() -> None:
    """Its tokens become the trunk, also for a target that has seen none of them. Nothing forks where keys and values
    are missing."""
    for in_flight in (2, None):
        tree = tree_of()
        compute(tree, {0: [7, 8, 9]})
        grow(tree, {(0, 7): [1, 2, 3]}, depth=3)
        (chain,) = tree.chains
        chain.cell = None
        assert tree.outcome(outcome(0, 7, in_flight)) is chain
        assert tree.trunk == [1, 2, 3] and tree.guesses.keys() == {0, 1, 2}
        assert listed_outcomes(tree) == []
        tree.chains.clear()
        assert pending(tree, 100) == [7, 1, 2, 3][: 3 if in_flight == 2 else 4]
        compute(tree, {0: [1, 40], 1: [2, 41], 2: [3, 42], 3: [5, 43]})
        assert bool(listed_outcomes(tree)) == (in_flight == 2)


def test_forks_come_as_their_ranks_become_known() -> None:
    tree = tree_of()
    compute(tree, {0: [7, 8, 9]})
    grow(tree, {(0, 7): [1, 2, 3]}, depth=2)
    winner = tree.outcome(outcome(0, 7, in_flight=2))
    assert winner is not None
    tree.computed += winner.computed
    tree.chains.clear()
    assert tree.trunk == [1, 2]
    assert listed_outcomes(tree) == [(0, 99), (1, 99)]
    assert pending(tree, 100) == [2]
    compute(tree, {2: [30, 31, 32]})
    assert listed_outcomes(tree) == [(2, 30), (2, 31)]


# -- outcomes ---------------------------------------------------------------------------------------------------------


def test_the_key_of_an_outcome_names_the_verification_in_flight() -> None:
    tree = after_a_win(in_flight=3)
    assert tree.tokens == [*PROMPT, 7]
    assert tree.key(2, 24) == Key(EPOCH, REQUEST, ROUND + 1, len(PROMPT) + 1, 2, 24)


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_a_miss_keeps_what_was_accepted_and_no_more(accepted: int) -> None:
    tree = after_a_win(in_flight=3)
    assert tree.computed == 7
    assert tree.outcome(outcome(accepted, 90, 0, ROUND + 1)) is None
    assert tree.tokens == [*PROMPT, 7, *[1, 2, 3][:accepted], 90]
    assert tree.computed == 4 + accepted
    assert tree.trunk == [] and tree.guesses == {}
    assert pending(tree, 100) == [90]
    assert listed_outcomes(tree) == []


@pytest.mark.parametrize("accepted", [0, 2, 3])
def test_a_hit_brings_the_chain_that_was_prepared_for_it(accepted: int) -> None:
    tree = after_a_win(in_flight=3)
    grow(tree, {(0, 24): [40, 41], (2, 25): [42, 43], (2, 24): [44, 45], (3, 24): [46, 47]}, depth=2)
    winner = tree.outcome(outcome(accepted, 24, 2, ROUND + 1))
    assert winner is not None and (winner.fork, winner.tokens[0]) == (accepted, 24)
    assert tree.trunk == {0: [40, 41], 2: [44, 45], 3: [46, 47]}[accepted]
    assert tree.computed == 4 + accepted  # the chain's keys and values come on top once they are moved
    assert tree.guesses == guesses({0: [tree.trunk[0], 99], 1: [tree.trunk[1], 99]})


def test_more_in_flight_than_the_chain_has_is_cut() -> None:
    tree = tree_of()
    compute(tree, {0: [7, 8, 9]})
    grow(tree, {(0, 7): [1, 2, 3]}, depth=2)
    tree.outcome(outcome(0, 7, in_flight=3))
    assert tree.in_flight == 2


@pytest.mark.parametrize(
    "row",
    [outcome(0, 9, 0, ROUND), outcome(0, 9, 0, ROUND + 2), outcome(3, 9, 0, ROUND + 1), outcome(64, 9, 0, ROUND + 1)],
    ids=["an old round", "a lost round", "more than was in flight", "far more"],
)
def test_an_outcome_that_cannot_follow_is_refused(row: Verified) -> None:
    tree = after_a_win(in_flight=2)
    before = (list(tree.tokens), list(tree.trunk), tree.round, tree.computed)
    with pytest.raises(ValueError, match="does not follow"):
        tree.outcome(row)
    assert (tree.tokens, tree.trunk, tree.round, tree.computed) == before


# -- the backup -------------------------------------------------------------------------------------------------------


def test_after_a_miss_the_trunk_grows_to_the_lookahead_while_the_target_waits() -> None:
    tree = after_a_win(in_flight=3)
    key = tree.key(1, 90)
    tree.outcome(outcome(1, 90, None, ROUND + 1))
    assert tree.answers == key
    tree.table.grow(20)
    for token in (61, 62, 63):
        assert listed_outcomes(tree) == []
        assert len(pending(tree, 100)) == 1 and outputs(tree, 1) == 1
        assert tree.extended(1, [Guess(token, [token, 70, 71])])
    assert tree.trunk == [61, 62, 63]
    # The last token is computed as well: its candidates will be wanted.
    assert pending(tree, 100) == [63]
    assert not tree.extended(1, [Guess(64, [64, 70, 71])])
    assert pending(tree, 100) == []


@pytest.mark.parametrize(
    ("speculation", "temperature", "expected"),
    [
        (Speculation("ssd", 3, (), "jit", budget=4), 0.0, [50, 51, 52]),
        (Speculation("ssd", 3, (), "jit", budget=4, sampler="rejection"), 0.0, [50, 51, 52]),
        (Speculation("ssd", 3, (), "jit", budget=4, sampler="rejection"), 0.8, [61, 62, 63]),
        (Speculation("ssd", 3, (2,), "jit"), 0.0, [61, 62, 63]),
    ],
)
def test_a_trunk_goes_on_as_the_text_did_unless_its_tokens_were_drawn(
    speculation: Speculation, temperature: float, expected: list[int]
) -> None:
    """After six equal tokens, in a joint allocation. So does a chain; what was guessed after a corrected token goes."""
    tree = tree_of(speculation)
    tree.law = replace(tree.law, temperature=temperature)
    tree.tokens = [50, 51, 52, 53, 54, 55, 56] * 2
    tree.in_flight = None
    compute(tree, {0: [61, 70], 1: [62, 70], 2: [63, 70], 3: [64, 70]})
    assert tree.trunk == expected
    assert [tree.guesses[node].token for node in range(3)] == expected
    chain = Chain(0, [50, 51], 0, 0)
    found = _corrected(tree, chain, [Guess(52, [52]), Guess(8, [8]), Guess(9, [9])])
    assert [guess.token for guess in found] == ([52, 53] if expected[0] == 50 else [52, 8, 9])


@pytest.mark.parametrize("taken", [0, 1, 2, 3])
def test_the_target_takes_as_much_of_the_trunk_as_it_likes(taken: int) -> None:
    tree = after_a_win(in_flight=3)
    tree.outcome(outcome(1, 90, None, ROUND + 1))
    compute(tree, {0: [61, 70, 71], 1: [62, 70, 71], 2: [63, 70, 71], 3: [64, 70, 71]})
    tree.launched(Launch(REQUEST, ROUND + 2, taken))
    assert tree.answers is None
    expected = [(node, token) for node in range(taken) for token in (70, 71)]
    assert listed_outcomes(tree) == [*expected, (taken, 61 + taken), (taken, 70)]
    with pytest.raises(ValueError, match="does not follow"):
        tree.outcome(outcome(taken + 1, 9, 0, ROUND + 2))
    tree.outcome(outcome(taken, 9, 0, ROUND + 2))
    assert tree.tokens[-taken - 1 :] == [*[61, 62, 63][:taken], 9]


def test_a_launch_of_another_round_is_ignored() -> None:
    tree = after_a_win(in_flight=3)
    tree.outcome(outcome(1, 90, None, ROUND + 1))
    tree.launched(Launch(REQUEST, ROUND + 1, 2))
    assert tree.in_flight is None
    tree.launched(Launch(REQUEST, ROUND + 2, 0))
    tree.launched(Launch(REQUEST, ROUND + 2, 3))
    assert tree.in_flight == 0


def test_ordinary_speculation_prepares_for_no_outcome() -> None:
    tree = tree_of(Speculation("sd", 3, (3,), "jit"))
    compute(tree, {0: [7, 8, 9]})
    assert listed_outcomes(tree) == []
    tree.outcome(outcome(0, 7, None))
    compute(tree, {node: [60 + node, 70, 71] for node in range(4)})
    assert tree.trunk == [60, 61, 62]
    tree.launched(Launch(REQUEST, ROUND + 1, 3))
    assert listed_outcomes(tree) == []


def test_a_cached_prompt_leaves_a_token_to_compute() -> None:
    """Without it there would be no candidates for the first outcome."""
    pool = PagePool(64, 4)
    first = PageTable(pool)
    first.grow(8)
    first.share_computed(list(range(8)), 8)
    admit = Admit(1, 0, 0, list(range(8)), Law(), Speculation(num_speculative_tokens=4, fan_out=(3,), backup="jit"))
    tree = Tree(admit, EPOCH, PageTable(pool))
    assert tree.computed == 4 and pending(tree, 100) == [4, 5, 6, 7] and outputs(tree, 4) == 1


def test_in_turn_nothing_is_computed_behind_the_last_draft_token() -> None:
    """In `sd` the target decides what follows it: K forwards for K draft tokens."""
    admit = Admit(0, 0, 0, [5, 6, 7], Law(), Speculation("sd", 2, (3,), "jit"))
    tree = Tree(admit, 1, PageTable(PagePool(4, 4)))
    tree.extended(3, [Guess(8, [8])])
    tree.outcome(Verified(0, 0, 0, 8, None))
    for token in (8, 9):
        assert pending(tree, 9) == [token]
        assert tree.extended(1, [Guess(token + 1, [token + 1])])
    assert tree.trunk == [9, 10] and pending(tree, 9) == []
    tree.outcome(Verified(0, 1, 2, 11, None))
    assert pending(tree, 9) == [10, 11]


@pytest.mark.parametrize(("mode", "shares", "reads"), [("sd", True, 0), ("ssd", True, 3), ("sd", False, 2)])
def test_a_draft_that_shares_cores_rests_while_the_target_verifies_tokens_of_its_own(
    mode: Mode, shares: bool, reads: int
) -> None:
    """In turn. Once the outcome is known, it reads what was accepted."""
    tree = tree_of(replace(SSD, mode=mode, num_speculative_tokens=2))
    tree.shares_cores = shares
    compute(tree, {0: [5]})
    tree.outcome(outcome(0, 5, None))
    tree.launched(Launch(REQUEST, ROUND + 1, 2, [6, 7]))
    assert len(pending(tree, 100)) == reads
    tree.outcome(outcome(2, 8, None, ROUND + 1))
    assert pending(tree, 100) == [5, 6, 7, 8]
