"""One step of a draft: its rows, and one or more forwards over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from ssd.draft.chain_cache import ChainTokens
from ssd.draft.chain_scheduler import Growing
from ssd.draft.drafter import ChainRows, Drafter, PathRow
from ssd.draft.tree import Chain, Guess, Tree
from ssd.execution.batch import Row
from ssd.execution.graph_shapes import PATH_TOKENS
from ssd.execution.meanwhile import Task
from ssd.execution.pages import OutOfPages
from ssd.speculation.acceptance import coupled
from ssd.system import failpoints


def forward(
    drafter: Drafter, paths: Sequence[PathRow], growing: Sequence[Growing], meanwhile: Task, depths: int
) -> tuple[list[list[Guess]], int]:
    """Compute path rows and each growing chain's last token; return guesses and the number of forwards.

    Guesses are for each path's outputs, then for each chain's last token; each of at most `depths` forwards and each
    right token of `_foreseen` adds one."""
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

    `work` has for each frontier its number of outputs, and the tokens guessed after them. If x, y, z were guessed and
    the forward says x, y, q, r, then x, y and q hold."""
    rest, found = iter(guesses), list[list[Guess]]()
    for outputs, guessed in work:
        own = list(islice(rest, outputs + len(guessed)))
        if guessed:
            right = coupled(guessed, [guess.token for guess in own[outputs - 1 :]]).accepted
            del own[outputs + right :]
        found.append(own)
    return found


def path_rows(trees: Iterable[Tree], drafter: Drafter, drop: Callable[[int], None]) -> list[PathRow]:
    """Return rows over each sequence's next path tokens, the shortest first: no long prompt delays others.

    `drop` is called with a request that gets no pages."""
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
    """Return the length of the path that needs keys, values and guesses; 0 while the draft rests.

    In `sd` no guess is wanted after the last draft token: the next outcome decides the token there."""
    if tree.rests:
        return 0
    most = tree.most - 1 if tree.speculation.mode == "sd" else tree.verified
    return tree.base + min(tree.verified, most)


def pending(tree: Tree, most: int) -> list[int]:
    """Return at most `most` next path tokens without keys and values."""
    return tree.path[tree.computed : min(wanted(tree), tree.computed + most)]


def outputs(tree: Tree, count: int) -> int:
    """Return how many of the next `count` path tokens need guesses: none before the last committed one."""
    return max(0, min(count, tree.computed + count - tree.base + 1))


def path_room(drafter: Drafter, path: PathRow) -> int:
    """Return how many tokens may be guessed behind a trunk's next token; 0 unless the target waits."""
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
    """Reserve pages for `more` tokens behind a path's row; return `more`, or 0."""
    try:
        path.tree.table.grow(path.row.stop + more)
    except OutOfPages:
        return 0
    return more


def _later_forwards(drafter: Drafter, paths: Sequence[PathRow], growing: Sequence[Growing], most: int) -> list[int]:
    found = [reserved(path, min(most, path_room(drafter, path))) for path in paths]
    return found + [min(most, chain_room(drafter, tree, chain)) for tree, chains in growing for chain in chains]


def _foreseen(drafter: Drafter, tree: Tree, chain: Chain) -> list[int]:
    own = len(chain.tokens)
    if chain.fork != tree.in_flight or tree.ahead[:own] != chain.tokens:
        return []
    return tree.ahead[own : own + chain_room(drafter, tree, chain)]
