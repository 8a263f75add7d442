"""Gets draft tokens for the target: advice that may be late, wrong or missing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container
from collections.abc import Sequence as Items
from itertools import chain
from typing import NamedTuple

from ssd.config.params import DRAFTED, Mode, Speculation
from ssd.execution.core_team import CoreTeam
from ssd.execution.meanwhile import Task, nothing
from ssd.ipc.board import BoardReader, Cached, Key, LinkFigures
from ssd.ipc.draft_probs import DraftProbsArena
from ssd.ipc.messages import DraftState, Outcomes, Retune, Verified
from ssd.ipc.public import Message, Source
from ssd.ipc.trace_ring import NO_TRACE, Mark, TraceRing, plan_figures
from ssd.speculation.acceptance import Outcome
from ssd.tuning.estimates import DecodingRound, Estimates, Setting
from ssd.tuning.tuner import PlanKey, Tuning, setting_of
from ssd.verifier.draft_session import DraftSession
from ssd.verifier.memory import SuffixMemory
from ssd.verifier.misses import GuessedTokens, MissedRow, MissedRows, MissPolicy, WaitCosts, load_policy
from ssd.verifier.sequence import Cache, Sequence

_DESCRIBED_EVERY = 8  # windows of rounds
# Rounds with the same number of rows before a running row begins with a draft: the draft must read its text first,
# which does not pay in a batch that shrinks from round to round.
_STEADY = 8


class Result(NamedTuple):
    """The outcome of one verification, which `sequence` has committed already.

    `base` tokens were committed before it. `taken`: draft tokens of the next verification, which runs already."""

    sequence: Sequence
    round: int
    base: int
    drafted: int
    outcome: Outcome
    cache: Cache
    taken: Cached | None = None
    source: Source = "draft"


class AskedDraft(NamedTuple):
    """The draft tokens of a row in the verification after a running one, at most `most`.

    They are on the board, by a draft of this `epoch`, or `inline`, by a draft in this process."""

    epoch: int = 0
    most: int = 0
    inline: bool = False


class Counters(NamedTuple):
    """Totals so far: the draft's tree `steps`, their seconds, late `compiles`, unsound entries `rejected`.

    `stale` look-ups found only outdated entries. `link`: to a remote draft."""

    steps: int = 0
    step_seconds: float = 0.0
    stale: int = 0
    link: LinkFigures | None = None
    rejected: int = 0
    compiles: int = 0

    @property
    def mean_step_seconds(self) -> float:
        return self.step_seconds / max(1, self.steps)


class Proposer:
    """Fills `Sequence.proposal` and names its `source`, nothing else. This one is plain decoding.

    The engine calls it. No method may block for long."""

    @property
    def state(self) -> DraftState:
        return "down"

    @property
    def counters(self) -> Counters:
        return Counters()

    @property
    def plan(self) -> str:
        """Return the tuner's choice and reason in a sentence; empty if there is none."""
        return ""

    def asks(self, sequence: Sequence) -> AskedDraft | None:
        """Answer `ssd.verifier.overlap.Ask`: no row has draft tokens."""
        return AskedDraft()

    def admit(self, sequence: Sequence) -> None:
        """Note that a sequence begins, or begins again with its committed tokens."""

    def outcomes(self, results: Items[Result]) -> None:
        """Propose what is cached for the outcomes of one step."""

    def settle(self, sequences: Items[Sequence], meanwhile: Task = nothing) -> float:
        """Wait for missing proposals before a launch as long as it pays; return the seconds."""
        return 0.0

    def replan(self) -> None:
        """Judge the present plan, and choose the next: milliseconds of host work now and then."""

    def release(self, sequences: Items[Sequence]) -> None:
        """Forget sequences that ended or lost their pages."""

    def drafts(self, sequence: Sequence) -> bool:
        """Return True if a draft in this process may bring tokens for a sequence."""
        return False

    def leave(self, sequences: Items[Sequence]) -> None:
        """Forget sequences that a draft in this process does not serve."""


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


class Introductions:
    """Tells the draft of each sequence: when the sequence begins to use it, or with an outcome.

    A draft that shares cores (`team`) hears of a sequence with its first outcome. A draft with its own cores hears when
    a sequence begins, or with an outcome if the sequence was lost. Outcomes introduce one sequence a round, as its text
    must be computed."""

    def __init__(self, session: DraftSession, policies: Policies, team: CoreTeam | None) -> None:
        self.session, self.team, self._policies = session, team, policies

    def admit(self, sequence: Sequence) -> None:
        """Tell the draft of a sequence that begins to use it, unless they share cores."""
        if self.team is None:
            # In mode `sd` the draft publishes only while the target waits.
            awaited = sequence.round == 0 or not self._policies.of(sequence.speculation).uses_cache
            self.session.track(sequence, awaited)

    def with_outcomes(self, results: Items[Result]) -> Sequence | None:
        """Tell the draft of one sequence as it was before its present outcome; return that sequence."""
        free = [result.sequence for result in results if result.taken is None or not result.taken.ids]
        sequence = self.session.untracked(free)
        if sequence is None:
            return None
        in_turn = not self._policies.of(sequence.speculation).uses_cache
        if not self.session.track(sequence, in_turn, sequence.round - 1, len(sequence.tokens) - 1):
            return None
        sequence.cache = "first_round"
        return sequence

    def settle(self, sequences: Items[Sequence]) -> bool:
        """Return True if the draft works ahead in the next verification; else use its cores too."""
        tracked = self.session.tracked
        drafts = self.session.breaker.state != "open"
        ahead = drafts and any(s.request in tracked and s.speculation.mode == "ssd" for s in sequences)
        if self.team is not None:
            self.team.use(all_cores=not ahead)
        return ahead


class PlanFollower:
    """Brings tuned sequences to the tuner's present plan; `plan` says it in a sentence.

    `inline` drafts for modes that the draft's process does not serve."""

    def __init__(
        self, tuning: Tuning, introductions: Introductions, misses: MissedRows, trace: TraceRing, inline: Proposer
    ) -> None:
        self._tuning, self._introductions, self._misses, self._trace = tuning, introductions, misses, trace
        self._session, self._inline, team = introductions.session, inline, introductions.team
        self._cores = None if team is None else (team.own, team.all)
        self._rows, self._unchanged = 0, 0  # number of rows, and for how many rounds it has not changed
        self.plan, self._described = "", (PlanKey.of(Speculation("ar")), ("ar", 0, 0), -1, 0)
        self._followed: tuple[PlanKey, Setting, int] | None = None  # and the number of rows

    def planned(self, sequence: Sequence) -> Speculation:
        return self._tuning.current(sequence.asked, sequence.kind) if sequence.tuned else sequence.speculation

    def wants_draft(self, sequences: Items[Sequence]) -> bool:
        """Return True if a sequence uses the draft's process, or would by its plan."""
        serves = self._session.modes
        if any(sequence.speculation.mode in serves for sequence in sequences):
            return True
        asked = {sequence.asked for sequence in sequences if sequence.tuned}
        drafted = self._drafted(called=True)
        parked = self._session.state == "parked"
        return parked and any(self._tuning.mode_with(drafted, one) in serves for one in asked)

    def follow(self, sequences: Items[Sequence]) -> None:
        """Give every sequence the tuner's present plan; tell the draft."""
        self._unchanged = self._unchanged + 1 if self._rows == len(sequences) else 0
        self._rows = len(sequences)
        tuned = [sequence for sequence in sequences if sequence.tuned]
        if not tuned:
            return
        tokens = sum(len(sequence.tokens) for sequence in sequences) / len(sequences)
        self._tuning.situate([s.kind for s in sequences], self._drafted(), tokens)
        told, serves = [], self._session.modes
        for sequence in tuned:
            planned = self.planned(sequence)
            before = sequence.speculation.mode
            begins = planned.mode in serves and before not in serves
            if planned == sequence.speculation or (begins and sequence.round > 0 and self._unchanged < _STEADY):
                continue
            sequence.speculation = planned
            if begins:
                if not sequence.proposal:  # else it is told when no draft tokens of its are being verified
                    self._introductions.admit(sequence)
            elif planned.mode not in serves and before != planned.mode:
                self._misses.rows.pop(sequence.request, None)
                if before in serves:
                    sequence.proposal, sequence.draft_probs, sequence.cache = [], None, ""
                    self._session.release([sequence.request], ended=False)
            elif sequence.request in self._session.tracked:
                told.append((sequence.request, planned))
        if told:
            self._session.tell(Retune(told))
        self._followed = PlanKey.of(tuned[-1].asked), setting_of(tuned[-1].speculation), len(sequences)

    def _drafted(self, called: bool = False) -> tuple[Mode, ...]:
        usable = called or self._session.state in ("up", "half_open") or self._session.breaker.stalled
        inline = self._inline.state == "up"
        return tuple(mode for mode in DRAFTED if (usable if mode in self._session.modes else inline))

    def replan(self) -> None:
        if self._followed is not None:
            self._describe(*self._followed)
            self._tuning.judge()

    def _describe(self, key: PlanKey, setting: Setting, batch: int) -> None:
        of = key, setting, self._tuning.windows // _DESCRIBED_EVERY, batch
        if of == self._described:
            return
        self._described, before = of, self.plan
        self.plan = self._tuning.described(key, self._cores)
        level = logging.INFO if self.plan.partition(":")[0] != before.partition(":")[0] else logging.DEBUG
        figures = chain(*(plan_figures(speed, *plan.setting) for plan, speed in self._tuning.choice(key)))
        self._trace.note(Mark.PLAN, batch, *figures, level=level)


class RoundEvidence:
    """Tells tuner, session and policies what each round took and brought.

    `learns`: some row uses measured times. `remote`: waits are normal, so the breaker is told the measured gain."""

    def __init__(
        self, tuning: Tuning, introductions: Introductions, misses: MissedRows, remote: bool, inline: Proposer
    ) -> None:
        self._tuning, self._introductions, self._misses, self._inline = tuning, introductions, misses, inline
        self._estimates, self._session, self._remote = tuning.estimates, introductions.session, remote
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
                setting=self._setting(rows),
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

    def _setting(self, rows: Items[Sequence]) -> Setting | None:
        """Return the setting that all rows followed; None if they differed, or one had no plan or no draft.

        A row that waits for its introduction counts as having a draft: the wait is part of the plan's price."""
        first = rows[0].speculation
        session = self._session
        at_once = self._introductions.team is None or session.state != "up"
        for row in rows:
            drafted = row.request in session.tracked and session.breaker.state != "open"
            without = at_once and row.speculation.mode in session.modes and not drafted
            without |= self._drafts_here(row) and not self._inline.drafts(row)
            if not row.tuned or row.speculation != first or without:
                return None
        return setting_of(first)

    def _learn(self, result: Result, ending: bool) -> None:
        sequence, drafted, accepted = result.sequence, result.drafted, result.outcome.accepted
        learner = self._estimates.learners[sequence.kind]
        waited = self._misses.waited.pop(sequence.request, None)
        policy = self._misses.asked.pop(sequence.request, None)
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
        self.session = DraftSession(board, send, draft_probs, DRAFTED if inline is None else ("ssd",))
        self._own_modes, self._inline = (*self.session.modes, "ngram"), inline or Proposer()
        self._memory, self._overlaps = memory, overlaps
        self._memory_was_better = set[int]()  # requests whose last guess was better than the draft's tokens
        self._ending = set[int]()  # requests whose next speculation the draft may end
        self._trace, self.tuning = trace, tuning or Tuning()
        self.tuning.estimates.ends = not remote and inline is None  # these are asked for all K at once
        self._costs = WaitCosts(self.tuning.estimates)
        self._misses = MissedRows(self.session, self._costs, trace)
        self._policies = Policies()
        self._introductions = Introductions(self.session, self._policies, team)
        self.plans = PlanFollower(self.tuning, self._introductions, self._misses, trace, self._inline)
        self._evidence = RoundEvidence(self.tuning, self._introductions, self._misses, remote, self._inline)

    @property
    def state(self) -> DraftState:
        lost = self.session.state == "down"
        return self._inline.state if lost else self.session.state

    @property
    def counters(self) -> Counters:
        board = self.session.board
        counted = board.telemetry()
        found = counted.steps, counted.step_seconds, board.stale, board.link(), board.rejected, counted.compiles
        return Counters(*found)

    @property
    def plan(self) -> str:
        return self.plans.plan

    def asks(self, sequence: Sequence) -> AskedDraft | None:
        if sequence.speculation.mode not in self._own_modes:
            return self._inline.asks(sequence)
        if not self._policies.of(sequence.speculation).uses_cache:
            return None  # mode `sd`: the target waits for the draft
        if sequence.request in self._memory_was_better:
            return None  # it guesses only after the outcome
        tracked = sequence.request in self.session.tracked
        return AskedDraft(self.session.epoch or 0, sequence.speculation.num_speculative_tokens if tracked else 0)

    def admit(self, sequence: Sequence) -> None:
        sequence.speculation = self.plans.planned(sequence)
        if sequence.speculation.mode in self.session.modes:
            self._introductions.admit(sequence)

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
        self.session.judge(began, self.tuning.estimates.verify_s.value)
        self.plans.follow(sequences)
        self._evidence.learns = self._memory is not None or any(map(self._policies.need_times, sequences))
        self.tuning.estimates.works_ahead = self._introductions.settle(sequences)
        if self._misses.rows:
            self._misses.settle(sequences, meanwhile, began)
        self._inline.settle(sequences, meanwhile)
        self.session.announce()
        return self._evidence.settled(len(sequences), began)

    def outcomes(self, results: Items[Result]) -> None:
        now = time.perf_counter()
        self._inline.outcomes(results)
        speculated = [result for result in results if result.sequence.speculation.mode in self._own_modes]
        begun = self._introductions.with_outcomes(speculated)
        self._costs.batch = self._costs.verified = len(results)
        ended, self._ending = self._ending, set()
        rows = [self._look_up(result, result.sequence is begun) for result in speculated]
        told = [row for row in rows if row.request in self.session.tracked]
        needing = told
        if self._misses.rows:
            needing = [row for row in told if not self._misses.needs_no_draft(row.request)]
        self.session.seen.rows += len(needing)
        if told and not needing and self._introductions.team is not None:
            self._misses.hold(told)
        elif told:
            self.session.tell(Outcomes(told))
        self._evidence.verified(now, results, ended)  # the draft is at work: there is time to learn
        if not self._overlaps:  # else it does so beside the next forward
            self.replan()

    def replan(self) -> None:
        self.plans.replan()

    def _look_up(self, result: Result, begins: bool) -> Verified:
        """Take the cached speculation, or leave the row to the memory or its backup."""
        sequence, outcome, policy = result.sequence, result.outcome, self._policies.of(result.sequence.speculation)
        key = Key(self.session.epoch or 0, sequence.request, result.round, result.base, *outcome)
        if begins:
            key = key._replace(base=len(sequence.tokens) - 1, accepted=0)
        if result.taken is not None:
            sequence.proposal = result.taken.ids
        speculates = (sequence.lookahead if policy.uses_draft else sequence.acceptable) > 0
        if policy.uses_cache and speculates and not begins:
            self._propose(result, key)
        guess = None if self._memory is None else self._better_guess(self._memory, result)
        in_flight: int | None = len(sequence.proposal)
        missed = not in_flight and result.taken is None and speculates and policy.decides_later
        if guess is not None:
            self._misses.rows[sequence.request] = MissedRow(sequence, key, policy, guess)
            in_flight = None
        elif missed and (price_and_worth := policy.hopeless(sequence, self._costs)):
            if policy.uses_draft:
                self._misses.note_reason(sequence.request, Mark.HOPELESS, *price_and_worth)
        elif missed:
            self._misses.rows[sequence.request] = MissedRow(sequence, key, policy)
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
            session.showed(sequence.request, entry is not None or bool(prepared))
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


def _memory_helped(results: Items[Result]) -> bool:
    remembered = sum(result.outcome.accepted for result in results if result.source == "memory")
    return 4 * remembered > sum(1 + result.outcome.accepted for result in results)


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
