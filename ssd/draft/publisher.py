"""Publishes tokens on the board, and under the ratio rule their draft probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from ssd.draft.tree import Chain, Guess, Tree
from ssd.execution.runner import Runner
from ssd.ipc.board import ENDED, TRUNK, DraftBoard, Key, Place, Prepared
from ssd.ipc.draft_probs import DraftProbsArena


class Publisher:
    """Owns the chains whose new tokens are not on the board yet.

    Chains are published at once, or if the `runner` overlaps, while it computes the next tokens (`post`)."""

    def __init__(self, board: DraftBoard, draft_probs: DraftProbsArena | None, runner: Runner) -> None:
        self._board, self._draft_probs, self._runner = board, draft_probs, runner
        self._unposted: dict[Tree, dict[int, Chain]] = {}  # by entry

    def trunk(self, tree: Tree) -> None:
        if tree.answers is not None and tree.trunk:
            trunk = [tree.guesses[index] for index in range(min(len(tree.trunk), tree.lookahead))]
            self._write_probs(tree, TRUNK, tree.answers, 0, trunk)
            self._show_probs()
            place = ENDED if tree.ended else Place(0, 0)
            self._board.publish(tree.slot, [Prepared(TRUNK, tree.answers, tree.trunk[: tree.lookahead], place)])

    def chain(self, tree: Tree, chain: Chain, before: int) -> None:
        """Write the draft probabilities of a chain's tokens after `before`, under the ratio rule."""
        if tree.rule.needs_draft_probs:
            key, guesses = tree.key(chain.fork, chain.tokens[0]), chain.guesses[before : tree.lookahead]
            self._write_probs(tree, chain.entry, key, before, guesses)

    def chains(self, tree: Tree, chains: Sequence[Chain]) -> None:
        self._unposted.setdefault(tree, {}).update((chain.entry, chain) for chain in chains)
        if not self._runner.overlaps:
            self.post()

    def post(self) -> None:
        if self._unposted:
            self._show_probs()
        for tree, own in self._unposted.items():
            prepared = [
                Prepared(
                    entry,
                    tree.key(chain.fork, chain.tokens[0]),
                    chain.tokens[1 : tree.lookahead + 1],
                    Place(chain.rank, chain.fan_out),
                )
                for entry, chain in own.items()
            ]
            self._board.publish(tree.slot, prepared)
        self._unposted.clear()
        self._board.flush()

    def forget(self, tree: Tree) -> None:
        self._unposted.pop(tree, None)

    def _write_probs(self, tree: Tree, entry: int, key: Key, start: int, guesses: Sequence[Guess]) -> None:
        if self._draft_probs is not None and tree.rule.needs_draft_probs:
            tokens = [guess.token for guess in guesses]
            probs = [guess.draft_probs for guess in guesses if guess.draft_probs is not None]
            self._draft_probs.write(tree.slot, entry, key, start, tokens, probs)

    def _show_probs(self) -> None:
        """Make written draft probabilities visible, before their tokens are published."""
        if self._draft_probs is not None:
            self._draft_probs.show()
