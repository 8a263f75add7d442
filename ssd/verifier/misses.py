"""Decides what a row does after a cache miss: wait for the draft, guess without a model, or go on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from ssd.config.params import AUTO_LOOKAHEAD, MAX_LOOKAHEAD, Mode, Speculation
from ssd.speculation.backups import BACKUPS, MOST_EVIDENCE, SPECULATORS, Speculator, load
from ssd.speculation.ngram import PromptLookup
from ssd.speculation.theory import LinearCost, depth_worth_waiting_for, expected_tokens, tokens_worth_verifying
from ssd.tuning.estimates import KINDS, Estimates, Mean, note_guesses, recent
from ssd.verifier.sequence import Sequence

log = logging.getLogger("ssd.target")

# Initial chances: that a proposal's first token is accepted, the gain of each degree of evidence, and that each later
# token is if those before it are. They count as `_SAMPLES` rounds; each kind of law above greedy has `_WARM` of them.
_FIRST, _EVIDENCE, _NEXT, _WARM, _SAMPLES, _SMOOTHING = 0.2, 0.07, 0.85, 0.7, 10, 0.02
# Worth of one more token in a batch of several rows that bring a token each; alone it is 1. The row ends sooner, but
# the others go on. Where all rows bring more tokens, they end together, and each is worth more, up to 1.
_AMONG_OTHERS = 0.5
# Where no proposal can pay, a row still asks for one in every 16th round, to learn whether that has changed.
_SELDOM = 16
# Tokens that a new row's proposals are thought to bring in a round beyond their price, and the seconds that asking for
# one takes this process (40 us a row and round, EPYC of family 26).
_HOPED, _ASKING_S = 0.2, 40e-6
_PRICED_FOR = 8  # rounds for which prices are kept


class WeighedWait(NamedTuple):
    """Figures of a wait for draft tokens, in the order of `Mark.NO_GAIN`: what the best `depth` above 0 brings."""

    depth: int = 0
    gain: float = 0.0
    ms: float = 0.0
    rate: float = 0.0
    speed: float = 0.0
    rows: int = 0
    token_ms: float = 0.0


class MissCosts:
    """Prices waits for the draft and more tokens to verify, by the pair's `estimates`.

    `ready`: draft tokens of each row that does not wait. `verified`: tokens so far in the next verification of `batch`
    rows. `away_s`: seconds of the round trip to a remote draft. `weighed`: by request."""

    def __init__(self, estimates: Estimates) -> None:
        self.estimates, self.away_s = estimates, 0.0
        self.batch = self.verified = 1
        self.ready: list[int] = []
        self.weighed: dict[int, WeighedWait] = {}
        self._priced: dict[tuple[int, int, bool], Callable[[int], float]] = {}
        self._priced_at = 0

    def pricing(self) -> Callable[[int], float]:
        """Return a function: the price in tokens of verifying `more` tokens.

        The price is what the whole batch brings in the additional time; 0 while that is unknown."""
        if self.estimates.rounds // _PRICED_FOR != self._priced_at:
            self._priced, self._priced_at = {}, self.estimates.rounds // _PRICED_FOR
        key = self.batch, self.verified, self.estimates.works_ahead
        if key not in self._priced:
            cost = self.estimates.costs.of("verify_beside" if self.estimates.works_ahead else "verify")
            if cost is None:
                return lambda more: 0.0
            worth, verified, present = self._worth(), self.verified, cost.at(self.verified)
            self._priced[key] = cache(lambda more: worth * (cost.at(verified + more) - present))
        return self._priced[key]

    def _worth(self) -> float:
        speed = self.estimates.speed(self.batch)
        return speed if self.batch == 1 else speed / min(1.0, _AMONG_OTHERS * self.estimates.tokens_a_row)

    def draft_gain(self, drafted: int) -> float:
        """Return what `drafted` tokens of the draft should bring beyond their price."""
        return expected_tokens(self.estimates.acceptance.value, drafted) - 1 - self.pricing()(drafted)

    def least(self, lookahead: int) -> float:
        """Return the probability of a single row's trunk below which another token does not pay in `sd`.

        A token costs a draft step, and its share of a verification of `lookahead` draft tokens."""
        step = self.estimates.costs.of("step")
        drafting = 0.0 if step is None else self._worth() * step.at(1)
        price = self.pricing()(lookahead) / lookahead + drafting
        return min(max(0.0, price / max(1e-9, self.estimates.acceptance.value)), 1.0)

    def depths(self, rows: Items[Sequence], otherwise: float = 1.0) -> dict[int, int]:
        """Return by request the draft tokens worth waiting for. A row that does not wait brings `otherwise`."""
        longest, known = max((sequence.lookahead for sequence in rows), default=0), self.estimates
        verify = known.costs.of("verify_beside") or LinearCost(known.verify_s.value, 0.0)
        speed, away_s = known.speed(self.batch), self.away_s
        by = known.acceptance.value, verify, known.token_s.value, otherwise, speed, away_s
        wait = depth_worth_waiting_for(self.ready, len(rows), longest, *by)
        rate = wait.gain / wait.seconds if wait.seconds > 0 else 0.0
        took_ms, token_ms = 1e3 * wait.seconds, 1e3 * known.token_s.value
        weighed = WeighedWait(wait.weighed, wait.gain, took_ms, rate, wait.speed, len(rows), token_ms)
        self.weighed |= dict.fromkeys((sequence.request for sequence in rows), weighed)
        return {sequence.request: min(wait.depth, sequence.lookahead) for sequence in rows}


class GuessedTokens(NamedTuple):
    """Tokens to verify: `accepted` of them should be right, for `gain` tokens beyond their price."""

    tokens: Items[int]
    accepted: float
    gain: float


class MissPolicy:
    """Decides what a row does after a miss. This is `none`: the row goes on with its bonus token alone.

    One instance serves all requests of its name. A plugin subclasses `JustInTime` or this, and registers the class
    under `ssd.backups`. The whole batch waits for its methods, and they must not raise."""

    decides_later = False  # True: `depths` and `propose` are called before the launch; False: never

    def depths(self, rows: Items[Sequence], costs: MissCosts) -> dict[int, int]:
        """Return by request how many fresh draft tokens the rows wait for."""
        return {}

    def hopeless(self, sequence: Sequence, costs: MissCosts) -> tuple[float, ...]:
        """Return () if the row may wait or propose, else a proposal's price and worth in tokens.

        Only called if `decides_later`."""
        return ()

    def propose(self, sequence: Sequence, costs: MissCosts) -> list[int]:
        """Return tokens to verify for a row without draft tokens, at its launch.

        Their source is "lookup", unless this method sets `sequence.source`."""
        return []

    def gain(self, request: int) -> float | None:
        """Return the tokens that the last `propose` should bring beyond their price.

        A guess of the memory that promises more is verified instead. None: this policy's tokens come first."""
        return None

    def note(self, request: int, drafted: int, tokens: Items[int]) -> None:
        """Learn that a round verified `drafted` proposed tokens, and brought `tokens`."""

    def forget(self, request: int) -> None:
        """Drop all that is known of a request."""


class JustInTime(MissPolicy):
    """`jit`: waits for the draft tokens that raise the batch's tokens per second."""

    decides_later = True

    def depths(self, rows: Items[Sequence], costs: MissCosts) -> dict[int, int]:
        return costs.depths(rows)


class WaitForK(MissPolicy):
    """Mode `sd`: every outcome waits for K draft tokens, or until the draft has ended."""

    decides_later = True

    def depths(self, rows: Items[Sequence], costs: MissCosts) -> dict[int, int]:
        return {sequence.request: sequence.lookahead for sequence in rows}


@dataclass
class _Guesser:
    """The speculator of a sequence, None once it has failed.

    `known`: tokens that it was given. `guess`: its last proposal. `gain`: what proposals should have brought lately
    beyond their price; `present_gain`: the last one, or a grammar's tokens."""

    speculator: Speculator | None
    kind: int = 0
    known: int = 0
    guess: Items[int] = ()
    gain: Mean = field(default_factory=lambda: recent(_HOPED))
    present_gain: float = 0.0

    @property
    def evidence(self) -> int:
        return min(max(0, int(getattr(self.speculator, "evidence", 0))), MOST_EVIDENCE)


class ModelFree(MissPolicy):
    """Mode `ngram`, and speculators by `--backup`: verifies what the speculator proposes, without waiting.

    `make` returns a new speculator. A request whose speculator raises goes on without it. Tokens that a grammar forces
    come first: they are always right."""

    decides_later = True

    def __init__(self, make: Callable[[], Speculator] | None = PromptLookup) -> None:
        self._make = make
        self._guessers: dict[int, _Guesser] = {}
        self._chances = [
            [
                [
                    Mean(_WARM**kind * (_NEXT if depth else _FIRST + _EVIDENCE * evidence), _SMOOTHING, _SAMPLES)
                    for depth in range(AUTO_LOOKAHEAD)
                ]
                for evidence in range(1 + MOST_EVIDENCE)
            ]
            for kind in range(KINDS)
        ]
        self.tokens = recent(1.5)  # tokens that a row with a proposal brings

    def hopeless(self, sequence: Sequence, costs: MissCosts) -> tuple[float, ...]:
        """Return price and worth where no proposal pays; now and then (), to learn if that has changed.

        Both in tokens: the price of verifying one token and its best chance, or the price of asking for a proposal and
        what asking brought lately."""
        if sequence.asked.num_speculative_tokens or sequence.grammar is not None or sequence.round % _SELDOM == 0:
            return ()
        guesser, asking = self._guessers.get(sequence.request), _ASKING_S * costs.estimates.speed(costs.batch)
        if guesser is not None and guesser.gain.value < asking:
            return asking, guesser.gain.value
        price, worth = costs.pricing()(1), max(chances[0].value for chances in self._chances[sequence.kind])
        return (price, worth) if price >= worth else ()

    def propose(self, sequence: Sequence, costs: MissCosts) -> list[int]:
        """Return the tokens that the grammar forces, else the speculator's; with an open K those that pay."""
        try:
            if sequence.request not in self._guessers:
                self._guessers[sequence.request] = _Guesser(self._make() if self._make else None, sequence.kind)
            guesser = self._guessers[sequence.request]
            if forced := forced_tokens(sequence):
                guesser.guess, sequence.source = (), "grammar"  # forced tokens say nothing of the speculator
                guesser.present_gain = float(len(forced))
                return forced
            if guesser.speculator is None:
                return []
            known, guesser.known = guesser.known, len(sequence.tokens)
            guesser.speculator.extend(sequence.tokens[known:])
            lookahead = sequence.asked.num_speculative_tokens
            longest = min(lookahead or AUTO_LOOKAHEAD, sequence.acceptable)
            guesser.guess = found = guesser.speculator.propose(longest)[:longest]
            chances = (chance.value for chance in self._chances[guesser.kind][guesser.evidence])
            count, _, gain = tokens_worth_verifying(chances, len(found), costs.pricing())
            guesser.present_gain = gain
            if lookahead:
                return found
            guesser.gain.note(gain)
            return found[:count]
        except Exception:
            log.exception("a speculator failed; request %d goes without it", sequence.request)
            self._guessers[sequence.request] = _Guesser(None)
            return []

    def gain(self, request: int) -> float | None:
        guesser = self._guessers.get(request)
        return None if guesser is None else guesser.present_gain

    def note(self, request: int, drafted: int, tokens: Items[int]) -> None:
        """Learn how often guesses are right, also unverified ones where the true tokens are known."""
        guesser = self._guessers[request]
        if drafted:
            self.tokens.note(len(tokens))
        note_guesses(self._chances[guesser.kind][guesser.evidence], guesser.guess, tokens)

    def forget(self, request: int) -> None:
        self._guessers.pop(request, None)


def forced_tokens(sequence: Sequence) -> list[int]:
    """Return the next tokens that a sequence's grammar leaves no choice about."""
    if sequence.grammar is None:
        return []
    most = min(MAX_LOOKAHEAD, sequence.acceptable)
    return sequence.grammar.forced(sequence.tokens[sequence.prompt_length :])[:most]


class Auto(ModelFree):
    """`auto`: waits where that brings more than prompt lookup has brought (Theorem 17)."""

    def hopeless(self, sequence: Sequence, costs: MissCosts) -> tuple[float, ...]:
        return ()  # it may wait

    def depths(self, rows: Items[Sequence], costs: MissCosts) -> dict[int, int]:
        ideas = {s.request for s in rows if self.propose(s, costs)}
        without = costs.depths([s for s in rows if s.request not in ideas])
        return without | costs.depths([s for s in rows if s.request in ideas], self.tokens.value)


class Policies:
    """Owns the miss policies in use, by mode and `--backup`."""

    def __init__(self) -> None:
        self._policies: dict[tuple[Mode, str], MissPolicy] = {}

    def of(self, speculation: Speculation) -> MissPolicy:
        name = speculation.mode, "" if speculation.mode in ("sd", "ngram") else speculation.backup
        if name not in self._policies:
            self._policies[name] = load_policy(*name)
        return self._policies[name]

    def need_times(self, sequence: Sequence) -> bool:
        """Return True if the row's policy or plan uses measured times."""
        mode = sequence.speculation.mode
        return sequence.tuned or mode == "ar" or self.of(sequence.speculation).decides_later

    def forget(self, request: int) -> None:
        for policy in self._policies.values():
            policy.forget(request)


def load_policy(mode: Mode, backup: str) -> MissPolicy:
    """Return a policy for a mode, or for `--backup` in mode `ssd`; a plugin that fails becomes `none`."""
    if mode in ("sd", "ngram"):
        return WaitForK() if mode == "sd" else ModelFree()
    built_in: dict[str, Callable[[], MissPolicy]] = {"auto": Auto, "jit": JustInTime, "none": MissPolicy}
    try:
        make = built_in.get(backup) or load(BACKUPS, backup)
        return make() if make else ModelFree(load(SPECULATORS, backup))
    except Exception:
        log.exception("the backup %s failed; requests go without it", backup)
        return MissPolicy()
