"""The rows of a round that missed: waits for the draft's tokens, and launches what the rows verify."""

from __future__ import annotations

import time
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import takewhile

from ssd.config.params import DRAFTED, MAX_LOOKAHEAD, Mode
from ssd.execution.meanwhile import Task
from ssd.ipc.board import Key
from ssd.ipc.messages import Launch, Launched, Outcomes, Verified
from ssd.ipc.trace_ring import Mark, State, TraceRing
from ssd.verifier.draft_session import DraftSession
from ssd.verifier.misses import GuessedTokens, MissCosts, MissPolicy, WeighedWait
from ssd.verifier.sequence import Sequence

# Least seconds between two looks at the board, and as a share of a draft token's: looking takes time from a draft on
# the same cores.
_POLL_S, _POLL_SHARE = 20e-6, 1 / 64
# Seconds without anything new after which the draft is not waited for any more.
_LONGEST_SILENCE_S = 0.2


@dataclass
class MissedRow:
    """A row without draft tokens, its mode, the key of the draft's answer, and the memory's guess.

    `unsent`: its outcome, while the draft has not been told of it."""

    sequence: Sequence
    mode: Mode
    key: Key
    policy: MissPolicy
    guess: GuessedTokens | None = None
    unsent: Verified | None = None


class MissedRows:
    """Owns the rows of a round that missed, from their outcomes to their launch. The proposer calls it.

    By request: `rows`; seconds `waited` by rows whose draft works ahead; `proposed_by`, the policy asked last."""

    def __init__(self, session: DraftSession, costs: MissCosts, trace: TraceRing) -> None:
        self._session, self._costs, self._trace = session, costs, trace
        self.rows: dict[int, MissedRow] = {}
        self.waited: dict[int, float] = {}
        self.proposed_by: dict[int, MissPolicy] = {}
        self._silent_at = 0.0  # when a wait in vain ended

    def forget(self, request: int) -> None:
        for known in (self.rows, self.waited, self.proposed_by):
            known.pop(request, None)

    def note_reason(self, request: int, reason: Mark, *figures: float) -> None:
        self._trace.note(reason, request, *figures)

    def _send_outcomes(self) -> None:
        if unsent := [row.unsent for row in self.rows.values() if row.unsent is not None]:
            self._session.tell(Outcomes(unsent))
        for row in self.rows.values():
            row.unsent = None

    def settle(self, sequences: Items[Sequence], meanwhile: Task, began: float) -> None:
        """Wait as long as it pays; tell the draft what the missed rows verify now."""
        depths = self._depths(sequences, began)
        if depths:
            self._send_outcomes()
        if depths and self._session.stalled:
            for request, depth in depths.items():
                self.note_reason(request, Mark.STALLED, 1e3 * (began - self._silent_at), depth)
        elif depths:
            self._trace.enter(State.WAIT_FOR_DRAFT, max(depths.values()))
            meanwhile()
            self._wait(depths, began)
            self._trace.enter(State.OTHER)
        waited = time.perf_counter() - began
        launches = [self._launch(row) for row in self.rows.values()]
        self._send_outcomes()
        ahead = (row.sequence for row in self.rows.values() if row.mode == "ssd")
        self.waited |= dict.fromkeys((s.request for s in ahead if s.source != "memory"), waited)
        self.rows.clear()
        if told := [launch for launch in launches if launch.request in self._session.tracked]:
            self._session.tell(Launched(told))

    def _depths(self, sequences: Items[Sequence], began: float) -> dict[int, int]:
        """Return how many tokens each row waits for; empty when waiting does not pay."""
        costs, tracked = self._costs, self._session.tracked
        costs.ready = [len(s.proposal) for s in sequences if s.request not in self.rows and s.round > 0]
        costs.verified = len(sequences) + sum(costs.ready)
        link = self._session.board.link()
        costs.away_s = 0.0 if link is None else link.rtt
        costs.weighed = {}
        missed: dict[MissPolicy, list[Sequence]] = {}
        for request, row in self.rows.items():
            if row.policy.decides_later and tracked.worth_waiting(request):
                missed.setdefault(row.policy, []).append(row.sequence)
            elif row.policy.decides_later and row.mode in DRAFTED:
                self.note_reason(request, Mark.UNSEEN, request in tracked, 1e3 * tracked.unseen_s(request, began))
        depths: dict[int, int] = {}
        for policy, rows in missed.items():
            depths |= policy.depths(rows, costs)
        for request, row in self.rows.items():
            if row.guess is not None and depths.get(request):
                depths[request] = min(depths[request], *costs.depths([row.sequence], 1 + row.guess.accepted).values())
        step = costs.estimates.costs.of("step_beside")
        if missed and step is not None and not any(depths.values()):
            # Nothing is measured without a wait. So a slow answer fades: the mean moves to the time of a draft step.
            costs.estimates.token_s.note(step.at(sum(map(len, missed.values()))))
        for request in (request for request, depth in depths.items() if depth == 0):
            self.note_reason(request, Mark.NO_GAIN, *costs.weighed.get(request, ()))
        return {request: depth for request, depth in depths.items() if depth > 0}

    def _wait(self, depths: dict[int, int], began: float) -> None:
        """Poll the board until every row has all its tokens or nothing comes any more."""
        known, away_s, deepest = self._costs.estimates, self._costs.away_s, max(depths.values())
        expected_s = 4 * deepest * known.token_s.value * self._session.breaker.patient
        patience, limit = max((known.verify_s.value, 0), (expected_s, 1))  # as `Mark.SILENT` numbers the limits
        patience, limit = min((patience + away_s, limit), (_LONGEST_SILENCE_S, 2))
        waiting = left = [(self.rows[request], depth) for request, depth in depths.items()]
        arrived = began
        while True:
            rest = []
            for row, wanted in left:
                before = len(row.sequence.proposal)
                found = self._session.find(row.sequence, row.key, wanted)
                if len(row.sequence.proposal) > before:
                    arrived = time.perf_counter()
                if len(row.sequence.proposal) < wanted and not (found and found.ended):
                    rest.append((row, wanted))
            left, now = rest, time.perf_counter()
            if not left or now >= arrived + patience:
                for row, wanted in left:
                    came = len(row.sequence.proposal)
                    self.note_reason(row.sequence.request, Mark.SILENT, 1e3 * patience, came, wanted, limit)
                break
            time.sleep(max(_POLL_S, _POLL_SHARE * known.token_s.value))
        got = max(len(row.sequence.proposal) for row, _ in waiting)
        weighed = self._costs.weighed.get(waiting[0][0].sequence.request, WeighedWait())
        brought = weighed.gain, weighed.ms, weighed.speed, 1e3 * known.token_s.value
        self._trace.note(Mark.WAITED, len(waiting), weighed.rate, got, deepest, 1e3 * (now - began), *brought)
        known.token_s.note(max(0.0, arrived - began - away_s) / got if got else patience / deepest)
        self._judge_wait([row for row, _ in waiting], got, began)

    def _judge_wait(self, waiting: Items[MissedRow], got: int, began: float) -> None:
        """Note what a wait since `began` showed of the draft; a row got at most `got` tokens."""
        session, known, seconds = self._session, self._costs.estimates, time.perf_counter() - began
        if not got:
            self._silent_at = began + seconds
            seconds = min(seconds, _LONGEST_SILENCE_S)  # time beyond that was the target's own delay
        for row in waiting:
            if row.sequence.request in session.tracked:  # one that is given up may show that all are
                session.note_shown(row.sequence.request, bool(row.sequence.proposal), seconds)
        # A wait that brings something loses only its time beyond one verification. It loses nothing where a row must
        # wait: in turn with the draft (mode `sd`), or for a new request, whose text the draft computes first.
        ahead = all(row.key.round > 0 and row.mode == "ssd" for row in waiting)
        paid = 0.0 if not got else max(known.verify_s.value, known.last_verify_s) if ahead else seconds
        session.note_wait(max(0.0, seconds - paid), in_vain=not got)

    def _launch(self, row: MissedRow) -> Launch:
        """Return what a row verifies: the draft's tokens, else the memory's or its policy's."""
        sequence, own = row.sequence, list[int]()
        sequence.source = "draft" if sequence.proposal else "lookup"  # `propose` may name another one
        if not sequence.proposal:
            vocab_size, most = self._session.board.vocab_size, min(sequence.acceptable, MAX_LOOKAHEAD)
            asks = row.policy.decides_later and (row.guess is None or sequence.cache != "hit")
            found = row.policy.propose(sequence, self._costs)[:most] if asks else []
            gain = row.policy.gain(sequence.request)
            if row.guess is not None and (not found or (gain is not None and row.guess.gain > gain)):
                found, sequence.source, sequence.cache = list(row.guess.tokens), "memory", ""
            # A proposal ends at the first id that is not in the vocabulary: a plugin may return anything.
            own = list(takewhile(lambda token: type(token) is int and 0 <= token < vocab_size, found))
            self._costs.verified += len(own)
            self.proposed_by[sequence.request] = row.policy
            sequence.proposal = own
        return Launch(sequence.request, sequence.round, len(sequence.proposal), own)
