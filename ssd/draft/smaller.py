"""A smaller draft below a larger one: a level of a cascade (`ssd.speculation.cascade`).

It guesses what the larger model will say on every path and chain; that one verifies the guesses in the forward that it
would take anyway. What is kept of a sequence is a cache: the tokens that no longer fit are computed again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ssd.draft.arena import Branches
from ssd.draft.level import Chains, Level, Paths, rows_of
from ssd.draft.tree import Guess, Tree, agreed, confirmed
from ssd.execution.batch import Row
from ssd.execution.pages import OutOfPages, PageTable
from ssd.speculation.cascade import best_length
from ssd.speculation.learner import LineFit, Mean

log = logging.getLogger("ssd.draft")

# Path tokens computed in one forward: bounds how long a prompt keeps the larger draft waiting.
_CHUNK = 128
# A forward that computes more of a path than this says little about what a guess costs.
_USUAL = 8
# A level that does not pay guesses one token every so many times: it may begin to.
_PROBE_EVERY = 32
_REPORT_EVERY = 256
_ACCEPTANCE = 0.5  # until it is known


@dataclass
class Tip:
    """Where guesses are wanted, at most `most`: after `tokens`, which follow the path up to line token `fork` in the
    arena's place `cell`, or, without a cell, the whole path."""

    tree: Tree
    tokens: list[int]
    most: int
    fork: int = 0
    cell: int | None = None
    found: list[int] = field(default_factory=list)

    @property
    def text(self) -> list[int]:
        return self.tokens + self.found

    @property
    def left(self) -> int:
        return self.most - len(self.found)


class _Path:
    """Of one sequence, the first `tokens` with keys and values here."""

    def __init__(self, table: PageTable, tree: Tree) -> None:
        self.table = table
        self.tokens = tree.tokens[: table.adopt_prefix(tree.tokens)]
        self._sure, self._lost = 0, False

    def agreed(self, tree: Tree, tokens: Sequence[int]) -> int:
        """How many tokens are also the first ones of `tokens`, which begin as the path of `tree` does."""
        found = agreed(self.tokens, tokens, self._sure)
        self._sure = min(found, tree.base)  # what is committed stays
        return found

    def grow(self, length: int) -> bool:
        """Make room for so many tokens. A path that once found none stays without."""
        if not self._lost:
            try:
                self.table.grow(length)
            except OutOfPages:
                self.table.free()
                self.tokens, self._sure, self._lost = [], 0, True
        return not self._lost


class _Piece(NamedTuple):
    """What the next forward computes of `context`, which begins with the tokens of `path`: `start` to `stop`."""

    tree: Tree
    path: _Path
    context: list[int]
    start: int
    stop: int

    @property
    def whole(self) -> bool:
        return self.stop == len(self.context)


class SmallerDraft:
    """`level` guesses, helped by the next smaller draft, `below`. Places in its arena have the numbers of the larger
    draft's."""

    def __init__(self, level: Level, below: SmallerDraft | None = None) -> None:
        self.level, self.below = level, below
        self._paths: dict[int, _Path] = {}
        self._chains: dict[int, list[int]] = {}  # cell -> the tokens of a chain that have keys and values
        self._acceptance, self._token_s = Mean(_ACCEPTANCE), Mean(0.0)
        self._forward = LineFit()  # the larger draft's
        self._calls = 0

    # -- for the larger draft ---------------------------------------------------------------------------------------

    def propose(self, trees: Sequence[Tree], tips: Sequence[Tip]) -> list[list[int]]:
        """Guesses for every tip, as many as pay. `tips` of paths come first, and all in the order of `trees`."""
        growing = [tip for tip in tips if tip.most > 0]
        length = self._worthwhile(growing)
        if length:
            self._guess(trees, [replace(tip, most=min(tip.most, length), found=tip.found) for tip in growing])
        return [tip.found for tip in tips]

    def judge(self, rows: int, seconds: float, verdicts: Iterable[tuple[int, int]]) -> None:
        """The larger draft's forward of so many rows took so long, and accepted so many of so many guesses."""
        self._forward.note(rows, seconds)
        for guessed, accepted in verdicts:
            self._acceptance.note_outcome(guessed, accepted)

    def promote(self, tree: Tree, cell: int, tokens: Sequence[int]) -> None:
        """The chain in `cell` has just become the last committed token and the line: keys and values follow."""
        path, start = self._paths.get(tree.request), tree.base - 1
        count = agreed(self._chains.get(cell, []), tokens)
        if path is not None and count and path.agreed(tree, tree.tokens) >= start and path.grow(start + count):
            self.level.promote(path.table, start, cell, count)
            path.tokens[start:] = tokens[:count]
        if self.below is not None:
            self.below.promote(tree, cell, tokens)

    def forget_chains(self, cells: Sequence[int]) -> None:
        """These places will hold other chains."""
        for cell in cells:
            self._chains.pop(cell, None)
        if self.below is not None:
            self.below.forget_chains(cells)

    def release(self, request: int) -> None:
        """Forget a sequence."""
        if request in self._paths:
            self._paths.pop(request).table.free()
        if self.below is not None:
            self.below.release(request)

    def _worthwhile(self, tips: Sequence[Tip]) -> int:
        """How many guesses pay, by what was measured."""
        self._calls += 1
        if not (tips and self._forward.known and self._token_s.count):
            return 1
        figures = self._acceptance.value, self._forward.line(), len(tips), self._token_s.value
        length = best_length(*figures, max(tip.most for tip in tips))
        if self._calls % _REPORT_EVERY == 0:
            log.info("cascade: %d guesses; acceptance %.2f, forward %s, chains %d, guess %.5f s", length, *figures)
        return length or int(self._calls % _PROBE_EVERY < 2)  # the second time, paths have caught up

    # -- guessing ---------------------------------------------------------------------------------------------------

    def _guess(self, trees: Sequence[Tree], tips: Sequence[Tip]) -> None:
        """As many tokens as each tip wants; fewer, or none, where the path is not computed yet or cannot be."""
        while True:
            began, before = time.perf_counter(), sum(len(tip.found) for tip in tips)
            caught_up, grown = self._step(trees, tips)
            new = sum(len(tip.found) for tip in tips) - before
            if new and caught_up <= _USUAL * len(trees):
                self._token_s.note((time.perf_counter() - began) * len(grown) / new)
            tips = [tip for tip in grown if tip.left > 0]
            if not tips:
                return

    def _step(self, trees: Sequence[Tree], tips: Sequence[Tip]) -> tuple[int, list[Tip]]:
        """One forward: paths catch up, and a tip grows if its path is complete. Returns how many path tokens were
        computed, and the tips that have grown."""
        pieces = self._pieces(trees, tips)
        tips = [
            tip for tip in tips if tip.tree.request in pieces and pieces[tip.tree.request].whole and self._fits(tip)
        ]
        work = list(zip(tips, self._helps(trees, tips), strict=True))
        paths = self._path_rows(pieces, {tip.tree.request: help for tip, help in work if tip.cell is None})
        chains = self._chain_rows(pieces, [(tip, help) for tip, help in work if tip.cell is not None])
        if not paths and not chains:
            return 0, []
        began = time.perf_counter()
        guesses = self.level.forward(paths, chains)
        for tree, path, context, _, stop in pieces.values():
            path.tokens = context[:stop]
            path.table.share_computed(tree.tokens, min(stop, tree.base))
        verdicts = [(len(help), self._grow(tip, help, guesses)) for tip, help in work]
        if self.below is not None:
            self.below.judge(rows_of(paths, chains), time.perf_counter() - began, verdicts)
        return sum(piece.stop - piece.start for piece in pieces.values()), tips

    def _fits(self, tip: Tip) -> bool:
        """Whether this model's context is long enough for a chain."""
        return tip.cell is None or tip.tree.base + tip.fork + len(tip.text) + tip.left <= self.level.max_position

    def _helps(self, trees: Sequence[Tree], tips: Sequence[Tip]) -> list[list[int]]:
        """What the next smaller draft thinks; this one adds a token of its own."""
        if self.below is None:
            return [[] for _ in tips]
        return self.below.propose(trees, [Tip(t.tree, t.text, t.left - 1, t.fork, t.cell) for t in tips])

    def _pieces(self, trees: Sequence[Tree], tips: Sequence[Tip]) -> dict[int, _Piece]:
        """By request, how far each path is brought now, its own tip included; none of a path that cannot be."""
        growing = {tip.tree.request: tip for tip in tips if tip.cell is None}
        pieces, budget = {}, _CHUNK
        for tree in trees:
            path, tip = self._path(tree), growing.get(tree.request)
            context = tree.path[: tree.wanted] if tip is None else tree.path + tip.text
            # Of a path that is to grow one row at least: it says what follows.
            start = min(path.agreed(tree, context), len(context) - (tip is not None))
            stop = min(len(context), start + budget)
            room = stop if tip is None else stop + tip.left
            if room <= self.level.max_position and path.grow(room):
                budget -= stop - start
                pieces[tree.request] = _Piece(tree, path, context, start, stop)
        return pieces

    def _path(self, tree: Tree) -> _Path:
        if tree.request not in self._paths:
            self._paths[tree.request] = _Path(PageTable(self.level.pool, tree.table.salt), tree)
        return self._paths[tree.request]

    def _path_rows(self, pieces: dict[int, _Piece], lines: dict[int, list[int]]) -> list[Paths]:
        """Rows of the paths; `lines` are guesses after those that are to grow."""
        rows = []
        for request, piece in pieces.items():
            tokens = piece.context[piece.start : piece.stop] + lines.get(request, [])
            if tokens:
                outputs = 1 + len(lines[request]) if request in lines else 0
                rows.append(Paths(piece.tree, Row(tokens, piece.start, piece.path.table.pages, outputs)))
        return rows

    def _chain_rows(self, pieces: dict[int, _Piece], work: Sequence[tuple[Tip, list[int]]]) -> list[Chains]:
        chains: dict[int, Chains] = {}
        for tip, help in work:
            assert tip.cell is not None
            tree = tip.tree
            pages = pieces[tree.request].path.table.pages
            branches = chains.setdefault(tree.request, Chains(tree, Branches(pages, tree.base))).branches
            start = self._start(tip)
            branches.add(tip.fork, tip.cell, start, tip.text[start:] + help)
        return list(chains.values())

    def _start(self, tip: Tip) -> int:
        """The first token of a chain to compute, the last one at the latest."""
        assert tip.cell is not None
        return min(agreed(self._chains.get(tip.cell, []), tip.text), len(tip.text) - 1)

    def _grow(self, tip: Tip, help: list[int], guesses: Iterator[Guess]) -> int:
        """Take a tip's rows of the forward; returns how many guesses of the level below were right."""
        skipped = 0 if tip.cell is None else len(tip.text) - 1 - self._start(tip)
        rows = [next(guesses) for _ in range(skipped + 1 + len(help))][skipped:]
        # Wrong guesses have keys and values too: what they are is known, and that they do not fit will be seen.
        if tip.cell is None:
            self._paths[tip.tree.request].tokens += help
        else:
            self._chains[tip.cell] = tip.text + help
        stands = confirmed(rows, help)
        tip.found += [guess.token for guess in stands]
        return len(stands) - 1
