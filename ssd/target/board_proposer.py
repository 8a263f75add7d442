"""Proposals from a draft process: read in place from the board, awaited only as long as that pays."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import NamedTuple

import torch

from ssd.ipc.board import BoardReader, Key
from ssd.ipc.laws import LawArena
from ssd.ipc.messages import Admit, Launch, Launched, Message, Outcome, Outcomes, Rejoin, Release, Retune
from ssd.monitor.lanes import SILENT, Lane, State
from ssd.speculation.backup import depth_worth_waiting_for
from ssd.speculation.fan_out import fan_out_at
from ssd.speculation.learner import Mean
from ssd.target.cheap import CheapProposals
from ssd.target.proposer import Counters, Result
from ssd.target.sequence import Cache, Sequence
from ssd.target.tuning import Round, Tuning

# A request that waits in vain this often in a row waits no more, but for a trial every so many rounds.
_STRIKES = 3
_PROBE_EVERY = 16
_POLL_S = 20e-6
# A draft that shows nothing new for so long is not waited for.
_LONGEST_SILENCE_S = 0.2
# Means of recent rounds: how fast old ones fade, and as how many the first guess counts.
_SMOOTHING, _SAMPLES = 0.1, 10


def _mean(value: float) -> Mean:
    return Mean(value, _SMOOTHING, _SAMPLES)


class _Missed(NamedTuple):
    """A row that found nothing on the board: under which key the draft will answer, for which round."""

    sequence: Sequence
    key: Key
    round: int


class BoardProposer:
    """See `ssd.target.proposer.Proposer`. `send` posts a message to the draft without blocking and says whether it
    went; while the draft is away a row has no draft tokens but those of a cheap speculator. `laws` is where the ratio
    rule finds what the draft tokens were drawn from."""

    def __init__(
        self,
        board: BoardReader,
        send: Callable[[Message], bool],
        laws: LawArena | None = None,
        lane: Lane = SILENT,
    ) -> None:
        self._board, self._send, self._laws, self._lane = board, send, laws, lane
        self._epoch: int | None = None
        self._open: dict[int, _Missed] = {}
        self._cheap, self._went_cheap = CheapProposals(board.vocab_size), set[int]()
        self._waited: dict[int, float] = {}  # seconds, of the rows whose last outcome was a miss
        self._strikes: dict[int, int] = {}  # request -> waits in vain, in a row
        self._rounds = 0
        self._hears = self._told_to_rejoin = False
        self._tuning = Tuning()
        self._retuned: set[int] = set()
        self._running = 0
        self._acceptance, self._cheap_tokens = _mean(0.5), _mean(1.5)
        self._token_wait_s, self._verify_s = _mean(0.005), _mean(0.02)
        self._settled_at = self._last_wait = 0.0

    @property
    def up(self) -> bool:
        return self._hears

    @property
    def step_seconds(self) -> float:
        counters = self._board.telemetry()
        return counters.step_seconds / max(1, counters.steps)

    @property
    def counters(self) -> Counters:
        counted = self._board.telemetry()
        return Counters(counted.steps, counted.step_seconds, self._board.stale)

    # -- the draft comes and goes -----------------------------------------------------------------------------------

    def join(self, epoch: int, running: Items[Sequence]) -> None:
        """A draft said hello: from now on only its epoch counts, and it is told about every running sequence."""
        self._epoch, self._hears, self._told_to_rejoin = epoch, True, False
        self._strikes.clear()
        self._open.clear()
        for sequence in running:
            # A draft that knows committed tokens alone cannot follow a verification of draft tokens.
            sequence.proposal, sequence.laws, sequence.cache = [], None, ""
            self.admit(sequence)

    def _tell(self, message: Message) -> None:
        """Post to the draft. Once a message is lost its picture is wrong: it is asked to start over when it reads."""
        if self._hears:
            self._hears = self._send(message)
        elif self._epoch is not None and not self._told_to_rejoin:
            self._told_to_rejoin = self._send(Rejoin())

    # -- Proposer ---------------------------------------------------------------------------------------------------

    def admit(self, sequence: Sequence) -> None:
        sequence.speculation = self._tuning.current(sequence.asked)
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
            self._went_cheap.discard(sequence.request)
            self._waited.pop(sequence.request, None)
            self._cheap.forget(sequence.request)
            self._retuned.discard(sequence.request)
        self._tell(Release([s.request for s in sequences if s.speculation.mode != "ar"]))

    def outcomes(self, results: Items[Result]) -> None:
        if self._settled_at and results:
            self._time(time.perf_counter() - self._settled_at, results)
        rows = []
        for result in results:
            if result.sequence.speculation.mode != "ar":
                self._learn(result)
                rows.append(self._look_up(result))
        if rows:
            self._tell(Outcomes(rows))

    def _time(self, seconds: float, results: Items[Result]) -> None:
        """Note how long a round took from its launch, unless it had other work than decoding."""
        telemetry = self._board.telemetry()
        if len(results) == self._running and all(result.round > 0 for result in results):
            self._verify_s.note(seconds)
            modes = {result.sequence.speculation.mode for result in results}
            tokens = sum(1 + result.drafted for result in results)
            brought = sum(1 + result.outcome.accepted for result in results)
            round_ = Round(len(results), tokens, seconds, self._last_wait, brought, modes == {"ar"}, modes == {"ssd"})
            self._tuning.learn(round_, telemetry)
        self._tuning.end_round(telemetry)

    def _learn(self, result: Result) -> None:
        """Note how well what was verified had been guessed."""
        waited = self._waited.pop(result.sequence.request, None)
        # The first round after the prefill waits for a draft that may still compute the prompt.
        if waited is not None and result.round > 1 and self._hears and result.sequence.speculation.mode == "ssd":
            self._tuning.learner.missed(result.outcome.accepted + 1, waited, result.drafted)
        if result.sequence.request in self._went_cheap:
            self._went_cheap.discard(result.sequence.request)
            self._cheap_tokens.note(result.outcome.accepted + 1)
            self._cheap.note(result.sequence.request, result.drafted, result.outcome.accepted)
            return
        self._tuning.learner.outcome(result.drafted, result.outcome.accepted)
        self._acceptance.note_outcome(result.drafted, result.outcome.accepted)

    def _look_up(self, result: Result) -> Outcome:
        """Take the cached speculation, or leave the row open for its backup."""
        sequence, outcome, speculation = result.sequence, result.outcome, result.sequence.speculation
        key = Key(self._epoch or 0, sequence.request, result.round, result.base, outcome.accepted, outcome.token)
        if speculation.mode == "ssd" and sequence.lookahead > 0:
            entry = None if self._epoch is None else self._take(sequence, key, sequence.lookahead)
            sequence.cache = self._verdict(sequence, key, entry)
            self._lane.looked_up(sequence.request, sequence.cache)
            if result.round > 0:
                self._learn_rank(result, entry)
        in_flight = len(sequence.proposal)
        if not in_flight and sequence.lookahead > 0 and (speculation.mode == "sd" or speculation.backup != "none"):
            self._open[sequence.request] = _Missed(sequence, key, sequence.round)
            in_flight = -1
        return Outcome(sequence.request, result.round, outcome.accepted, outcome.token, in_flight)

    def _verdict(self, sequence: Sequence, key: Key, entry: int | None) -> Cache:
        """What the cache had for an outcome: a proposal, an `entry` without a token yet, or nothing."""
        if key.round == 0:
            return "" if sequence.proposal else "first_round"
        if sequence.proposal:
            return "hit"
        if not self._hears:
            return "draft_down"
        prepared = self._board.prepared(sequence.slot, key)
        if entry is not None or not prepared:
            return "late"
        return "token_not_covered" if key.accepted in prepared else "k_not_covered"

    def _learn_rank(self, result: Result, entry: int | None) -> None:
        """Note which of the prepared tokens the bonus token was. Entries are numbered by accepted length, then rank."""
        request, fan_out = result.sequence.request, result.sequence.speculation.fan_out
        if request in self._retuned or not self._hears:
            self._retuned.discard(request)  # this tree was grown with other fan-outs, or not at all
            return
        counts = [fan_out_at(k, result.drafted, fan_out) for k in range(result.outcome.accepted + 1)]
        self._tuning.learner.looked_up(counts[-1], None if entry is None else entry + 1 - sum(counts[:-1]))

    def _take(self, sequence: Sequence, key: Key, most: int) -> int | None:
        """Propose what the board has for `key`, if it is more than there is already; returns where it was found."""
        found = self._board.find(sequence.slot, key, most)
        if found is None or len(found.ids) <= len(sequence.proposal):
            return None if found is None else found.entry
        ids, laws = found.ids, None
        if sequence.ratio_rule:
            if self._laws is None:
                return found.entry
            laws = torch.from_numpy(self._laws.read(sequence.slot, found.entry, key, ids))
            ids = ids[: len(laws)]
        if len(ids) > len(sequence.proposal):
            sequence.proposal, sequence.laws = ids, laws
        return found.entry

    def settle(self, sequences: Items[Sequence]) -> float:
        self._rounds += 1
        self._running = len(sequences)
        began = time.perf_counter()
        self._retune(sequences)
        if self._open:
            depths = self._depths(sequences)
            if depths:
                self._lane.enter(State.WAIT_FOR_DRAFT)
                self._wait(depths, began)
                self._lane.enter(State.OTHER)
            self._waited |= dict.fromkeys(self._open, time.perf_counter() - began)
            self._tell(Launched([self._launch(missed) for missed in self._open.values()]))
            self._open.clear()
        self._settled_at = time.perf_counter()
        self._last_wait = self._settled_at - began
        return self._last_wait

    def _retune(self, sequences: Items[Sequence]) -> None:
        """Bring every sequence to the tuner's present plan; the draft hears of it before the next launch."""
        changed = [s for s in sequences if s.asked.auto and s.speculation != self._tuning.current(s.asked)]
        rows = []
        for sequence in changed:
            before, sequence.speculation = sequence.speculation, self._tuning.current(sequence.asked)
            if sequence.speculation.mode == "ar":
                self._open.pop(sequence.request, None)
                sequence.proposal, sequence.laws, sequence.cache = [], None, ""
                self._tell(Release([sequence.request]))
            elif before.mode == "ar":
                self.admit(sequence)
            else:
                rows.append((sequence.request, sequence.speculation))
            self._retuned.add(sequence.request)
        if rows:
            self._tell(Retune(rows))

    def _launch(self, missed: _Missed) -> Launch:
        """What a row that missed verifies now: what the draft has brought, else what a cheap speculator makes of it."""
        sequence = missed.sequence
        cheap: list[int] = []
        if not sequence.proposal and sequence.speculation.mode == "ssd":
            cheap = sequence.proposal = self._cheap.propose(sequence, self._token_price())
            if cheap:
                self._went_cheap.add(sequence.request)
        return Launch(sequence.request, missed.round, len(sequence.proposal), cheap)

    def _token_price(self) -> float:
        return self._tuning.learner.token_price(self._running)

    def _depths(self, sequences: Items[Sequence]) -> dict[int, int]:
        """How many tokens each open row waits for; empty when waiting does not pay or has been in vain lately."""
        if not self._hears:
            return {}
        ready = [len(s.proposal) for s in sequences if s.request not in self._open and s.round > 0]
        missed = [row.sequence for row in self._open.values()]
        depths = {s.request: s.lookahead for s in missed if s.speculation.mode == "sd"}
        ahead = [s for s in missed if s.speculation.mode == "ssd" and s.speculation.backup in ("jit", "auto")]
        price = self._token_price()
        ideas = {s.request for s in ahead if s.speculation.backup == "auto" and self._cheap.propose(s, price)}
        for cheap, mine in (
            (1.0, [s for s in ahead if s.request not in ideas]),
            (self._cheap_tokens.value, [s for s in ahead if s.request in ideas]),
        ):
            longest = max((s.lookahead for s in mine), default=0)
            times = self._verify_s.value, self._token_wait_s.value
            worth = depth_worth_waiting_for(ready, len(mine), longest, self._acceptance.value, *times, cheap)
            depths |= {s.request: min(worth, s.lookahead) for s in mine}
        probing = self._rounds % _PROBE_EVERY == 0
        return {
            request: depth
            for request, depth in depths.items()
            if depth > 0 and (probing or self._strikes.get(request, 0) < _STRIKES)
        }

    def _wait(self, depths: dict[int, int], began: float) -> None:
        """Poll the board until every row has its depth or nothing comes any more; keep whatever is there."""
        deepest = max(depths.values())
        patience = min(_LONGEST_SILENCE_S, max(self._verify_s.value, 4 * deepest * self._token_wait_s.value))
        arrived = began
        while True:
            done = True
            for sequence, key, _ in self._open.values():
                wanted = depths.get(sequence.request, 0)
                if len(sequence.proposal) < wanted:
                    before = len(sequence.proposal)
                    self._take(sequence, key, wanted)
                    if len(sequence.proposal) > before:
                        arrived = time.perf_counter()
                    done = done and len(sequence.proposal) >= wanted
            now = time.perf_counter()
            if done or now >= arrived + patience:
                break
            time.sleep(_POLL_S)
        for request in depths:
            answered = bool(self._open[request].sequence.proposal)
            self._strikes[request] = 0 if answered else self._strikes.get(request, 0) + 1
        got = max(len(row.sequence.proposal) for row in self._open.values())
        self._token_wait_s.note((arrived - began) / got if got else patience / deepest)
