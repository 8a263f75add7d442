"""The draft's tree of one sequence: its path, and a chain for each outcome that it prepares.

    committed tokens | trunk: s_1 s_2 ... s_d (in flight) s_{d+1} ... (drafted beyond)
                   ^ node 0    ^ node 1
                         \\ chains fork after node k: t*, c_1, c_2, ...

The path is the committed tokens and the trunk; its keys and values lie in pages, those of chains in the chain cache.
Plain values only: tensors occur in guesses alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from ssd.config.params import Speculation
from ssd.draft.chances import Chances, Node
from ssd.draft.grammar import DraftGrammar
from ssd.execution.pages import PageTable
from ssd.ipc.board import Key
from ssd.ipc.messages import Admit, Launch, Verified
from ssd.speculation import forks as outcomes
from ssd.speculation.acceptance import coupled
from ssd.speculation.ngram import LONGEST, SHORTEST, Copied, PromptLookup
from ssd.speculation.prefix import common_prefix_length
from ssd.speculation.rules import AcceptanceRule
from ssd.speculation.sampling import Law
from ssd.tuning.learner import Mean

# Acceptance rate of a sequence: its initial value, the samples this counts as, and the smoothing.
_ACCEPTANCE, _SAMPLES, _SMOOTHING = 0.5, 8, 0.05


class Guess(NamedTuple):
    """A prediction after a token: the next `token`, and `candidates` for a bonus token, best first, with `scores`.

    `token` was drawn from `draft_probs` [V]; None if no rule needs them. It need not be a candidate if it repeats
    earlier text. `feature` [width] is an EAGLE-3 head's feature of the token before it.
    `probabilities` are the draft's for the candidates, if the fan-out policy reads them (`ssd.speculation.forks`)."""

    token: int
    candidates: list[int]
    draft_probs: Tensor | None = None
    feature: Tensor | None = None
    probabilities: Sequence[float] = ()
    scores: Sequence[float] = ()


def confirmed(guesses: Sequence[Guess], guessed: Sequence[int]) -> list[Guess]:
    """Return the guesses that hold: one for each leading token of `guessed` that is right, and one more.

    `guesses[i]` predicts the token after the first i of the `guessed` tokens, which come from a smaller draft."""
    return list(guesses[: coupled(guessed, [guess.token for guess in guesses]).accepted + 1])


@dataclass
class Chain:
    """A speculation for the outcome (`fork`, tokens[0]); `tokens` are t*, c_1, c_2, ...

    The first `computed` tokens have keys and values in `cell` of the chain cache; `cell` is None once a likelier chain
    took it. `guesses[i]` predicts the token after tokens[i]. `entry` is the number of its board entry, `probability`
    that of its outcome. t* is the `rank`-th, from 1, of `fan_out` bonus tokens prepared for this fork."""

    fork: int
    tokens: list[int]
    cell: int | None
    entry: int
    probability: float = 1.0
    rank: int = 1
    fan_out: int = 1
    computed: int = 0
    guesses: list[Guess] = field(default_factory=list)


class Tree:
    """Owns the path and the chains of one sequence; `DraftEngine` applies the target's messages to it.

    `trunk` are the draft tokens after the committed ones: the target verifies them now, or waits for them after a miss.
    Chains fork from it. `in_flight` is the number of trunk tokens being verified; None while the target waits.
    `ahead` are draft tokens behind the trunk, where a launch has cut it short (`Launch.tokens`).
    `guesses[k]` predicts the token after k trunk tokens. The first `computed` tokens of `path` have keys and values.
    `acceptance` is the acceptance rate of the sequence. `grammar` restricts its output.

    `recurrent` (an EAGLE-3 head): draft tokens are computed from the head's own states. Once committed, they are
    computed again from the target's features (named by `tags`). The first token has no row."""

    def __init__(self, admit: Admit, epoch: int, table: PageTable, recurrent: bool = False) -> None:
        self.request, self.slot, self.table = admit.request, admit.slot, table
        self.law = Law(admit.temperature, admit.top_k, admit.top_p, admit.min_p, admit.seed)
        self.speculation, self.lookahead = admit.speculation, admit.speculation.num_speculative_tokens
        self.tokens = list(admit.token_ids)
        self.trunk: list[int] = []
        self.ahead: list[int] = []
        self.guesses: dict[int, Guess] = {}
        self.chains: list[Chain] = []
        self.acceptance = Mean(_ACCEPTANCE, _SMOOTHING, _SAMPLES)
        self.recurrent, self.tags = recurrent, list[int]()
        self.computed = 1 if recurrent else table.adopt_prefix(self.tokens)
        self.round = admit.round
        self.in_flight: int | None = 0
        self.answers: Key | None = None  # the missed outcome that the trunk answers
        self.entries = 0  # board entries that chains got in this round
        self.nodes: dict[int, Node] = {}  # by fork, this round's nodes for a joint allocation
        self.jointly = False  # this round uses a joint allocation, if `either`
        self._reached = 1.0  # probability that the trunk tokens before the next fork are right
        self._epoch, self._forked, self._lookup = epoch, 0, PromptLookup()
        self.grammar: DraftGrammar | None = None

    @property
    def rule(self) -> AcceptanceRule:
        return self.speculation.rule(self.law.temperature)

    @property
    def joint(self) -> bool:
        """Return True if chains are allocated jointly: to the likeliest outcomes of the whole trunk, without F_k."""
        return self.speculation.mode == "ssd" and (not self.speculation.fan_out or (self.either and self.jointly))

    @property
    def either(self) -> bool:
        """Return True if the draft chooses the allocation that would have hit more often (`jointly`)."""
        return self.speculation.mode == "ssd" and self.speculation.allocation == "either"

    @property
    def path(self) -> list[int]:
        return self.tokens + self.trunk

    @property
    def base(self) -> int:
        return len(self.tokens)

    @property
    def verified(self) -> int:
        """Return how many trunk tokens the target verifies now, or may verify when it takes the trunk."""
        return len(self.trunk) if self.in_flight is None else self.in_flight

    @property
    def wanted(self) -> int:
        """Return the length of the path that needs keys, values and guesses.

        In `sd` no guess is wanted after the last draft token: the next outcome decides the token there."""
        most = self.lookahead - 1 if self.speculation.mode == "sd" else self.verified
        return self.base + min(self.verified, most)

    def key(self, accepted: int, token: int) -> Key:
        """Return the board's key of an outcome of the verification in flight."""
        return Key(self._epoch, self.request, self.round, self.base, accepted, token)

    # -- the target's messages --------------------------------------------------------------------------------------

    def outcome(self, row: Verified) -> Chain | None:
        """Commit an outcome; return the winning chain, if one was prepared.

        The caller must copy its keys and values to the pages before it drops the chains. Raises ValueError for an
        outcome of another round, or with more accepted tokens than are in flight."""
        known = self.verified
        if row.round != self.round or row.accepted > known:
            raise ValueError(f"outcome {row} does not follow round {self.round} with {known} tokens in flight")
        accepted, token = row.accepted, row.token
        self.acceptance.note_outcome(known, accepted)
        winner = next((c for c in self.chains if c.fork == accepted and c.tokens[0] == token), None)
        key = self.key(accepted, token)
        self.computed = min(self.computed, self.base + (0 if self.recurrent else accepted))
        self.tokens += [*self.trunk[:accepted], token]
        self.trunk, self.ahead, self.guesses, self._forked, self.entries = [], [], {}, 0, 0
        self.nodes, self._reached = {}, 1.0
        self.round += 1
        self.in_flight = None if row.in_flight < 0 else row.in_flight
        self.answers = key if self.in_flight is None else None
        if winner is not None:
            self.trunk = winner.tokens[1:]
            self.guesses = dict(enumerate(winner.guesses))
        if self.in_flight is not None:
            self.in_flight = min(self.in_flight, len(self.trunk))
        return winner

    def launched(self, row: Launch) -> list[Chain]:
        """Note that the target verifies the first trunk tokens now, or its own tokens, which become the trunk.

        Returns the chains that do not fork from the trunk."""
        if row.round != self.round or self.in_flight is not None:
            return []
        over = self._verifies(row)
        self.in_flight, self.answers = min(row.in_flight, len(self.trunk)), None
        return over

    def _verifies(self, row: Launch) -> list[Chain]:
        """Make tokens of a launch that are not the draft's the trunk; return the chains that do not fork from it."""
        return self._replace_trunk(row.tokens) if row.tokens else []

    def _replace_trunk(self, tokens: Sequence[int]) -> list[Chain]:
        """Make `tokens` the trunk; return the chains that do not fork from it."""
        kept = common_prefix_length(self.trunk, tokens)
        self.ahead = self.trunk[kept:] if kept == len(tokens) else []
        self.trunk = list(tokens)
        self.computed = min(self.computed, self.base + kept)
        self.guesses = {node: guess for node, guess in self.guesses.items() if node <= kept}
        return self._keep_chains(kept)

    def _keep_chains(self, kept: int) -> list[Chain]:
        """Keep the chains that fork after at most `kept` trunk tokens; return the others.

        A chain whose first token is the one in flight at its fork is not kept, either."""
        next_token = self.trunk[kept] if kept < len(self.trunk) else None
        over = [c for c in self.chains if c.fork > kept or (c.fork == kept and c.tokens[0] == next_token)]
        self.chains = [chain for chain in self.chains if chain not in over]
        self._forked = min(self._forked, kept + 1)
        self.nodes = {
            node: known._replace(in_flight=next_token) if node == kept else known
            for node, known in self.nodes.items()
            if node <= kept
        }
        return over

    def retune(self, speculation: Speculation) -> None:
        """Use another K and other fan-outs from now on; existing chains stay."""
        self.speculation, self.lookahead = speculation, speculation.num_speculative_tokens
        self._grow_trunk()

    def foreseen(self, chain: Chain) -> list[int]:
        """Return the tokens already drafted (`ahead`) that follow a chain's tokens; [] if there are none."""
        own = len(chain.tokens)
        return self.ahead[own:] if chain.fork == self.in_flight and self.ahead[:own] == chain.tokens else []

    # -- the work to do ---------------------------------------------------------------------------------------------

    def pending(self, most: int) -> list[int]:
        """Return the next path tokens without keys and values that one forward can compute, at most `most`."""
        stop = min(self.wanted, self.computed + most)
        if self.recurrent:
            stop = min(stop, max(self.base, self.computed + 1))
        return self.path[self.computed : stop]

    def extended(self, count: int, guesses: list[Guess]) -> bool:
        """Note that the next `count` path tokens are computed; return True if the trunk grew.

        `guesses[-1]` predicts the token after the last of them, the guesses before it those after earlier ones."""
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
        """Append a token to the trunk if the target waits for it, its last token is computed and K allows it."""
        length = len(self.trunk)
        if self.in_flight is not None or self.computed < self.base + length or length >= self.lookahead:
            return False
        self.guesses[length] = self.corrected(self.guesses[length], self.trunk)
        self.trunk.append(self.guesses[length].token)
        return True

    def corrected(self, guess: Guess, tokens: Sequence[int]) -> Guess:
        """Return the guess after the committed tokens and `tokens`, with the token of a long repetition, if any.

        That token is right far more often than the draft's. A rule may need the token that was drawn."""
        copied = self._copied(tokens, LONGEST) if self._corrects else None
        return guess if copied is None else guess._replace(token=copied.token)

    def corrected_chain(self, chain: Chain, guesses: Sequence[Guess]) -> list[Guess]:
        """Return `corrected` guesses after a chain, up to the first that differs from the draft's own."""
        if not self._corrects:
            return list(guesses)
        found, text = list[Guess](), [*self.trunk[: chain.fork], *chain.tokens]
        for guess in guesses:
            found.append(self.corrected(guess, text))
            if found[-1].token != guess.token:
                break
            text.append(guess.token)
        return found

    @property
    def _corrects(self) -> bool:
        return (self.joint or self.either) and self.rule.allows_copies

    def _copied(self, tokens: Sequence[int], shortest: int = SHORTEST) -> Copied | None:
        self._lookup.extend(self.tokens[len(self._lookup) :])
        copied = self._lookup.after(tokens, shortest)
        if copied is None or self.grammar is None or self.grammar.allows(self.tokens, tokens, copied.token):
            return copied
        return None

    def outputs(self, count: int) -> int:
        """Return how many of the next `count` path tokens need guesses: the last committed one and those after it."""
        return max(0, min(count, self.computed + count - self.base + 1))

    def new_forks(self) -> list[tuple[int, int]]:
        """Return (fork, token) of each outcome to prepare by fan-outs, at nodes that have become predictable."""
        found: list[tuple[int, int]] = []
        for fork in self._new_nodes():
            guess, fan_out = self.guesses[fork], self.speculation.fan_out
            in_flight = self.trunk[: self.in_flight]
            if self.either:
                self._note_node(fork)
            found += outcomes.forks(fork, in_flight, guess.candidates, guess.probabilities, fan_out)
        return found

    def new_outcomes(self, chances: Chances) -> list[tuple[int, int, float]]:
        """Return (fork, token, probability) of each outcome at nodes that have become predictable.

        Used in a joint allocation."""
        found: list[tuple[int, int, float]] = []
        for fork in self._new_nodes():
            outcomes, self._reached = chances.outcomes(self._note_node(fork), self._reached, self.acceptance.value)
            found += [(fork, token, chance) for token, chance in outcomes.items()]
        return found

    def _note_node(self, fork: int) -> Node:
        """Make the node after `fork` trunk tokens and keep it in `nodes`."""
        guess, in_flight = self.guesses[fork], self.trunk[fork] if fork < self.verified else None
        copied = self._copied(self.trunk[:fork])
        node = Node(guess.candidates, guess.scores, in_flight, copied, self.law.temperature, self.rule.shares_noise)
        self.nodes[fork] = node
        return node

    def _new_nodes(self) -> Iterator[int]:
        """Yield the forks that have become predictable since the last call."""
        if self.in_flight is None or self.speculation.mode != "ssd":
            return
        # A winner that lost its cell has its guesses, but its keys and values are not computed again yet.
        known = min(self.in_flight, self.computed - self.base)
        while self._forked <= known and self._forked in self.guesses:
            yield self._forked
            self._forked += 1
