"""Drafts for a draft (a cascade): the largest decides what is published, smaller ones guess it.

The larger draft verifies guesses in its next forward: a cascade (Chen et al., arXiv 2312.11462) changes when tokens are
drafted, never which. Drafts share noise: a guess is accepted if it is the larger draft's own token."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ssd.draft.chain_cache import ChainTokens
from ssd.draft.chain_scheduler import Growing
from ssd.draft.drafter import ChainRows, Drafter, PathRow, rows_of
from ssd.draft.forward import chain_room, chain_rows, confirmed, path_room, reserved, wanted
from ssd.draft.tree import Guess, Tree
from ssd.execution.batch import Row
from ssd.execution.graph_shapes import PATH_TOKENS
from ssd.execution.meanwhile import Task
from ssd.execution.pages import OutOfPages, PageTable
from ssd.speculation.acceptance import common_prefix_length
from ssd.speculation.theory import LinearCost, expected_tokens
from ssd.tuning.estimates import LinearFit, Mean

log = logging.getLogger("ssd.draft")

# A forward with more path tokens than this for each sequence is not used to measure the time of a guess.
_USUAL = 8
# Steps after which a smaller draft that does not pay guesses one token again, since it may pay now.
_PROBE_EVERY = 32
_REPORT_EVERY = 256
_ACCEPTANCE = 0.5  # until it is known


@dataclass
class Frontier:
    """The end of a path, or of the chain in `cell`, where at most `most` tokens may be guessed.

    `tokens` follow the path, or in a chain its first `fork` trunk tokens."""

    tree: Tree
    tokens: list[int]
    most: int
    fork: int = 0
    cell: int | None = None
    guessed: list[int] = field(default_factory=list)

    @property
    def text(self) -> list[int]:
        return self.tokens + self.guessed

    @property
    def left(self) -> int:
        return self.most - len(self.guessed)


def forward_with_guesses(
    drafter: Drafter,
    smaller: SmallerDraft,
    trees: Collection[Tree],
    paths: Sequence[PathRow],
    growing: Sequence[Growing],
    meanwhile: Task,
) -> list[list[Guess]]:
    """Do `ssd.draft.forward.forward`, with guesses of a smaller draft at all frontiers."""
    meanwhile()  # the forwards of smaller drafts come first
    at_paths = [Frontier(path.tree, [], path_room(drafter, path)) for path in paths]
    at_chains = [
        Frontier(tree, chain.tokens, chain_room(drafter, tree, chain), chain.fork, chain.cell)
        for tree, chains in growing
        for chain in chains
    ]
    smaller.propose(trees, [*at_paths, *at_chains])
    guessed = [_guessed_row(*pair) for pair in zip(paths, at_paths, strict=True)]
    work = [(row.outputs, end.guessed) for (_, row), end in zip(paths, at_paths, strict=True)]
    work += [(1, end.guessed) for end in at_chains]
    rows = chain_rows(growing, [end.guessed for end in at_chains])
    return _verified(drafter, smaller, guessed, rows, work)


def _guessed_row(path: PathRow, frontier: Frontier) -> PathRow:
    (tree, row), guessed = path, frontier.guessed
    del guessed[reserved(path, len(guessed)) :]
    tokens = [*row.token_ids, *guessed]
    return PathRow(tree, replace(row, token_ids=tokens, pages=tree.table.pages, outputs=row.outputs + len(guessed)))


def _verified(
    drafter: Drafter,
    below: SmallerDraft | None,
    paths: Sequence[PathRow],
    chains: Sequence[ChainRows],
    work: Sequence[tuple[int, list[int]]],
) -> list[list[Guess]]:
    began = time.perf_counter()
    guesses = list(drafter.forward(paths, chains))
    seconds = time.perf_counter() - began
    found = confirmed(guesses, work)
    if below is not None:
        below.judge(rows_of(paths, chains), seconds, found, work)
    return found


class _CascadePath:
    """One sequence in a smaller draft: its pages, and the `tokens` whose keys and values they hold."""

    def __init__(self, table: PageTable, tree: Tree) -> None:
        self.table = table
        self.tokens = tree.tokens[: table.adopt_prefix(tree.tokens)]
        self._sure, self._lost = 0, False

    def agreed(self, tree: Tree, tokens: Sequence[int]) -> int:
        found = common_prefix_length(self.tokens, tokens, self._sure)
        self._sure = min(found, tree.base)  # committed tokens stay
        return found

    def grow(self, length: int) -> bool:
        """Reserve pages for `length` tokens and return True; after a failure the path never has pages."""
        if not self._lost:
            try:
                self.table.grow(length)
            except OutOfPages:
                self.table.free()
                self.tokens, self._sure, self._lost = [], 0, True
        return not self._lost


class _CascadeChunk(NamedTuple):
    """The tokens of a path that the next forward computes: `context[start:stop]`."""

    tree: Tree
    path: _CascadePath
    context: list[int]
    start: int
    stop: int


class SmallerDraft:
    """A draft model that guesses for the next larger one, with the same cells; `below` guesses for it."""

    def __init__(self, drafter: Drafter, below: SmallerDraft | None = None) -> None:
        self.drafter, self.below = drafter, below
        self._paths: dict[int, _CascadePath] = {}
        self._chains: dict[int, list[int]] = {}  # by cell, chain tokens with keys and values
        self._acceptance, self._token_s = Mean(_ACCEPTANCE), Mean(0.0)
        self._forward = LinearFit()  # the larger draft's
        self._calls = 0

    # -- for the larger draft ---------------------------------------------------------------------------------------

    def propose(self, trees: Collection[Tree], frontiers: Sequence[Frontier]) -> None:
        """Guess as many tokens at each frontier as pay. Paths' frontiers come first, in the order of `trees`."""
        growing = [frontier for frontier in frontiers if frontier.most > 0]
        length = self._worthwhile(growing)
        if length:
            self._guess(trees, [replace(f, most=min(f.most, length), guessed=f.guessed) for f in growing])

    def judge(
        self, rows: int, seconds: float, found: Sequence[list[Guess]], work: Sequence[tuple[int, list[int]]]
    ) -> None:
        """Learn from a forward of the larger draft; `found`: its outputs and the guesses of this draft that it kept."""
        self._forward.note(rows, seconds)
        for kept, (outputs, guessed) in zip(found, work, strict=True):
            self._acceptance.note_outcome(len(guessed), len(kept) - outputs)

    def promote(self, tree: Tree, cell: int, tokens: Sequence[int]) -> None:
        """Copy the winning chain in `cell` to the path."""
        path, start = self._paths.get(tree.request), tree.base - 1
        count = common_prefix_length(self._chains.get(cell, []), tokens)
        if path is not None and count and path.agreed(tree, tree.tokens) >= start and path.grow(start + count):
            self.drafter.promote(path.table, start, cell, count)
            path.tokens[start:] = tokens[:count]

    def forget_chains(self, cells: Sequence[int]) -> None:
        for cell in cells:
            self._chains.pop(cell, None)

    def release(self, request: int) -> None:
        if request in self._paths:
            self._paths.pop(request).table.free()

    def _worthwhile(self, frontiers: Sequence[Frontier]) -> int:
        self._calls += 1
        if not (frontiers and self._forward.known and self._token_s.count):
            return 1
        figures = self._acceptance.value, self._forward.cost(), len(frontiers), self._token_s.value
        length = best_length(*figures, max(frontier.most for frontier in frontiers))
        if self._calls % _REPORT_EVERY == 0:
            log.info("cascade: %d guesses; acceptance %.2f, forward %s, chains %d, guess %.5f s", length, *figures)
        return length or int(self._calls % _PROBE_EVERY < 2)  # twice: at the first, paths may have to be computed

    # -- guessing ---------------------------------------------------------------------------------------------------

    def _guess(self, trees: Collection[Tree], frontiers: Sequence[Frontier]) -> None:
        while True:
            began, before = time.perf_counter(), sum(len(frontier.guessed) for frontier in frontiers)
            caught_up, grown = self._step(trees, frontiers)
            new = sum(len(frontier.guessed) for frontier in frontiers) - before
            if new and caught_up <= _USUAL * len(trees):
                self._token_s.note((time.perf_counter() - began) * len(grown) / new)
            frontiers = [frontier for frontier in grown if frontier.left > 0]
            if not frontiers:
                return

    def _step(self, trees: Collection[Tree], frontiers: Sequence[Frontier]) -> tuple[int, list[Frontier]]:
        """Run one forward: compute missing path tokens, and guess at frontiers whose path is complete.

        Returns the number of path tokens computed, and the frontiers with new guesses."""
        chunks = self._chunks(trees, frontiers)
        whole = {request for request, chunk in chunks.items() if chunk.stop == len(chunk.context)}
        moving = [frontier for frontier in frontiers if frontier.tree.request in whole and self._fits(frontier)]
        guessed = self._guesses_below(trees, moving)
        work = list(zip(moving, guessed, strict=True))
        paths = self._path_rows(chunks, {f.tree.request: behind for f, behind in work if f.cell is None})
        chains = self._chain_rows(chunks, [(f, behind) for f, behind in work if f.cell is not None])
        if not paths and not chains:
            return 0, []
        skipped = [0 if f.cell is None else len(f.text) - 1 - self._start(f) for f in moving]
        outputs = [(1 + count, behind) for count, behind in zip(skipped, guessed, strict=True)]
        found = _verified(self.drafter, self.below, paths, chains, outputs)
        for tree, path, context, _, stop in chunks.values():
            path.tokens = context[:stop]
            path.table.share_computed(tree.tokens, min(stop, tree.base))
        for (frontier, behind), count, guesses in zip(work, skipped, found, strict=True):
            # Wrong guesses have keys and values, too. They are listed, so that `agreed` finds the difference.
            if frontier.cell is None:
                self._paths[frontier.tree.request].tokens += behind
            else:
                self._chains[frontier.cell] = frontier.text + behind
            frontier.guessed += [guess.token for guess in guesses[count:]]
        return sum(chunk.stop - chunk.start for chunk in chunks.values()), moving

    def _fits(self, frontier: Frontier) -> bool:
        longest = frontier.tree.base + frontier.fork + len(frontier.text) + frontier.left
        return frontier.cell is None or longest <= self.drafter.max_position

    def _guesses_below(self, trees: Collection[Tree], frontiers: Sequence[Frontier]) -> list[list[int]]:
        lower = [Frontier(f.tree, f.text, f.left - 1, f.fork, f.cell) for f in frontiers]
        if self.below is not None:
            self.below.propose(trees, lower)
        return [frontier.guessed for frontier in lower]

    def _chunks(self, trees: Collection[Tree], frontiers: Sequence[Frontier]) -> dict[int, _CascadeChunk]:
        """Return by request the tokens of each path to compute now, with its frontier's."""
        growing = {frontier.tree.request: frontier for frontier in frontiers if frontier.cell is None}
        chunks, budget = {}, PATH_TOKENS
        for tree in trees:
            if tree.request not in self._paths:
                self._paths[tree.request] = _CascadePath(PageTable(self.drafter.pool, tree.table.salt), tree)
            path, frontier = self._paths[tree.request], growing.get(tree.request)
            context = tree.path[: wanted(tree)] if frontier is None else tree.path + frontier.text
            # A path that is to grow computes at least its last token, which predicts the next.
            start = min(path.agreed(tree, context), len(context) - (frontier is not None))
            stop = min(len(context), start + budget)
            length = stop if frontier is None else stop + frontier.left
            if length <= self.drafter.max_position and path.grow(length):
                budget -= stop - start
                chunks[tree.request] = _CascadeChunk(tree, path, context, start, stop)
        return chunks

    def _path_rows(self, chunks: dict[int, _CascadeChunk], growing: dict[int, list[int]]) -> list[PathRow]:
        rows = []
        for request, chunk in chunks.items():
            tokens = chunk.context[chunk.start : chunk.stop] + growing.get(request, [])
            if tokens:
                outputs = 1 + len(growing[request]) if request in growing else 0
                rows.append(PathRow(chunk.tree, Row(tokens, chunk.start, chunk.path.table.pages, outputs)))
        return rows

    def _chain_rows(
        self, chunks: dict[int, _CascadeChunk], work: Sequence[tuple[Frontier, list[int]]]
    ) -> list[ChainRows]:
        chains: dict[int, ChainRows] = {}
        for frontier, guessed in work:
            assert frontier.cell is not None
            tree = frontier.tree
            pages = chunks[tree.request].path.table.pages
            own = chains.setdefault(tree.request, ChainRows(tree, ChainTokens(pages, tree.base))).tokens
            start = self._start(frontier)
            own.add(frontier.fork, frontier.cell, start, frontier.text[start:] + guessed)
        return list(chains.values())

    def _start(self, frontier: Frontier) -> int:
        assert frontier.cell is not None
        return min(common_prefix_length(self._chains.get(frontier.cell, []), frontier.text), len(frontier.text) - 1)


def drafting_speed(length: int, acceptance: float, forward: LinearCost, chains: int, token_s: float) -> float:
    """Return each chain's tokens per second, if a forward verifies `length` guesses of each.

    `forward` is the larger draft's time by rows of the batch, `token_s` the seconds of one more guess for all
    chains."""
    return expected_tokens(acceptance, length) / (forward.at(chains * (1 + length)) + length * token_s)


def best_length(acceptance: float, forward: LinearCost, chains: int, token_s: float, most: int) -> int:
    """Return the length, 0 to `most`, with the highest `drafting_speed`."""
    return max(range(most + 1), key=lambda length: drafting_speed(length, acceptance, forward, chains, token_s))
