"""What the draft knows about one sequence: the path in flight, and a chain for every outcome it prepares for.

    committed tokens | line: l_1 l_2 ... l_d (in flight) l_{d+1} ... (drafted beyond)
                   ^ node 0    ^ node 1
                         \\ chains fork after node k: t*, c_1, c_2, ...

Keys and values of committed tokens and of the line lie in pages, those of chains in the arena. Plain values only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from torch import Tensor

from ssd.execution.pages import PageTable
from ssd.ipc.board import Key
from ssd.ipc.messages import Admit, Launch
from ssd.ipc.messages import Outcome as OutcomeRow
from ssd.params import Speculation
from ssd.speculation.acceptance import coupled
from ssd.speculation.learner import Mean
from ssd.speculation.outcome import forks
from ssd.speculation.sampling import Law

# Acceptance of a sequence: a guess that counts as some samples, and how fast old ones fade.
_ACCEPTANCE, _SAMPLES, _SMOOTHING = 0.5, 8, 0.05


class Guess(NamedTuple):
    """What may follow a token: the `token` that the draft goes on with, the likeliest `candidates` for a bonus token,
    best first, and the `law` [V] that the token was drawn from if the ratio rule will ask (else None). `feature`
    [width] is what an EAGLE-3 head made of the token before, and goes on from."""

    token: int
    candidates: list[int]
    law: Tensor | None = None
    feature: Tensor | None = None


def confirmed(guesses: Sequence[Guess], guessed: Sequence[int]) -> list[Guess]:
    """Those of `guesses` that hold, if `guesses[i]` is about what follows the first i of `guessed` tokens, which a
    smaller draft thought of: as many as are right, and one more."""
    return list(guesses[: coupled(guessed, [guess.token for guess in guesses]).accepted + 1])


def agreed(one: Sequence[int], other: Sequence[int], sure: int = 0) -> int:
    """How many tokens two texts begin with in common; of the first `sure` it is known."""
    pairs = zip(one[sure:], other[sure : len(one)], strict=False)
    return sure + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@dataclass
class Chain:
    """A speculation for the outcome (`fork`, tokens[0]): `tokens` holds t*, c_1, c_2, ...

    The first `computed` of them have keys and values in place `cell` of the arena, unless it lost its place, and
    `guesses[i]` is about the token after tokens[i]. `entry` is its number on the board, `probability` that of its
    outcome.
    """

    fork: int
    tokens: list[int]
    cell: int | None
    entry: int
    probability: float = 1.0
    computed: int = 0
    guesses: list[Guess] = field(default_factory=list)


class Tree:
    """The state of one sequence. `computed` tokens of `path` have keys and values in pages; `acceptance` is how often
    its draft tokens are right.

    `in_flight` is how many line tokens the target verifies now, None while it has not said (it waits for the line).
    `recurrent`: beyond the committed tokens each is computed from what the one before it gave, and again, from what the
    target made of them (`tags` names its features), once they are committed; there is no row for the first token.
    """

    def __init__(self, admit: Admit, epoch: int, table: PageTable, recurrent: bool = False) -> None:
        self.request, self.slot, self.table = admit.request, admit.slot, table
        self.law = Law(admit.temperature, admit.top_k, admit.top_p, admit.min_p, admit.seed)
        self.speculation, self.lookahead = admit.speculation, admit.speculation.num_speculative_tokens
        self.tokens = list(admit.token_ids)
        self.line: list[int] = []
        self.guesses: dict[int, Guess] = {}
        self.chains: list[Chain] = []
        self.acceptance = Mean(_ACCEPTANCE, _SMOOTHING, _SAMPLES)
        self.recurrent, self.tags = recurrent, list[int]()
        self.computed = 1 if recurrent else table.adopt_prefix(self.tokens)
        self.round = admit.round
        self.in_flight: int | None = 0
        self.answers: Key | None = None  # the missed outcome that the line answers
        self.entries = 0  # of the board, given to chains in this round
        self._epoch, self._forked = epoch, 0

    @property
    def ratio_rule(self) -> bool:
        """See `Speculation.ratio_rule`."""
        return self.speculation.ratio_rule(self.law.temperature)

    @property
    def path(self) -> list[int]:
        return self.tokens + self.line

    @property
    def base(self) -> int:
        return len(self.tokens)

    @property
    def verified(self) -> int:
        """How many line tokens the target verifies now, or may when it takes up the line."""
        return len(self.line) if self.in_flight is None else self.in_flight

    @property
    def wanted(self) -> int:
        """Length of the path whose keys, values and guesses are needed."""
        return self.base + self.verified

    def key(self, accepted: int, token: int) -> Key:
        """The board's key of an outcome of the verification in flight."""
        return Key(self._epoch, self.request, self.round, self.base, accepted, token)

    # -- what the target says ---------------------------------------------------------------------------------------

    def outcome(self, row: OutcomeRow) -> Chain | None:
        """Commit; returns the winning chain, whose keys and values the caller must move to the pages before it drops
        the chains.

        Raises `ValueError` for an outcome that does not follow from what this side knows.
        """
        known = self.verified
        if row.round != self.round or row.accepted > known:
            raise ValueError(f"outcome {row} does not follow round {self.round} with {known} tokens in flight")
        accepted, token = row.accepted, row.token
        self.acceptance.note_outcome(known, accepted)
        winner = next((c for c in self.chains if c.fork == accepted and c.tokens[0] == token), None)
        key = self.key(accepted, token)
        self.computed = min(self.computed, self.base + (0 if self.recurrent else accepted))
        self.tokens += [*self.line[:accepted], token]
        self.line, self.guesses, self._forked, self.entries = [], {}, 0, 0
        self.round += 1
        self.in_flight = None if row.in_flight < 0 else row.in_flight
        self.answers = key if self.in_flight is None else None
        if winner is not None:
            self.line = winner.tokens[1:]
            self.guesses = dict(enumerate(winner.guesses))
        if self.in_flight is not None:
            self.in_flight = min(self.in_flight, len(self.line))
        return winner

    def launched(self, row: Launch) -> None:
        """The target verifies the first tokens of the line now, or others, which become the line."""
        if row.round != self.round or self.in_flight is not None:
            return
        if row.tokens:
            kept = agreed(self.line, row.tokens)
            self.line = list(row.tokens)
            self.computed = min(self.computed, self.base + kept)
            self.guesses = {node: guess for node, guess in self.guesses.items() if node <= kept}
        self.in_flight, self.answers = min(row.in_flight, len(self.line)), None

    def retune(self, speculation: Speculation) -> None:
        """Another K and other fan-outs from now on; chains that exist stay."""
        self.speculation, self.lookahead = speculation, speculation.num_speculative_tokens
        self._grow_line()

    # -- what there is to do ----------------------------------------------------------------------------------------

    def pending(self, most: int) -> list[int]:
        """The next tokens of the path without keys and values that one forward can compute, at most `most`."""
        stop = min(self.wanted, self.computed + most)
        if self.recurrent:
            stop = min(stop, max(self.base, self.computed + 1))
        return self.path[self.computed : stop]

    def extended(self, count: int, guesses: list[Guess]) -> bool:
        """`count` tokens of the path were computed; `guesses` follow the last ones. True if the line grew."""
        self.computed += count
        for offset, guess in enumerate(reversed(guesses)):
            node = self.computed - offset - self.base
            if node >= 0:
                if node in self.guesses and node < len(self.line):  # computed again: the line's token stays as drawn
                    guess = guess._replace(token=self.line[node], law=self.guesses[node].law)
                self.guesses[node] = guess
        return self._grow_line()

    def _grow_line(self) -> bool:
        """Another token, where the target waits for the line, the last one was computed and K allows it."""
        length = len(self.line)
        if self.in_flight is not None or self.computed < self.base + length or length >= self.lookahead:
            return False
        self.line.append(self.guesses[length].token)
        return True

    def outputs(self, count: int) -> int:
        """How many of the next `count` path tokens need guesses: those from the last committed one on."""
        return max(0, min(count, self.computed + count - self.base + 1))

    def new_forks(self) -> list[tuple[int, int]]:
        """(fork, token) of the outcomes that have become predictable and have no chain yet."""
        if self.in_flight is None or self.speculation.mode != "ssd":
            return []
        found: list[tuple[int, int]] = []
        in_flight = self.line[: self.in_flight]
        # What a chain without a place had guessed is known before its keys and values are there again.
        known = min(self.in_flight, self.computed - self.base)
        while self._forked <= known and self._forked in self.guesses:
            candidates = self.guesses[self._forked].candidates
            found += forks(self._forked, in_flight, candidates, self.speculation.fan_out)
            self._forked += 1
        return found
