"""Gets draft tokens for the target: advice that may be late, wrong or missing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import NamedTuple

from ssd.config.params import DRAFTED, Mode, Speculation
from ssd.execution.core_team import CoreTeam
from ssd.execution.meanwhile import Task, nothing
from ssd.ipc.board import BoardReader, Cached, Key, LinkFigures
from ssd.ipc.draft_probs import DraftProbsArena
from ssd.ipc.messages import DraftState, Launched, Outcomes, Retune, Verified
from ssd.ipc.public import Message
from ssd.ipc.trace_ring import NO_TRACE, TraceRing
from ssd.speculation.acceptance import Outcome
from ssd.tuning.learner import Learner
from ssd.tuning.predictor import Setting
from ssd.tuning.tuner import DecodingRound, PlanKey, Tuning, kind_of, setting_of
from ssd.verifier.draft_session import DraftSession
from ssd.verifier.misses import MissedRow, MissedRows, MissPolicy, WaitCosts, load_policy
from ssd.verifier.sequence import Cache, Sequence

log = logging.getLogger("ssd.target")

_DESCRIBED_EVERY = 8  # windows of rounds
# Rounds with the same number of rows before a running row begins with a draft: the draft must read its text first,
# which does not pay in a batch that shrinks from round to round.
_STEADY = 8


class Result(NamedTuple):
    """The outcome of one verification, which `sequence` has committed already.

    `base` tokens were committed before it, `drafted` draft tokens were verified, and `cache` is what the speculation
    cache had for it. `taken`: the next verification runs already, with these draft tokens."""

    sequence: Sequence
    round: int
    base: int
    drafted: int
    outcome: Outcome
    cache: Cache
    taken: Cached | None = None


class Counters(NamedTuple):
    """Totals so far: tree `steps` of the draft, their seconds, and `stale` look-ups, which found only outdated entries.

    `link`: figures of the link to a draft on another machine."""

    steps: int = 0
    step_seconds: float = 0.0
    stale: int = 0
    link: LinkFigures | None = None

    @property
    def mean_step_seconds(self) -> float:
        """Return the mean seconds of a tree step, 0 if there was none."""
        return self.step_seconds / max(1, self.steps)


class Proposer:
    """Fills `Sequence.proposal`, nothing else. The engine calls it. No method may block beyond a short deadline."""

    @property
    def state(self) -> DraftState:
        """Return the draft's state; see `DraftSession.state`."""
        return "down"

    @property
    def rejected(self) -> int:
        """Return how many board entries failed their checks."""
        return 0

    @property
    def counters(self) -> Counters:
        """Return what has been counted of the draft."""
        return Counters()

    @property
    def plan(self) -> str:
        """Return the tuner's choice and the reason in a sentence; empty if it has chosen nothing."""
        return ""

    def asks(self, sequence: Sequence) -> tuple[int, int] | None:
        """Answer `ssd.verifier.overlap.Ask`: no row takes tokens from the board."""
        return 0, 0

    def admit(self, sequence: Sequence) -> None:
        """Note that a sequence begins, or begins again: only its committed tokens are known."""

    def outcomes(self, results: Items[Result]) -> None:
        """Propose what is cached for the outcomes of one step."""

    def settle(self, sequences: Items[Sequence], meanwhile: Task = nothing) -> float:
        """Wait for missing proposals before a launch as long as it pays, and return the seconds waited."""
        return 0.0

    def release(self, sequences: Items[Sequence]) -> None:
        """Forget sequences that ended or lost their pages."""


class NoProposer(Proposer):
    """Plain decoding."""


class BoardProposer(Proposer):
    """Looks up on the board what a draft process has prepared for each outcome. Rows that miss go to their backup.

    `send` posts a message to the draft without blocking and returns True if it went out. The ratio rule reads
    `draft_probs`. With a `team` both models share cores: the draft hears of a request with its first outcome, and the
    target computes on all cores unless the draft works ahead. Without one the draft reads a prompt as the target
    does. `remote`: the draft is on another machine."""

    def __init__(
        self,
        board: BoardReader,
        send: Callable[[Message], bool],
        draft_probs: DraftProbsArena | None = None,
        trace: TraceRing = NO_TRACE,
        tuning: Tuning | None = None,
        team: CoreTeam | None = None,
        remote: bool = False,
    ) -> None:
        self.session = DraftSession(board, send, draft_probs, remote)
        self._trace, self.tuning, self._team = trace, tuning or Tuning(), team
        self._costs = WaitCosts(self.tuning)
        self._misses = MissedRows(self.session, self._costs, trace)
        self._policies: dict[tuple[Mode, str], MissPolicy] = {}
        self._learns = True
        self._settled_at = self._last_wait = self._ended_at = 0.0
        self._running, self._sequences = list[int](), 0
        self._steady = 0, 0  # number of rows, and for how many rounds it has not changed
        self._plan, self._plan_of = "", (PlanKey.of(Speculation("ar")), ("ar", 0, 0), -1, 0)
        self._beginner: Sequence | None = None
        self._runs_since: float | None = None

    @property
    def state(self) -> DraftState:
        return self.session.state

    @property
    def rejected(self) -> int:
        return self.session.board.rejected

    @property
    def counters(self) -> Counters:
        board = self.session.board
        counted = board.telemetry()
        return Counters(counted.steps, counted.step_seconds, board.stale, board.link())

    @property
    def plan(self) -> str:
        return self._plan

    def join(self, epoch: int, reads: Items[str] | None = None) -> bool:
        """Start with a draft that said hello; see `DraftSession.join`."""
        return self.session.join(epoch, reads)

    def wants_draft(self, sequences: Items[Sequence]) -> bool:
        """Return True if a sequence uses a draft, or its plan would if there were one."""
        if any(sequence.speculation.mode in DRAFTED for sequence in sequences):
            return True
        asked = {sequence.asked for sequence in sequences if sequence.tuned}
        return self.state == "parked" and any(map(self.tuning.wants_draft, asked))

    def admit(self, sequence: Sequence) -> None:
        if sequence.tuned:
            sequence.speculation = self.tuning.current(sequence.asked, kind_of(sequence.law.temperature))
        if sequence.speculation.mode in DRAFTED and self._team is None:
            self._track(sequence)

    def release(self, sequences: Items[Sequence]) -> None:
        for sequence in sequences:
            self._misses.forget(sequence.request)
            for policy in self._policies.values():
                policy.forget(sequence.request)
        self.session.release([sequence.request for sequence in sequences])

    def outcomes(self, results: Items[Result]) -> None:
        now = time.perf_counter()
        speculated = [result for result in results if result.sequence.speculation.mode != "ar"]
        if self._team is not None:
            self._beginner = self.session.untracked([result.sequence for result in speculated])
        self._costs.batch = self._costs.verified = len(results)
        rows = [self._look_up(result) for result in speculated]
        told = [row for row in rows if row.request in self.session.tracked]
        if told:
            self.session.seen.rows += len(told)
            self.session.tell(Outcomes(told))
        # The draft is at work: there is time to learn.
        timed = self._time(now, results) if self._settled_at and results and self._learns else None
        for result in speculated:
            self._learn(result)
        if timed is not None:
            self.session.measured(timed, self.tuning.plain_s(len(results)))
        self._ended_at, self._running = now, [result.sequence.request for result in results]
        self._runs_since = now if any(result.taken is not None for result in results) else None

    def settle(self, sequences: Items[Sequence], meanwhile: Task = nothing) -> float:
        began = time.perf_counter()
        self._sequences = len(sequences)
        self.session.judge(began, self._costs.verify_s.value)
        self._retune(sequences)
        untracked = self.session.untracked(sequences) if self._team is None else None
        if untracked is not None and self._track(untracked):
            self._misses.rows.pop(untracked.request, None)
        ahead = [s for s in sequences if s.request in self.session.tracked and s.speculation.mode == "ssd"]
        self.tuning.works_ahead = bool(ahead)
        if self._team is not None:
            self._team.use(all_cores=not ahead)
        launches = self._misses.settle(sequences, meanwhile, began) if self._misses.rows else []
        if told := [launch for launch in launches if launch.request in self.session.tracked]:
            self.session.tell(Launched(told))
        self.session.announce()
        ended = time.perf_counter()
        # An overlapped verification has been running since the previous outcomes.
        self._settled_at = self._runs_since or ended
        self._last_wait = ended - began
        return self._last_wait

    def asks(self, sequence: Sequence) -> tuple[int, int] | None:
        """Answer `ssd.verifier.overlap.Ask`."""
        if not self._policy(sequence.speculation).uses_cache:
            return None  # mode `sd`: the target waits for the draft
        tracked = sequence.request in self.session.tracked
        return self.session.epoch or 0, sequence.speculation.num_speculative_tokens if tracked else 0

    def _policy(self, speculation: Speculation) -> MissPolicy:
        """Return the policy that decides about a row after a miss."""
        name = speculation.mode, "" if speculation.mode in ("sd", "ngram") else speculation.backup
        if name not in self._policies:
            self._policies[name] = load_policy(*name)
        return self._policies[name]

    def _track(self, sequence: Sequence) -> bool:
        """Tell the draft of a sequence, and return True if it was told."""
        # In mode `sd` the draft publishes only while the target waits.
        awaited = sequence.round == 0 or not self._policy(sequence.speculation).uses_cache
        return self.session.track(sequence, awaited)

    def _retune(self, sequences: Items[Sequence]) -> None:
        """Give every sequence the tuner's present plan; the draft hears of it before the next launch."""
        self._learns = any(map(self._needs_measures, sequences))
        rows, last = [], None
        if any(sequence.tuned for sequence in sequences):
            self.tuning.situate(
                [kind_of(s.law.temperature) for s in sequences], self.session.state in ("up", "half_open")
            )
        self._steady = (len(sequences), self._steady[1] + 1 if self._steady[0] == len(sequences) else 0)
        for sequence in sequences:
            if not sequence.tuned:
                continue
            last, before = sequence, sequence.speculation
            planned = self.tuning.current(sequence.asked, kind_of(sequence.law.temperature))
            begins = planned.mode in DRAFTED and before.mode not in DRAFTED
            if planned == before or (begins and sequence.round > 0 and self._steady[1] < _STEADY):
                continue
            sequence.speculation = planned
            if planned.mode not in DRAFTED:
                self._misses.rows.pop(sequence.request, None)
                sequence.proposal, sequence.draft_probs, sequence.cache = [], None, ""
                self.session.release([sequence.request], ended=False)
            elif begins:
                if self._team is None:
                    self._track(sequence)
            elif sequence.request in self.session.tracked:
                rows.append((sequence.request, planned))
        if rows:
            self.session.tell(Retune(rows))
        if last is not None:
            self._describe(PlanKey.of(last.asked), setting_of(last.speculation), len(sequences))

    def _describe(self, key: PlanKey, setting: Setting, batch: int) -> None:
        """Describe the plan of a kind of request if it has changed, and else every few windows of rounds."""
        of = key, setting, self.tuning.windows // _DESCRIBED_EVERY, batch
        if of == self._plan_of:
            return
        self._plan_of, before = of, self._plan
        self._plan = self.tuning.described(key, None if self._team is None else (self._team.own, self._team.all))
        if self._plan.partition(":")[0] != before.partition(":")[0]:
            log.info("%s", self._plan)

    def _needs_measures(self, sequence: Sequence) -> bool:
        """Return True if the row's backup or plan uses measured times."""
        mode = sequence.speculation.mode
        return sequence.tuned or mode == "ar" or self._policy(sequence.speculation).decides_later

    # -- an outcome -----------------------------------------------------------------------------------------------

    def _look_up(self, result: Result) -> Verified:
        """Take the cached speculation, or leave the row to its backup."""
        sequence, outcome, policy = result.sequence, result.outcome, self._policy(result.sequence.speculation)
        key = Key(self.session.epoch or 0, sequence.request, result.round, result.base, *outcome)
        begins = sequence is self._beginner and self._begin(result)
        if begins:
            key = key._replace(base=len(sequence.tokens) - 1, accepted=0)
        if result.taken is not None:
            sequence.proposal = result.taken.ids
        speculates = (sequence.lookahead if policy.uses_draft else sequence.acceptable) > 0
        if policy.uses_cache and speculates and not begins:
            self._propose(result, key)
        in_flight = len(sequence.proposal)
        missed = not in_flight and result.taken is None and speculates and policy.decides_later
        if missed and not policy.hopeless(sequence, self._costs):
            self._misses.rows[sequence.request] = MissedRow(sequence, key, sequence.round, policy)
            in_flight = -1
        return Verified(sequence.request, result.round, key.accepted, outcome.token, in_flight)

    def _begin(self, result: Result) -> bool:
        """Tell the draft of a sequence as it was before an outcome's last token; return True if it was told."""
        sequence = result.sequence
        sequence.cache = "first_round"
        in_turn = not self._policy(sequence.speculation).uses_cache
        return self.session.track(sequence, in_turn, result.round, len(sequence.tokens) - 1)

    def _propose(self, result: Result, key: Key) -> None:
        """Propose what the board has for an outcome, and note what it had."""
        sequence, session = result.sequence, self.session
        tracked, entry, prepared = sequence.request in session.tracked, None, dict[int, int]()
        if tracked:
            if result.taken is None:
                entry = session.find(sequence, key, sequence.lookahead)
            elif result.taken.entry >= 0:
                entry = result.taken.entry
            if entry is None:
                prepared = session.board.prepared(sequence.slot, key)
        sequence.cache = session.verdict(sequence, key, entry, prepared)
        self._trace.looked_up(sequence.request, sequence.cache)
        if tracked:
            session.showed(sequence.request, entry is not None or bool(prepared))
            if result.round > 0 and self._learns:
                self._learn_rank(result, entry, prepared)

    # -- what rounds show -----------------------------------------------------------------------------------------

    def _learn_rank(self, result: Result, entry: int | None, prepared: dict[int, int]) -> None:
        """Note which of the prepared tokens the bonus token was."""
        sequence, accepted = result.sequence, result.outcome.accepted
        if entry is not None:
            rank, fan_out = self.session.board.place(sequence.slot, entry)
            self._learner(sequence).looked_up(fan_out, rank)
        elif accepted in prepared:  # a draft that is late says nothing of its candidates
            self._learner(sequence).looked_up(prepared[accepted], None)

    def _time(self, now: float, results: Items[Result]) -> DecodingRound | None:
        """Note and return what a round took, if it had the same rows as the last one and all decode."""
        telemetry, round_ = self.session.board.telemetry(), None
        same = [result.sequence.request for result in results] == self._running
        if same and len(results) == self._sequences and all(result.round > 0 for result in results):
            self._costs.last_verify_s = now - self._settled_at
            self._costs.verify_s.note(now - self._settled_at)
            rows = [result.sequence for result in results]
            round_ = DecodingRound(
                batch=len(results),
                tokens=sum(1 + result.drafted for result in results),
                seconds=now - self._ended_at - self._last_wait,
                waited=self._last_wait,
                brought=sum(1 + result.outcome.accepted for result in results),
                beside=self.tuning.works_ahead,
                in_turn=all(sequence.speculation.mode == "sd" for sequence in rows),
                setting=self._setting(rows),
            )
            self.tuning.learn(round_, telemetry)
        self.tuning.end_round(telemetry)
        return round_

    def _setting(self, rows: Items[Sequence]) -> Setting | None:
        """Return the setting that all rows followed; None if they differed, or if one had no plan or no draft.

        With a team rows begin with the draft one a round. Rows that still wait for that count as having one: the wait
        is part of the plan's price."""
        first, at_once = rows[0].speculation, self._team is None or self.session.state != "up"
        for row in rows:
            without = at_once and row.speculation.mode in DRAFTED and row.request not in self.session.tracked
            if not row.tuned or row.speculation != first or without:
                return None
        return setting_of(first)

    def _learner(self, sequence: Sequence) -> Learner:
        return self.tuning.learners[kind_of(sequence.law.temperature)]

    def _learn(self, result: Result) -> None:
        """Record how many of the verified draft tokens were accepted."""
        sequence, drafted, accepted = result.sequence, result.drafted, result.outcome.accepted
        waited = self._misses.waited.pop(sequence.request, None)
        ahead = sequence.request in self.session.tracked and self._policy(sequence.speculation).uses_cache
        # The first round after the prefill waits for a draft that may still compute the prompt.
        if waited is not None and result.round > 1 and ahead:
            self._learner(sequence).missed(accepted + 1, waited, drafted)
        policy = self._misses.asked.pop(sequence.request, None)
        if policy is not None:
            policy.note(sequence.request, drafted, sequence.tokens[result.base :])
        if sequence.speculation.mode == "ngram":
            self.tuning.looked_up(kind_of(sequence.law.temperature), drafted, accepted)
        if policy is not None:
            return
        self.session.seen.drafted += drafted > 0
        self.session.seen.accepted += accepted
        if self._learns:
            self._learner(sequence).outcome(drafted, accepted)
            self._costs.acceptance.note_outcome(drafted, accepted)
