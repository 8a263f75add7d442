"""Brings requests to the tuner's present plan, and says which one that is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import cache
from itertools import chain

from ssd.config.params import DRAFTED, Mode, Speculation
from ssd.ipc.messages import Retune
from ssd.ipc.trace_ring import Mark, TraceRing, plan_figures
from ssd.tuning.plan import Plan
from ssd.tuning.tuner import Tuning
from ssd.verifier.draft_session import DraftSession
from ssd.verifier.missed_rows import MissedRows
from ssd.verifier.proposer import Proposer
from ssd.verifier.sequence import Sequence

_DESCRIBED_EVERY = 8  # windows of rounds
# Rounds with the same number of rows before a running row begins with a draft: the draft must read its text first,
# which does not pay in a batch that shrinks from round to round.
_STEADY = 8


class PlanFollower:
    """Brings tuned sequences to the tuner's present plan; `plan` says it in a sentence.

    `inline` drafts for modes that the draft's process does not serve."""

    def __init__(
        self, tuning: Tuning, session: DraftSession, misses: MissedRows, trace: TraceRing, inline: Proposer
    ) -> None:
        self._tuning, self._session, self._misses, self._trace = tuning, session, misses, trace
        self._inline, team = inline, session.team
        self._cores = None if team is None else (team.own, team.all)
        self._rows, self._unchanged = 0, 0  # number of rows, and for how many rounds it has not changed
        self.plan = ""
        # A tuned row's wish and plan, and the number of rows; the same as `plan` describes it, and its time in windows.
        self._followed: tuple[Speculation, Plan, int] | None = None
        self._described: tuple[Speculation, Plan, int, int] | None = None

    def planned(self, sequence: Sequence, current: Callable[[Speculation, int], Speculation]) -> Speculation:
        return current(sequence.asked, sequence.kind) if sequence.tuned else sequence.speculation

    def wants_draft(self, sequences: Items[Sequence]) -> bool:
        """Return True if a sequence uses the draft's process, or would by its plan."""
        serves = self._session.modes
        if any(sequence.speculation.mode in serves for sequence in sequences):
            return True
        asked = {s.asked for s in sequences if s.tuned} if self._session.state == "parked" else ()
        return any(self._tuning.plan(one, self._drafted(called=True)).mode in serves for one in asked)

    def follow(self, sequences: Items[Sequence]) -> None:
        """Give every sequence the tuner's present plan; tell the draft."""
        self._unchanged = self._unchanged + 1 if self._rows == len(sequences) else 0
        self._rows = len(sequences)
        tuned = [sequence for sequence in sequences if sequence.tuned]
        if not tuned:
            return
        tokens = sum(len(sequence.tokens) for sequence in sequences) / len(sequences)
        self._tuning.situate([s.kind for s in sequences], self._drafted(), tokens)
        told, serves, current = [], self._session.modes, cache(self._tuning.current)
        for sequence in tuned:
            planned = self.planned(sequence, current)
            before = sequence.speculation.mode
            begins = planned.mode in serves and before not in serves
            if planned == sequence.speculation or (begins and sequence.round > 0 and self._unchanged < _STEADY):
                continue
            sequence.speculation = planned
            if begins:
                if not sequence.proposal:  # else it is told when no draft tokens of its are being verified
                    self._session.admit(sequence)
            elif planned.mode not in serves and before != planned.mode:  # the board's answer is of no use to it
                self._misses.rows.pop(sequence.request, None)
                if before in serves:
                    sequence.proposal, sequence.draft_probs, sequence.cache = [], None, ""
                    self._session.release([sequence.request], ended=False)
            elif sequence.request in self._session.tracked:
                told.append((sequence.request, planned))
        if told:
            self._session.tell(Retune(told))
        self._followed = tuned[-1].asked, Plan.of(tuned[-1].speculation), len(sequences)

    def _drafted(self, called: bool = False) -> tuple[Mode, ...]:
        # `called`: as if a parked draft were back.
        usable = called or self._session.state in ("up", "half_open") or self._session.breaker.briefly_stalled
        inline = self._inline.state == "up"
        return tuple(mode for mode in DRAFTED if (usable if mode in self._session.modes else inline))

    def replan(self) -> None:
        if self._followed is not None:
            self._describe(*self._followed)
            self._tuning.judge()

    def _describe(self, asked: Speculation, plan: Plan, batch: int) -> None:
        now = asked, plan, batch, self._tuning.windows // _DESCRIBED_EVERY
        if now == self._described:
            return
        self._described, before = now, self.plan
        self.plan = self._tuning.described(asked, self._cores)
        level = logging.INFO if self.plan.partition(":")[0] != before.partition(":")[0] else logging.DEBUG
        figures = chain(
            *(plan_figures(speed, p.mode, p.lookahead, p.chains) for p, speed in self._tuning.choice(asked))
        )
        self._trace.note(Mark.PLAN, batch, *figures, level=level)
