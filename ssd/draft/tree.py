"""The draft's tree of one sequence: its path, and a chain for each outcome that it prepares.

    committed tokens | trunk: s_1 s_2 ... s_d (in flight) s_{d+1} ... (drafted beyond)
                   ^ node 0    ^ node 1
                         \\ chains fork after node k: t*, c_1, c_2, ...

The path is the committed tokens and the trunk; its keys and values lie in pages, those of chains in the chain cache.
Plain values only: tensors occur in guesses alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from ssd.config.params import Speculation
from ssd.draft.chances import Node
from ssd.draft.grammar import DraftGrammar
from ssd.execution.pages import PageTable
from ssd.ipc.board import Key
from ssd.ipc.messages import Admit, Launch, Verified
from ssd.speculation.acceptance import common_prefix_length
from ssd.speculation.ngram import LONGEST, SHORTEST, Copied, PromptLookup
from ssd.speculation.rules import AcceptanceRule
from ssd.tuning.estimates import Mean

# Acceptance rate of a sequence: its initial value, the samples this counts as, and the smoothing.
_ACCEPTANCE, _SAMPLES, _SMOOTHING = 0.5, 8, 0.05


class Guess(NamedTuple):
    """A prediction: the next `token`, and `candidates` for a bonus token, best first.

    `draft_probs` [V] drew the token; None if no rule needs them. A copied token need not be a candidate. `feature`
    [width] is of a draft that reads features."""

    token: int
    candidates: list[int]
    draft_probs: Tensor | None = None
    feature: Tensor | None = None
    scores: Sequence[float] = ()


@dataclass
class Chain:
    """A speculation for the outcome (`fork`, tokens[0]); `tokens` are t*, c_1, c_2, ...

    The first `computed` tokens have keys and values in `cell`, which is None once a likelier chain took it.
    `guesses[i]` predicts the token after tokens[i]. `entry`: its number on the board. t* is the `rank`-th, from 1, of
    `fan_out` bonus tokens with a chain at this fork."""

    fork: int
    tokens: list[int]
    cell: int | None
    entry: int
    probability: float = 1.0
    rank: int = 1
    fan_out: int = 1
    computed: int = 0
    guesses: list[Guess] = field(default_factory=list)


class Chains:
    """Owns the chains of one trunk, in the order of their board entries.

    Chains are `waiting` until a step grows them. `nodes` by fork: those that a joint allocation has seen. `reached`:
    the probability that the trunk tokens before the next fork are right."""

    def __init__(self) -> None:
        self._chains, self.waiting = list[Chain](), list[Chain]()
        self.entries, self.nodes, self.reached = 0, dict[int, Node](), 1.0
        self._forks = 0

    def __iter__(self) -> Iterator[Chain]:
        return iter(self._chains)

    def add(self, chain: Chain) -> None:
        chain.entry, self.entries = self.entries, self.entries + 1
        self._chains.append(chain)

    def of(self, accepted: int, token: int) -> Chain | None:
        return next((chain for chain in self if chain.fork == accepted and chain.tokens[0] == token), None)

    def new_forks(self, known: int, guesses: Mapping[int, Guess]) -> Iterator[int]:
        """Yield the forks within `known` tokens that have got a guess since the last call."""
        while self._forks <= known and self._forks in guesses:
            yield self._forks
            self._forks += 1

    def clear(self) -> list[Chain]:
        over, self._chains, self.waiting, self._forks = self._chains, [], [], 0
        self.entries, self.nodes, self.reached = 0, {}, 1.0
        return over

    def cut(self, kept: int, next_token: int | None) -> list[Chain]:
        """Keep chains that fork before trunk token `kept`, or there without `next_token`; return the others."""
        over = [c for c in self if _is_cut(c, kept, next_token)]
        self._chains = [chain for chain in self if chain not in over]
        self.waiting = [chain for chain in self.waiting if not _is_cut(chain, kept, next_token)]
        self._forks = min(self._forks, kept + 1)
        self.nodes = {node: known for node, known in self.nodes.items() if node <= kept}
        if kept in self.nodes:
            self.nodes[kept] = self.nodes[kept]._replace(in_flight=next_token)
        return over


def _is_cut(chain: Chain, kept: int, next_token: int | None) -> bool:
    return chain.fork > kept or (chain.fork == kept and chain.tokens[0] == next_token)


class Tree:
    """Owns the path of one sequence, from which its `chains` fork; `DraftEngine` applies messages to it.

    `trunk`: draft tokens after the committed ones, verified now or waited for after a miss. `in_flight` of them are
    being verified; None while the target waits. `ahead`: draft tokens behind the trunk, which a launch has cut short.
    `guesses[k]` predicts the token after k trunk tokens. The first `computed` tokens of `path` have keys and values.
    With `shares_cores` the draft `rests` in `sd` while the target verifies tokens of its own. `ended`: the trunk's
    probability `reached` is below `least`, so no more tokens follow.

    `recurrent` (a draft that reads hidden states of the target): draft tokens are computed from its own states, and
    again from the target's (named by `tags`) once committed. The first token has no row."""

    chains_type = Chains

    def __init__(self, admit: Admit, epoch: int, table: PageTable, recurrent: bool = False) -> None:
        self.request, self.slot, self.table = admit.request, admit.slot, table
        self.law = admit.law
        self.speculation, self.lookahead = admit.speculation, admit.speculation.num_speculative_tokens
        self.tokens = list(admit.token_ids)
        self.trunk: list[int] = []
        self.ahead: list[int] = []
        self.guesses: dict[int, Guess] = {}
        self.chains = self.chains_type()
        self.acceptance = Mean(_ACCEPTANCE, _SMOOTHING, _SAMPLES)
        self.recurrent, self.tags = recurrent, list[int]()
        self.computed = 1 if recurrent else table.adopt_prefix(self.tokens)
        self.round = admit.round
        self.in_flight: int | None = 0
        self.shares_cores = self.rests = self.ended = False
        self.least, self.reached = 0.0, 1.0
        self.rates: Sequence[float] = ()  # `Chances.rates` of its law, after an outcome
        self.answers: Key | None = None  # the missed outcome that the trunk answers
        self.lookup = PromptLookup()
        self.grammar: DraftGrammar | None = None
        self._epoch = epoch

    @property
    def rule(self) -> AcceptanceRule:
        return self.speculation.rule(self.law.temperature)

    @property
    def joint(self) -> bool:
        """Return True if chains go to the likeliest outcomes of the whole trunk, without F_k."""
        return self.speculation.mode == "ssd" and not self.speculation.fan_out

    @property
    def path(self) -> list[int]:
        return self.tokens + self.trunk

    @property
    def base(self) -> int:
        return len(self.tokens)

    @property
    def verified(self) -> int:
        """Return how many trunk tokens the target verifies now, or may when it takes the trunk."""
        return len(self.trunk) if self.in_flight is None else self.in_flight

    @property
    def most(self) -> int:
        """Return how many tokens a trunk may have for which the target waits."""
        return len(self.trunk) if self.ended else self.lookahead

    def key(self, accepted: int, token: int) -> Key:
        return Key(self._epoch, self.request, self.round, self.base, accepted, token)

    def outcome(self, row: Verified) -> Chain | None:
        """Commit an outcome; return the winning chain, if one was prepared.

        The caller must copy its keys and values to the pages before it clears the chains. Raises ValueError for another
        round, or more accepted tokens than are in flight."""
        known, accepted, token = self.verified, row.accepted, row.token
        if row.round != self.round or accepted > known:
            raise ValueError(f"outcome {row} does not follow round {self.round} with {known} tokens in flight")
        # Where a trunk may end, the draft was surer than usual of all tokens but the first.
        tested = min(known, 1) if self.least else known
        self.acceptance.note_outcome(tested, min(accepted, tested))
        winner, key = self.chains.of(accepted, token), self.key(accepted, token)
        self.computed = min(self.computed, self.base + (0 if self.recurrent else accepted))
        self.tokens += [*self.trunk[:accepted], token]
        self.trunk, self.ahead, self.guesses, self.rests, self.ended = [], [], {}, False, False
        self.least, self.reached = row.least, 1.0
        if winner is not None:
            self.trunk, self.guesses = winner.tokens[1:], dict(enumerate(winner.guesses))
        self.round += 1
        self.in_flight = None if row.in_flight is None else min(row.in_flight, len(self.trunk))
        self.answers = key if self.in_flight is None else None
        return winner

    def launched(self, row: Launch) -> list[Chain]:
        """Note that the target verifies the first trunk tokens now, or its own, which become the trunk.

        Returns the chains that do not fork from the trunk."""
        if row.round != self.round or self.in_flight is not None:
            return []
        before, self.trunk = self.trunk, self._launched_trunk(row)
        kept = common_prefix_length(before, self.trunk)
        self.ahead = before[kept:] if kept == len(self.trunk) else []
        self.computed = min(self.computed, self.base + kept)
        self.guesses = {node: guess for node, guess in self.guesses.items() if node <= kept}
        self.in_flight, self.answers = min(row.in_flight, len(self.trunk)), None
        self.rests = self.shares_cores and bool(row.tokens) and self.speculation.mode == "sd"
        self.ended = self.ended and not row.tokens
        return self.chains.cut(kept, self.trunk[kept] if kept < len(self.trunk) else None)

    def _launched_trunk(self, row: Launch) -> list[int]:
        return list(row.tokens) or self.trunk

    def retune(self, speculation: Speculation) -> None:
        """Use another K and other fan-outs; chains stay, but `sd` gives up those that wait."""
        if speculation.mode != "ssd":
            self.chains.waiting = []
        self.speculation, self.lookahead = speculation, speculation.num_speculative_tokens
        self._grow_trunk()

    def extended(self, count: int, guesses: list[Guess]) -> bool:
        """Note that the next `count` path tokens are computed; return True if the trunk grew.

        `guesses` are those after the last of these tokens, in order."""
        self.computed += count
        for offset, guess in enumerate(reversed(guesses)):
            node = self.computed - offset - self.base
            if node >= 0:
                if node in self.guesses and node < len(self.trunk):  # computed again: the token stays as drawn
                    drawn = self.guesses[node].draft_probs
                    guess = guess._replace(token=self.trunk[node], draft_probs=drawn)
                self.guesses[node] = guess
        return self._grow_trunk()

    def _grow_trunk(self) -> bool:
        length = len(self.trunk)
        if self.in_flight is not None or self.computed < self.base + length or length >= self.most:
            return False
        self.guesses[length] = self.corrected(self.guesses[length], self.trunk)
        self.trunk.append(self.guesses[length].token)
        return True

    def corrected(self, guess: Guess, drafts: Sequence[int]) -> Guess:
        """Return the guess after `drafts`, with the token of a long repetition, which is right far more often.

        A rule may need the token that was drawn instead."""
        if not self.rule.allows_copies or not self.joint:
            return guess
        copied = copied_after(self, drafts, LONGEST)
        return guess if copied is None else guess._replace(token=copied.token)


def copied_after(tree: Tree, drafts: Sequence[int], shortest: int = SHORTEST) -> Copied | None:
    """Return what followed the last tokens and `drafts` earlier in the text, if the grammar allows it."""
    tree.lookup.extend(tree.tokens[len(tree.lookup) :])
    copied = tree.lookup.after(drafts, shortest)
    if copied is None or tree.grammar is None or tree.grammar.allows(tree.tokens, drafts, copied.token):
        return copied
    return None
