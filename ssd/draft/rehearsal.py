"""Runs tree steps of a made-up sequence, which the target measures before the first request."""

from __future__ import annotations

from ssd.config.params import MAX_LOOKAHEAD, Speculation
from ssd.draft.chain_cache import ChainTokens
from ssd.draft.drafter import ChainRows, Drafter
from ssd.draft.tree import Tree
from ssd.execution.pages import OutOfPages, PageTable
from ssd.ipc.messages import Admit
from ssd.law import Law


class Rehearsal:
    """Owns `rows` chains of one token behind `text` tokens, if there is room, until `close`."""

    def __init__(self, drafter: Drafter, rows: int, text: int) -> None:
        self._drafter, self.depths = drafter, min(drafter.block or 1, MAX_LOOKAHEAD)
        length = min(text, min(drafter.max_position, drafter.pool.count * drafter.pool.size) - self.depths - 1)
        admit = Admit(0, 0, 0, [0] * length, Law(), Speculation("ssd", 1, (1,)))
        self._table = PageTable(drafter.pool)
        self._tree = Tree(admit, 0, self._table, drafter.recurrent)
        self._tree.guesses[0] = drafter.blank_guess()
        self._cells: list[int] = []
        try:
            self._table.grow(length)
        except OutOfPages:
            return
        drafter.runner.cache.blank(self._table.pages)
        self._table.state_computed(length)  # what the state holds makes no difference to the time
        tokens = ChainTokens(self._table.pages, length)
        while len(self._cells) < rows and (cell := drafter.chain_cache.take()) is not None:
            self._cells.append(cell)
            tokens.add(0, cell, 0, [0])
        self._rows = [ChainRows(self._tree, tokens)]

    def step(self) -> int:
        """Run a forward; return how many tokens it guessed, 0 if there was no room."""
        chains = len(self._cells)
        if chains and self._drafter.block:
            self._drafter.several([], self._rows, [self.depths - 1] * chains)
        elif chains:
            list(self._drafter.forward([], self._rows))
        return chains * self.depths

    def close(self) -> None:
        self._table.free()
        self._drafter.chain_cache.give_back(self._cells)
