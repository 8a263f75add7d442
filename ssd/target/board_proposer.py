"""Proposals from a draft process: read in place from the board, awaited only as long as that pays."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Items

from ssd.ipc.board import BoardReader, Key
from ssd.ipc.messages import Admit, Launched, Message, Outcome, Outcomes, Rejoin, Release
from ssd.speculation.backup import depth_worth_waiting_for
from ssd.target.proposer import Result
from ssd.target.sequence import Sequence

# A request that waits in vain this often in a row waits no more, but for a trial every so many rounds.
_STRIKES = 3
_PROBE_EVERY = 16
_POLL_S = 20e-6
_SMOOTHING = 0.1


class _Measured:
    """An exponentially weighted mean."""

    def __init__(self, value: float) -> None:
        self.value = value

    def note(self, sample: float) -> None:
        self.value += _SMOOTHING * (sample - self.value)


class BoardProposer:
    """See `ssd.target.proposer.Proposer`. `send` posts a message to the draft without blocking and says whether it
    went; while the draft is away every row simply has no draft tokens."""

    def __init__(self, board: BoardReader, send: Callable[[Message], bool]) -> None:
        self._board, self._send = board, send
        self._epoch: int | None = None
        self._open: dict[int, tuple[Sequence, Key, int]] = {}  # request -> (sequence, its miss, round to verify)
        self._strikes: dict[int, int] = {}  # request -> waits in vain, in a row
        self._rounds, self._deaf = 0, False
        self._acceptance = _Measured(0.5)
        self._token_wait_s = _Measured(0.005)
        self._verify_s = _Measured(0.02)
        self._settled_at = 0.0

    @property
    def step_seconds(self) -> float:
        counters = self._board.telemetry()
        return counters.step_seconds / max(1, counters.steps)

    # -- the draft comes and goes -----------------------------------------------------------------------------------

    def join(self, epoch: int, running: Items[Sequence]) -> None:
        """A draft said hello: from now on only its epoch counts, and it is told about every running sequence."""
        self._epoch, self._deaf = epoch, False
        self._strikes.clear()
        self._open.clear()
        for sequence in running:
            # A draft that knows committed tokens alone cannot follow a verification of draft tokens.
            sequence.proposal, sequence.hit = [], None
            self.admit(sequence)

    def _tell(self, message: Message) -> None:
        """Post to the draft. Once a message is lost its picture is wrong: it is asked to start over when it reads."""
        if self._epoch is None:
            return
        if self._deaf:
            self._deaf = not self._send(Rejoin())
        elif self._send(message):
            return
        else:
            self._deaf = True
        self._open.clear()  # what was just said is lost: no answer will come

    # -- Proposer ---------------------------------------------------------------------------------------------------

    def admit(self, sequence: Sequence) -> None:
        if sequence.speculation.mode == "ar":
            return
        law = sequence.law
        self._tell(
            Admit(
                request=sequence.request,
                slot=sequence.slot,
                round=sequence.round,
                token_ids=sequence.tokens,
                temperature=law.temperature,
                top_k=law.top_k,
                top_p=law.top_p,
                min_p=law.min_p,
                seed=law.seed,
                speculation=sequence.speculation,
            )
        )

    def release(self, sequences: Items[Sequence]) -> None:
        for sequence in sequences:
            self._open.pop(sequence.request, None)
            self._strikes.pop(sequence.request, None)
        self._tell(Release([s.request for s in sequences if s.speculation.mode != "ar"]))

    def outcomes(self, results: Items[Result]) -> None:
        if self._settled_at:
            self._verify_s.note(time.perf_counter() - self._settled_at)
        rows = []
        for result in results:
            if result.sequence.speculation.mode == "ar" or self._epoch is None:
                continue
            for trial in range(min(result.drafted, result.outcome.accepted + 1)):
                self._acceptance.note(float(trial < result.outcome.accepted))
            rows.append(self._look_up(result, self._epoch))
        if rows:
            self._tell(Outcomes(rows))

    def _look_up(self, result: Result, epoch: int) -> Outcome:
        """Take the cached speculation, or leave the row open for its backup."""
        sequence, outcome = result.sequence, result.outcome
        key = Key(epoch, sequence.request, result.round, result.base, outcome.accepted, outcome.token)
        ids: list[int] | None = None
        if sequence.speculation.mode == "ssd" and sequence.lookahead > 0:
            ids = self._board.lookup(sequence.slot, key, sequence.lookahead)
            if result.round > 0:
                sequence.hit = bool(ids)
        in_flight = 0
        if ids:
            sequence.proposal = ids
            in_flight = len(ids)
        elif sequence.lookahead > 0 and (sequence.speculation.mode == "sd" or sequence.speculation.backup == "jit"):
            self._open[sequence.request] = (sequence, key, sequence.round)
            in_flight = -1
        return Outcome(sequence.request, result.round, outcome.accepted, outcome.token, in_flight)

    def settle(self, sequences: Items[Sequence]) -> float:
        self._rounds += 1
        began = time.perf_counter()
        if self._open:
            waited_for = self._depths(sequences)
            if waited_for:
                self._wait(waited_for, began)
            rows = [(s.request, next_round, len(s.proposal)) for s, _, next_round in self._open.values()]
            self._open.clear()
            self._tell(Launched(rows))
        self._settled_at = time.perf_counter()
        return self._settled_at - began

    def _depths(self, sequences: Items[Sequence]) -> dict[int, int]:
        """How many tokens each open row waits for; empty when waiting does not pay or has been in vain lately."""
        ready = [len(s.proposal) for s in sequences if s.request not in self._open and s.round > 0]
        missed = [s for s, _, _ in self._open.values() if s.speculation.mode == "ssd"]
        longest = max((s.lookahead for s in missed), default=0)
        worth = depth_worth_waiting_for(
            ready, len(missed), longest, self._acceptance.value, self._verify_s.value, self._token_wait_s.value
        )
        depths = {
            s.request: s.lookahead if s.speculation.mode == "sd" else min(worth, s.lookahead)
            for s, _, _ in self._open.values()
        }
        probing = self._rounds % _PROBE_EVERY == 0
        return {
            request: depth
            for request, depth in depths.items()
            if depth > 0 and (probing or self._strikes.get(request, 0) < _STRIKES)
        }

    def _wait(self, depths: dict[int, int], began: float) -> None:
        """Poll the board until every row has its depth or the deadline passes; keep whatever is there."""
        deepest = max(depths.values())
        deadline = began + max(self._verify_s.value, 4 * deepest * self._token_wait_s.value)
        arrived = began
        while True:
            done = True
            for sequence, key, _ in self._open.values():
                wanted = depths.get(sequence.request, 0)
                if len(sequence.proposal) < wanted:
                    found = self._board.lookup(sequence.slot, key, wanted) or []
                    if len(found) > len(sequence.proposal):
                        sequence.proposal, arrived = found, time.perf_counter()
                    done = done and len(sequence.proposal) >= wanted
            now = time.perf_counter()
            if done or now >= deadline:
                break
            time.sleep(_POLL_S)
        for request in depths:
            answered = bool(self._open[request][0].proposal)
            self._strikes[request] = 0 if answered else self._strikes.get(request, 0) + 1
        got = max(len(s.proposal) for s, _, _ in self._open.values())
        if got:
            self._token_wait_s.note((arrived - began) / got)
