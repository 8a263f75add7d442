"""One step of a draft: its rows, and a forward over them, or several, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from ssd.draft.chain_scheduler import Growing
from ssd.draft.drafter import ChainRows, Drafter, PathRow
from ssd.draft.tree import Chain, Guess, Tree
from ssd.draft.tree_attention import ChainTokens
from ssd.execution.batch import Row
from ssd.execution.graph_shapes import PATH_TOKENS
from ssd.execution.meanwhile import Task
from ssd.execution.pages import OutOfPages
from ssd.speculation.acceptance import coupled
from ssd.system import failpoints


def forward(
    drafter: Drafter, paths: Sequence[PathRow], growing: Sequence[Growing], meanwhile: Task, depths: int
) -> tuple[list[list[Guess]], int]:
    """Compute path rows and the last token of each growing chain; return guesses and the number of forwards.

    The guesses are those for each path's outputs, then for each chain's last token. Each later forward adds one where a
    guess is wanted, and so does each right token of `_foreseen`. At most `depths` forwards run, one after the other;
    `meanwhile` runs while a device computes."""
    foreseen = [
        [] if drafter.block else _foreseen(drafter, tree, chain) for tree, chains in growing for chain in chains
    ]
    more = [] if depths == 1 or any(foreseen) else _later_forwards(drafter, paths, growing, depths - 1)
    rows = chain_rows(growing, foreseen)
    if any(more) and (found := drafter.several(paths, rows, more, meanwhile)) is not None:
        outputs = [row.outputs for _, row in paths] + [1] * len(foreseen)
        return found, 1 + max(len(own) - count for own, count in zip(found, outputs, strict=True))
    guesses = drafter.forward(paths, rows, meanwhile)
    work = [(row.outputs, list[int]()) for _, row in paths] + [(1, guessed) for guessed in foreseen]
    return confirmed(guesses, work), 1


def confirmed(guesses: Iterable[Guess], work: Iterable[tuple[int, Sequence[int]]]) -> list[list[Guess]]:
    """Return the guesses that hold, by frontier.

    `work` has for each frontier, in the order of the rows, the number of its own outputs and the guessed tokens after
    them. Of these the leading right ones hold, and the guess after them."""
    rest, found = iter(guesses), list[list[Guess]]()
    for outputs, guessed in work:
        own = list(islice(rest, outputs + len(guessed)))
        if guessed:
            right = coupled(guessed, [guess.token for guess in own[outputs - 1 :]]).accepted
            del own[outputs + right :]
        found.append(own)
    return found


def path_rows(trees: Iterable[Tree], drafter: Drafter, drop: Callable[[int], None]) -> list[PathRow]:
    """Return rows over each sequence's next path tokens without keys and values.

    The sequence with the fewest comes first, so that a long prompt does not delay a sequence whose target waits. `drop`
    is called with a request if there are no pages for its tokens."""
    rows, budget = list[PathRow](), PATH_TOKENS
    for tree in sorted(trees, key=lambda tree: wanted(tree) - tree.computed):
        tokens = drafter.ready(tree, pending(tree, budget))
        stop = tree.computed + len(tokens)
        if not tokens or stop > drafter.max_position:
            continue
        try:
            tree.table.grow(stop)
        except OutOfPages:
            drop(tree.request)
            continue
        if len(tokens) > tree.lookahead + 1:
            failpoints.reach("draft.prefill")
        budget -= len(tokens)
        rows.append(PathRow(tree, Row(tokens, tree.computed, tree.table.pages, outputs(tree, len(tokens)))))
    return rows


def wanted(tree: Tree) -> int:
    """Return the length of the path that needs keys, values and guesses.

    In `sd` no guess is wanted after the last draft token: the next outcome decides the token there. Nothing is wanted
    while the draft rests."""
    if tree.rests:
        return 0
    most = tree.most - 1 if tree.speculation.mode == "sd" else tree.verified
    return tree.base + min(tree.verified, most)


def pending(tree: Tree, most: int) -> list[int]:
    """Return the next path tokens without keys and values that one forward can compute, at most `most`."""
    return tree.path[tree.computed : min(wanted(tree), tree.computed + most)]


def outputs(tree: Tree, count: int) -> int:
    """Return how many of the next `count` path tokens need guesses: the last committed one and those after it."""
    return max(0, min(count, tree.computed + count - tree.base + 1))


def path_room(drafter: Drafter, path: PathRow) -> int:
    """Return how many tokens may be guessed at the end of a trunk, after the token of this forward.

    None unless the target waits for the trunk."""
    tree, length = path.tree, len(path.tree.trunk)
    if tree.in_flight is not None or path.row.stop != tree.base + length:
        return 0
    return max(0, min(tree.most - length - 1, drafter.max_position - tree.base - length))


def chain_room(drafter: Drafter, tree: Tree, chain: Chain) -> int:
    """Return how many tokens may be guessed at the end of a chain."""
    left = drafter.max_position - tree.base - chain.fork - len(chain.tokens)
    return max(0, min(tree.lookahead - chain.computed, left))


def chain_rows(growing: Sequence[Growing], guessed: Iterable[Sequence[int]]) -> list[ChainRows]:
    """Return rows of each chain's last token and the tokens guessed after it."""
    rest, found = iter(guessed), []
    for tree, chains in growing:
        tokens = ChainTokens(tree.table.pages, tree.base)
        for chain, own in zip(chains, rest, strict=False):
            assert chain.cell is not None, "a chain without a cell does not grow"
            tokens.add(chain.fork, chain.cell, chain.computed, [chain.tokens[-1], *own])
        found.append(ChainRows(tree, tokens))
    return found


def reserved(path: PathRow, more: int) -> int:
    """Reserve pages for `more` tokens behind a path's row; return `more`, or 0 without pages."""
    try:
        path.tree.table.grow(path.row.stop + more)
    except OutOfPages:
        return 0
    return more


def _later_forwards(drafter: Drafter, paths: Sequence[PathRow], growing: Sequence[Growing], most: int) -> list[int]:
    """Return how many of `most` later forwards each path and chain takes part in; reserve pages for them."""
    found = [reserved(path, min(most, path_room(drafter, path))) for path in paths]
    return found + [min(most, chain_room(drafter, tree, chain)) for tree, chains in growing for chain in chains]


def _foreseen(drafter: Drafter, tree: Tree, chain: Chain) -> list[int]:
    """Return the tokens already drafted (`Tree.ahead`) that may follow a chain's tokens; [] if there are none."""
    own = len(chain.tokens)
    if chain.fork != tree.in_flight or tree.ahead[:own] != chain.tokens:
        return []
    return tree.ahead[own : own + chain_room(drafter, tree, chain)]
