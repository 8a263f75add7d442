"""Measures what each round shows: its time, accepted tokens, and the gain of a draft."""

from __future__ import annotations

import time
from collections.abc import Container
from collections.abc import Sequence as Items

from ssd.config.params import DRAFTED
from ssd.tuning.estimates import DecodingRound
from ssd.tuning.plan import Plan
from ssd.tuning.tuner import Tuning
from ssd.verifier.draft_session import DraftSession
from ssd.verifier.missed_rows import MissedRows
from ssd.verifier.proposer import Proposer, Result
from ssd.verifier.sequence import Sequence


class RoundEvidence:
    """Tells tuner, session and policies what each round took and brought.

    `learns`: some row uses measured times. `remote`: waits are normal, so the breaker is told the measured gain."""

    def __init__(
        self, tuning: Tuning, session: DraftSession, misses: MissedRows, remote: bool, inline: Proposer
    ) -> None:
        self._tuning, self._session, self._misses, self._inline = tuning, session, misses, inline
        self._estimates, self._remote = tuning.estimates, remote
        self.learns = True
        self._settled_at = self._waited = self._ended_at = 0.0
        self._settled, self._running = 0, list[int]()
        self._runs_since: float | None = None

    def settled(self, rows: int, began: float) -> float:
        """Note that `rows` rows are settled; return the seconds since `began`."""
        ended = time.perf_counter()
        # An overlapped verification has been running since the previous outcomes.
        self._settled, self._settled_at, self._waited = rows, self._runs_since or ended, ended - began
        return self._waited

    def verified(self, now: float, results: Items[Result], ending: Container[int]) -> None:
        """Learn from a verification; the draft might end speculations of requests `ending`."""
        timed = self._time(now, results) if self._settled_at and results and self.learns else None
        for result in results:
            if result.sequence.speculation.mode != "ar":
                self._learn(result, result.sequence.request in ending)
        if timed is not None and self._remote:
            self._note_gain(timed)
        self._ended_at, self._running = now, [result.sequence.request for result in results]
        self._runs_since = now if any(result.taken is not None for result in results) else None

    def looked_up(self, result: Result, entry: int | None, prepared: dict[int, int]) -> None:
        """Learn which prepared token the bonus token was: an `entry`'s, or none of `prepared`."""
        learner, accepted = self._estimates.learners[result.sequence.kind], result.outcome.accepted
        if result.round == 0 or not self.learns:
            return
        if entry is not None:
            rank, fan_out = self._session.board.place(result.sequence.slot, entry)
            learner.looked_up(fan_out, rank)
        elif accepted in prepared:  # a draft that is late says nothing of its candidates
            learner.looked_up(prepared[accepted], None)

    def _time(self, now: float, results: Items[Result]) -> DecodingRound | None:
        """Note and return what a round took, if it decoded the rows of the round before."""
        telemetry, round_ = self._session.board.telemetry(), None
        same = [result.sequence.request for result in results] == self._running
        if same and len(results) == self._settled and all(result.round > 0 for result in results):
            self._estimates.last_verify_s = now - self._settled_at
            self._estimates.verify_s.note(self._estimates.last_verify_s)
            rows = [result.sequence for result in results]
            in_turn = all(sequence.speculation.mode == "sd" for sequence in rows)
            round_ = DecodingRound(
                batch=len(results),
                tokens=sum(1 + result.drafted for result in results),
                seconds=now - self._ended_at - self._waited,
                waited=self._waited,
                brought=sum(1 + result.outcome.accepted for result in results),
                beside=self._estimates.works_ahead,
                in_turn=in_turn,
                plan=self._plan_of(rows),
                remembered=_memory_helped(results),
                busy=any(map(self._drafts_here, rows)) or (in_turn and any(map(self._may_read, results))),
            )
        self._tuning.note(round_, telemetry)
        return round_

    def _drafts_here(self, row: Sequence) -> bool:
        return row.speculation.mode in DRAFTED and row.speculation.mode not in self._session.modes

    def _may_read(self, result: Result) -> bool:
        drafted = result.drafted and result.source == "draft"
        return not drafted and result.sequence.request in self._session.tracked

    def _note_gain(self, round_: DecodingRound) -> None:
        """Note what a round with a remote draft won against a plain round, in verifications.

        Guesses without a model are neither gain nor cost. A round counts as at most three plain ones, waits apart: a
        descheduled process says nothing of the draft."""
        seen, plain_s = self._session.seen, self._estimates.plain_s(round_.batch)
        if not plain_s or not seen.rows:
            return
        waited, taken = round_.waited / plain_s, min(3.0, round_.seconds / plain_s)
        guessed = not seen.drafted and round_.tokens > round_.batch
        seen.gain = -waited if guessed else 1 + seen.accepted / seen.rows - taken - waited

    def _plan_of(self, rows: Items[Sequence]) -> Plan | None:
        """Return the plan that all rows followed; None if they differed, or one had no plan or no draft.

        A row that the draft has not been told of yet counts as having a draft: the wait is part of the plan's price."""
        first = rows[0].speculation
        session = self._session
        at_once = session.team is None or session.state != "up"
        for row in rows:
            drafted = row.request in session.tracked and session.breaker.state != "open"
            without = at_once and row.speculation.mode in session.modes and not drafted
            without |= self._drafts_here(row) and not self._inline.drafts(row)
            if not row.tuned or row.speculation != first or without:
                return None
        return Plan.of(first)

    def _learn(self, result: Result, ending: bool) -> None:
        sequence, drafted, accepted = result.sequence, result.drafted, result.outcome.accepted
        learner = self._estimates.learners[sequence.kind]
        waited = self._misses.waited.pop(sequence.request, None)
        policy = self._misses.proposed_by.pop(sequence.request, None)
        # The first round after the prefill waits for a draft that may still compute the prompt.
        if waited is not None and result.round > 1 and sequence.request in self._session.tracked:
            learner.missed(accepted + 1, waited, drafted)
        remembered = result.source == "memory"
        if sequence.speculation.mode == "ngram" and not remembered:
            learner.prompt_lookup(drafted, accepted)
        if policy is not None:
            policy.note(sequence.request, 0 if remembered else drafted, sequence.tokens[result.base :])
            return
        if result.source != "draft":
            return
        if sequence.speculation.mode in self._session.modes:
            self._session.seen.drafted += drafted > 0
            self._session.seen.accepted += accepted
        if self.learns:
            if ending:  # the draft was surer than usual of all tokens but the first
                drafted, accepted = min(drafted, 1), min(accepted, 1)
            learner.outcome(drafted, accepted)
            self._estimates.acceptance.note_outcome(drafted, accepted)


def _memory_helped(results: Items[Result]) -> bool:
    remembered = sum(result.outcome.accepted for result in results if result.source == "memory")
    return 4 * remembered > sum(1 + result.outcome.accepted for result in results)
