"""Gets draft tokens from a draft in another process, which publishes them on the board."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Items

from ssd.config.params import DRAFTED
from ssd.execution.core_team import CoreTeam
from ssd.execution.meanwhile import Task, nothing
from ssd.ipc.board import BoardReader, Key
from ssd.ipc.draft_probs import DraftProbsArena
from ssd.ipc.messages import DraftState, Outcomes, Verified
from ssd.ipc.public import Message
from ssd.ipc.trace_ring import NO_TRACE, Mark, TraceRing
from ssd.tuning.estimates import Estimates
from ssd.tuning.tuner import Tuning
from ssd.verifier.draft_session import DraftSession
from ssd.verifier.missed_rows import MissedRow, MissedRows
from ssd.verifier.misses import GuessedTokens, MissCosts, Policies
from ssd.verifier.plan_follower import PlanFollower
from ssd.verifier.proposer import Counters, NextDraft, Proposer, Result
from ssd.verifier.round_evidence import RoundEvidence
from ssd.verifier.sequence import Cache, Sequence
from ssd.verifier.suffix_memory import SuffixMemory


class BoardProposer(Proposer):
    """Looks up on the board what a draft process has prepared for each outcome, else asks a backup.

    `send`, `remote`, `overlaps`: see `DraftSession`, `RoundEvidence`, `Runner`. With a `team` both models share cores.
    `inline`: a draft in this process, which alone serves `sd`, and the draft process `ssd`."""

    def __init__(
        self,
        board: BoardReader,
        send: Callable[[Message], bool],
        draft_probs: DraftProbsArena | None = None,
        trace: TraceRing = NO_TRACE,
        tuning: Tuning | None = None,
        team: CoreTeam | None = None,
        remote: bool = False,
        memory: SuffixMemory | None = None,
        overlaps: bool = False,
        inline: Proposer | None = None,
    ) -> None:
        self.session = DraftSession(board, send, draft_probs, DRAFTED if inline is None else ("ssd",), team)
        self._own_modes, self._inline = (*self.session.modes, "ngram"), inline or Proposer()
        self._memory, self._overlaps = memory, overlaps
        self._memory_was_better = set[int]()  # requests whose last guess was better than the draft's tokens
        self._ending = set[int]()  # requests whose next speculation the draft may end
        self._trace, self.tuning = trace, tuning or Tuning()
        self.tuning.estimates.ends = not remote and inline is None  # these are asked for all K at once
        self._costs = MissCosts(self.tuning.estimates)
        self._misses = MissedRows(self.session, self._costs, trace)
        self._policies = Policies()
        self.plans = PlanFollower(self.tuning, self.session, self._misses, trace, self._inline)
        self._evidence = RoundEvidence(self.tuning, self.session, self._misses, remote, self._inline)

    @property
    def state(self) -> DraftState:
        return self._inline.state if self.session.state == "down" else self.session.state

    @property
    def counters(self) -> Counters:
        board = self.session.board
        draft = board.telemetry()
        return Counters(draft.steps, draft.step_seconds, board.stale, board.link(), board.rejected, draft.compiles)

    @property
    def plan(self) -> str:
        return self.plans.plan

    def asks(self, sequence: Sequence) -> NextDraft | None:
        if sequence.speculation.mode not in self._own_modes:
            return self._inline.asks(sequence)
        if sequence.speculation.mode != "ssd":
            return None  # it waits for the draft, or looks up in the text after the outcome
        if sequence.request in self._memory_was_better:
            return None  # it guesses only after the outcome
        tracked = sequence.request in self.session.tracked
        return NextDraft(self.session.epoch or 0, sequence.speculation.num_speculative_tokens if tracked else 0)

    def admit(self, sequence: Sequence) -> None:
        sequence.speculation = self.plans.planned(sequence, self.tuning.current)
        if sequence.speculation.mode in self.session.modes:
            self.session.admit(sequence)

    def release(self, sequences: Items[Sequence]) -> None:
        for sequence in sequences:
            self._misses.forget(sequence.request)
            self._policies.forget(sequence.request)
            self._memory_was_better.discard(sequence.request)
        if self._memory is not None:
            self._memory.release(sequences)
        self._inline.leave(sequences)
        self.session.release([sequence.request for sequence in sequences])

    def settle(self, sequences: Items[Sequence], meanwhile: Task = nothing) -> float:
        began = time.perf_counter()
        self.session.end_round(began, self.tuning.estimates.verify_s.value)
        self.plans.follow(sequences)
        self._evidence.learns = self._memory is not None or any(map(self._policies.need_times, sequences))
        self.tuning.estimates.works_ahead = self.session.works_ahead(sequences)
        if self._misses.rows:
            self._misses.settle(sequences, meanwhile, began)
        self._inline.settle(sequences, meanwhile)
        self.session.announce()
        return self._evidence.settled(len(sequences), began)

    def outcomes(self, results: Items[Result]) -> None:
        now = time.perf_counter()
        self._inline.outcomes(results)
        speculated = [result for result in results if result.sequence.speculation.mode in self._own_modes]
        begun = self.session.admit_one([r.sequence for r in speculated if r.taken is None or not r.taken.ids])
        self._costs.batch = self._costs.verified = len(results)
        ended, self._ending = self._ending, set()
        rows = [self._look_up(result, result.sequence is begun) for result in speculated]
        self._send([row for row in rows if row.request in self.session.tracked])
        self._evidence.verified(now, results, ended)  # the draft is at work: there is time to learn
        if not self._overlaps:  # else it does so beside the next forward
            self.replan()

    def replan(self) -> None:
        self.plans.replan()

    def _send(self, outcomes: list[Verified]) -> None:
        """Tell the draft of outcomes; if they share cores, only at their launch where all rows have a guess.

        Told at once, the draft would read the new text in mode `sd` while the target verifies the guesses."""
        missed = [self._misses.rows.get(outcome.request) for outcome in outcomes]
        guessed = [row for row in missed if row is not None and row.guess is not None and row.mode == "sd"]
        self.session.seen.rows += len(outcomes) - len(guessed)
        if self.session.team is not None and len(guessed) == len(outcomes):
            for row, outcome in zip(guessed, outcomes, strict=True):
                row.unsent = outcome
        elif outcomes:
            self.session.tell(Outcomes(outcomes))

    def _look_up(self, result: Result, begins: bool) -> Verified:
        """Take the cached speculation, or leave the row to the memory or its backup."""
        sequence, outcome, policy = result.sequence, result.outcome, self._policies.of(result.sequence.speculation)
        key = Key(self.session.epoch or 0, sequence.request, result.round, result.base, *outcome)
        if begins:
            key = key._replace(base=len(sequence.tokens) - 1, accepted=0)
        if result.taken is not None:
            sequence.proposal = result.taken.ids
        mode = sequence.speculation.mode
        speculates = (sequence.acceptable if mode == "ngram" else sequence.lookahead) > 0
        if mode == "ssd" and speculates and not begins:
            self._propose(result, key)
        guess = None if self._memory is None else self._better_guess(self._memory, result)
        in_flight: int | None = len(sequence.proposal)
        missed = not in_flight and result.taken is None and speculates and policy.decides_later
        if guess is not None:
            self._misses.rows[sequence.request] = MissedRow(sequence, mode, key, policy, guess)
            in_flight = None
        elif missed and (price_and_worth := policy.hopeless(sequence, self._costs)):
            if mode in DRAFTED:
                self._misses.note_reason(sequence.request, Mark.HOPELESS, *price_and_worth)
        elif missed:
            self._misses.rows[sequence.request] = MissedRow(sequence, mode, key, policy)
            in_flight = None
        least = 0.0
        if in_flight is None and _may_end(sequence, self._costs.estimates, self._costs.batch):
            least = self._costs.least(sequence.speculation.num_speculative_tokens)
            self._ending.add(sequence.request)
        return Verified(sequence.request, result.round, key.accepted, outcome.token, in_flight, least)

    def _better_guess(self, memory: SuffixMemory, result: Result) -> GuessedTokens | None:
        """Return the memory's guess if it should bring more than the draft's tokens, which are dropped then.

        Tokens with draft probabilities stay: the ratio rule allows no such choice. If the next verification runs
        already, only note that the memory helps now."""
        sequence = result.sequence
        guess, drawn = memory.guess(sequence, self._costs.pricing), sequence.draft_probs is not None
        if guess is None or drawn or guess.gain <= self._costs.draft_gain(len(sequence.proposal)):
            self._memory_was_better.discard(sequence.request)
            return None
        self._memory_was_better.add(sequence.request)
        if result.taken is not None:
            return None
        sequence.proposal, sequence.draft_probs = [], None
        return guess

    def _propose(self, result: Result, key: Key) -> None:
        """Propose what the board has for an outcome, and note that."""
        sequence, session = result.sequence, self.session
        tracked, entry, prepared = sequence.request in session.tracked, None, dict[int, int]()
        if tracked:
            if result.taken is None:
                found = session.find(sequence, key, sequence.lookahead)
                entry = None if found is None else found.entry
            elif result.taken.entry >= 0:
                entry = result.taken.entry
            if entry is None:
                prepared = session.board.prepared(sequence.slot, key)
        sequence.cache = _verdict(sequence, key, tracked, entry, prepared)
        self._trace.looked_up(sequence.request, sequence.cache, *self._figures(sequence.cache, key, entry, prepared))
        if tracked:
            session.note_shown(sequence.request, entry is not None or bool(prepared))
            self._evidence.looked_up(result, entry, prepared)

    def _figures(self, verdict: Cache, key: Key, entry: int | None, prepared: dict[int, int]) -> tuple[float, ...]:
        if verdict == "late":
            return entry is not None, 1e3 * self.session.still_s(time.perf_counter())
        if verdict == "token_not_covered":
            return prepared[key.accepted], key.accepted
        return (sum(prepared.values()), key.accepted) if verdict == "k_not_covered" else ()


def _may_end(sequence: Sequence, estimates: Estimates, batch: int) -> bool:
    # Not in a batch: a step for some rows takes as long as one for all, and all rows wait for it.
    alone = estimates.ends and batch == 1
    return alone and sequence.speculation.mode == "sd" and not sequence.asked.num_speculative_tokens


def _verdict(sequence: Sequence, key: Key, tracked: bool, entry: int | None, prepared: dict[int, int]) -> Cache:
    """Return the result of looking up an outcome, by its `entry` and entries `prepared` by length."""
    if key.round == 0:
        return "" if sequence.proposal else "first_round"
    if sequence.proposal:
        return "hit"
    if not tracked:
        return "draft_down"
    if entry is not None or not prepared:
        return "late"
    return "token_not_covered" if key.accepted in prepared else "k_not_covered"
