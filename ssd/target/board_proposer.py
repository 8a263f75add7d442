"""Proposals from a draft process: read in place from the board, awaited only as long as that pays."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import NamedTuple

from ssd.execution.meanwhile import Task, nothing
from ssd.ipc.board import BoardReader, Key
from ssd.ipc.laws import LawArena
from ssd.ipc.messages import Admit, DraftState, Launch, Launched, Message, Outcome, Outcomes, Rejoin, Release, Retune
from ssd.monitor.lanes import SILENT, Lane, State
from ssd.params import Mode
from ssd.speculation.backup import depth_worth_waiting_for
from ssd.speculation.fan_out import fan_out_at
from ssd.speculation.learner import Mean
from ssd.speculation.tuner import Line
from ssd.target.breaker import Breaker, Seen
from ssd.target.cheap import CheapProposals
from ssd.target.followers import Followers
from ssd.target.proposer import Counters, Result
from ssd.target.sequence import Cache, Sequence
from ssd.target.tuning import Round, Tuning

log = logging.getLogger("ssd.target")

_POLL_S = 20e-6
# A draft that shows nothing new for so long is not waited for.
_LONGEST_SILENCE_S = 0.2
_WARNING_S = 60.0
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
    went; a row that the draft does not follow has no draft tokens but those of a cheap speculator. `laws` is where the
    ratio rule finds what the draft tokens were drawn from. `one_bus`: the draft reads the same memory as the target."""

    def __init__(
        self,
        board: BoardReader,
        send: Callable[[Message], bool],
        laws: LawArena | None = None,
        lane: Lane = SILENT,
        one_bus: bool = False,
    ) -> None:
        self._board, self._send, self._laws, self._lane = board, send, laws, lane
        self._epoch: int | None = None
        self._open: dict[int, _Missed] = {}
        self._cheap, self._went_cheap = CheapProposals(board.vocab_size), set[int]()
        self._waited: dict[int, float] = {}  # seconds, of the rows whose last outcome was a miss
        self._hears = self._told_to_rejoin = False
        self._breaker, self._followers = Breaker(), Followers()
        self._seen, self._rounds = Seen(), 0
        self._progress = self._rejected = 0
        self._announced: DraftState = "down"
        self._next_warning = 0.0
        self._tuning = Tuning(one_bus)
        self._retuned: set[int] = set()
        self._running = 0
        self._acceptance, self._cheap_tokens = _mean(0.5), _mean(1.5)
        self._token_wait_s, self._verify_s = _mean(0.005), _mean(0.02)
        self._settled_at = self._last_wait = self._last_verify_s = 0.0
        self._runs_since: float | None = None

    @property
    def state(self) -> DraftState:
        if not self._hears:
            return "down"
        return "up" if self._breaker.state == "closed" else self._breaker.state

    @property
    def rejected(self) -> int:
        return self._board.rejected

    @property
    def counters(self) -> Counters:
        counted = self._board.telemetry()
        return Counters(counted.steps, counted.step_seconds, self._board.stale)

    # -- the draft comes and goes -----------------------------------------------------------------------------------

    def join(self, epoch: int) -> bool:
        """A draft said hello: from now on only its epoch counts. It is told of running sequences one by one. False: it
        is older than the one that joined last, and not listened to."""
        if epoch < (self._epoch or 0):
            return False
        if epoch == self._epoch:
            self._breaker.try_again()
        else:
            self._breaker = Breaker()
        self._epoch, self._hears, self._told_to_rejoin = epoch, True, False
        self._followers.clear()
        self._announce()
        return True

    def _tell(self, message: Message) -> None:
        """Post to the draft. Once a message is lost its picture is wrong: it must start over when it reads again."""
        if self._hears and not self._send(message):
            self._hears = False
            self._followers.clear()

    def _resync(self, sequences: Items[Sequence]) -> None:
        """Tell the draft of one more running sequence that it does not follow: it has a text to compute for each, and
        others should not miss it long."""
        if not self._hears:
            if self._epoch is not None and not self._told_to_rejoin:
                self._told_to_rejoin = self._send(Rejoin())
            return
        for sequence in sequences:
            # A draft that knows committed tokens alone cannot follow a verification of draft tokens.
            if (
                sequence.speculation.mode != "ar"
                and not sequence.proposal
                and self._followers.may_return(sequence.request, self._rounds)
            ):
                self._open.pop(sequence.request, None)
                self._follow(sequence)
                return

    def _judge(self) -> None:
        """Tell the breaker what the last round showed; a draft that is not worth it follows nobody any more."""
        progress, rejected = self._board.telemetry().progress, self._board.rejected
        self._seen.ticked, self._seen.rejected = progress != self._progress, rejected != self._rejected
        self._seen.reading = self._followers.reading
        self._breaker.round(self._seen)
        self._seen, self._progress, self._rejected = Seen(), progress, rejected
        if self._breaker.state == "open" and (followed := self._followers.clear()):
            self._tell(Release(followed))

    def _announce(self) -> None:
        """Log a change. That the draft has come or gone is the supervisor's to tell. That it is given up or taken back
        is told once a minute at most, and then as it is by now."""
        before, state = self._announced, self.state
        if state in (before, "half_open"):
            return
        if state == "open" or (state == "up" and before == "open"):
            now = time.perf_counter()
            if now < self._next_warning:
                return
            self._next_warning = now + _WARNING_S
            if state == "open":
                log.warning("goes on without the draft: %s", self._breaker.reason)
            else:
                log.warning("the draft is of use again")
        else:
            log.info("the draft is %s, was %s", state, before)
        self._announced = state

    # -- Proposer ---------------------------------------------------------------------------------------------------

    def admit(self, sequence: Sequence) -> None:
        sequence.speculation = self._tuning.current(sequence.asked)
        if sequence.speculation.mode != "ar":
            self._follow(sequence)

    def _follow(self, sequence: Sequence) -> None:
        """Tell the draft of a sequence whose next verification has no draft tokens, if it may be told of one."""
        if not self._hears or not self._breaker.admits(len(self._followers)):
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
                cache_salt=sequence.params.cache_salt,
            )
        )
        if self._hears:
            # In turn with the target the draft shows nothing unless it is waited for.
            self._followers.add(sequence.request, awaited=sequence.round == 0 or sequence.speculation.mode == "sd")

    def release(self, sequences: Items[Sequence]) -> None:
        followed = [s.request for s in sequences if self._followers.forget(s.request)]
        for sequence in sequences:
            self._open.pop(sequence.request, None)
            self._went_cheap.discard(sequence.request)
            self._waited.pop(sequence.request, None)
            self._cheap.forget(sequence.request)
            self._retuned.discard(sequence.request)
        if followed:
            self._tell(Release(followed))

    def outcomes(self, results: Items[Result]) -> None:
        now = time.perf_counter()
        took = now - self._settled_at
        speculated = [result for result in results if result.sequence.speculation.mode != "ar"]
        rows = [self._look_up(result) for result in speculated]
        told = [row for row in rows if row.request in self._followers]
        if told:
            self._seen.rows += len(told)
            self._tell(Outcomes(told))
        # The draft is at work: there is time to learn.
        if self._settled_at and results:
            self._time(took, results)
        for result in speculated:
            self._learn(result)
        self._runs_since = now if any(result.taken is not None for result in results) else None

    def _time(self, seconds: float, results: Items[Result]) -> None:
        """Note how long a round took from its launch, unless it had other work than decoding."""
        telemetry = self._board.telemetry()
        if len(results) == self._running and all(result.round > 0 for result in results):
            self._verify_s.note(seconds)
            self._last_verify_s = seconds
            modes = {self._mode(result.sequence) for result in results}
            tokens = sum(1 + result.drafted for result in results)
            brought = sum(1 + result.outcome.accepted for result in results)
            alone = modes == {"ar"} and tokens == len(results)
            round_ = Round(len(results), tokens, seconds, self._last_wait, brought, alone, modes == {"ssd"})
            self._tuning.learn(round_, telemetry)
        self._tuning.end_round(telemetry)

    def _mode(self, sequence: Sequence) -> Mode:
        """How a sequence goes, which is alone when the draft does not follow it."""
        return sequence.speculation.mode if sequence.request in self._followers else "ar"

    def _learn(self, result: Result) -> None:
        """Note how well what was verified had been guessed."""
        waited = self._waited.pop(result.sequence.request, None)
        # The first round after the prefill waits for a draft that may still compute the prompt.
        if waited is not None and result.round > 1 and self._mode(result.sequence) == "ssd":
            self._tuning.learner.missed(result.outcome.accepted + 1, waited, result.drafted)
        if result.sequence.request in self._went_cheap:
            self._went_cheap.discard(result.sequence.request)
            self._cheap_tokens.note(result.outcome.accepted + 1)
            self._cheap.note(result.sequence.request, result.drafted, result.outcome.accepted)
            return
        self._seen.drafted += result.drafted > 0
        self._seen.accepted += result.outcome.accepted
        self._tuning.learner.outcome(result.drafted, result.outcome.accepted)
        self._acceptance.note_outcome(result.drafted, result.outcome.accepted)

    def _look_up(self, result: Result) -> Outcome:
        """Take the cached speculation, or leave the row open for its backup."""
        sequence, outcome, speculation = result.sequence, result.outcome, result.sequence.speculation
        key = Key(self._epoch or 0, sequence.request, result.round, result.base, outcome.accepted, outcome.token)
        if result.taken is not None:
            sequence.proposal = result.taken.ids
        if speculation.mode == "ssd" and sequence.lookahead > 0:
            follows = sequence.request in self._followers
            entry = self._entry(result, key) if follows else None
            prepared = self._board.prepared(sequence.slot, key) if follows and entry is None else set()
            sequence.cache = self._verdict(sequence, key, entry, prepared)
            self._lane.looked_up(sequence.request, sequence.cache)
            if follows:
                self._showed(sequence, entry is not None or bool(prepared), waited=False)
            if result.round > 0:
                self._learn_rank(result, entry)
        in_flight = len(sequence.proposal)
        waits = result.taken is None and sequence.lookahead > 0
        if waits and not in_flight and (speculation.mode == "sd" or speculation.backup != "none"):
            self._open[sequence.request] = _Missed(sequence, key, sequence.round)
            in_flight = -1
        return Outcome(sequence.request, result.round, outcome.accepted, outcome.token, in_flight)

    def _entry(self, result: Result, key: Key) -> int | None:
        """Where the cache had something for an outcome, which is proposed."""
        if result.taken is None:
            return self._take(result.sequence, key, result.sequence.lookahead)
        return result.taken.entry if result.taken.entry >= 0 else None

    def _verdict(self, sequence: Sequence, key: Key, entry: int | None, prepared: set[int]) -> Cache:
        """What the cache had for an outcome: a proposal, an `entry` without a token yet, or nothing; `prepared` are the
        accepted lengths for which it had something."""
        if key.round == 0:
            return "" if sequence.proposal else "first_round"
        if sequence.proposal:
            return "hit"
        if sequence.request not in self._followers:
            return "draft_down"
        if entry is not None or not prepared:
            return "late"
        return "token_not_covered" if key.accepted in prepared else "k_not_covered"

    def _learn_rank(self, result: Result, entry: int | None) -> None:
        """Note which of the prepared tokens the bonus token was. Entries are numbered by accepted length, then rank."""
        request, fan_out = result.sequence.request, result.sequence.speculation.fan_out
        if request in self._retuned or request not in self._followers:
            self._retuned.discard(request)  # this tree was grown with other fan-outs, or not at all
            return
        counts = [fan_out_at(k, result.drafted, fan_out) for k in range(result.outcome.accepted + 1)]
        self._tuning.learner.looked_up(counts[-1], None if entry is None else entry + 1 - sum(counts[:-1]))

    def asks(self, sequence: Sequence) -> tuple[int, int] | None:
        """See `ssd.target.ahead.Ask`."""
        if sequence.speculation.mode == "sd":
            return None  # its draft is waited for by name
        follows = self._mode(sequence) == "ssd"
        return self._epoch or 0, sequence.speculation.num_speculative_tokens if follows else 0

    def _take(self, sequence: Sequence, key: Key, most: int) -> int | None:
        """Propose what the board has for `key`, if it is more than there is already; returns where it was found."""
        found = self._board.find(sequence.slot, key, most)
        if found is None or len(found.ids) <= len(sequence.proposal):
            return None if found is None else found.entry
        ids, laws = found.ids, None
        if sequence.ratio_rule:
            if self._laws is None:
                return found.entry
            laws = self._laws.read(sequence.slot, found.entry, key, ids)
            ids = ids[: len(laws)]
        if len(ids) > len(sequence.proposal):
            sequence.proposal, sequence.laws = ids, laws
        return found.entry

    def settle(self, sequences: Items[Sequence], meanwhile: Task = nothing) -> float:
        self._rounds += 1
        self._running = len(sequences)
        began = time.perf_counter()
        self._judge()
        self._retune(sequences)
        self._resync(sequences)
        if self._open:
            depths = self._depths(sequences)
            if depths:
                self._lane.enter(State.WAIT_FOR_DRAFT)
                meanwhile()
                self._wait(depths, began)
                self._lane.enter(State.OTHER)
            self._waited |= dict.fromkeys(self._open, time.perf_counter() - began)
            launches = [self._launch(missed) for missed in self._open.values()]
            self._open.clear()
            if told := [launch for launch in launches if launch.request in self._followers]:
                self._tell(Launched(told))
        self._announce()
        ended = time.perf_counter()
        # What was launched ahead runs since the outcomes before it.
        self._settled_at = self._runs_since or ended
        self._last_wait = ended - began
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
                if self._followers.remove(sequence.request):
                    self._tell(Release([sequence.request]))
            elif before.mode == "ar":
                self.admit(sequence)
            elif sequence.request in self._followers:
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
        """How many tokens each open row waits for; empty when waiting does not pay."""
        ready = [len(s.proposal) for s in sequences if s.request not in self._open and s.round > 0]
        missed = [row.sequence for row in self._open.values() if self._followers.worth_waiting(row.sequence.request)]
        depths = {s.request: s.lookahead for s in missed if s.speculation.mode == "sd"}
        ahead = [s for s in missed if s.speculation.mode == "ssd" and s.speculation.backup in ("jit", "auto")]
        price = self._token_price()
        ideas = {s.request for s in ahead if s.speculation.backup == "auto" and self._cheap.propose(s, price)}
        verify = self._tuning.learner.verify or Line(self._verify_s.value, 0.0)
        for cheap, mine in (
            (1.0, [s for s in ahead if s.request not in ideas]),
            (self._cheap_tokens.value, [s for s in ahead if s.request in ideas]),
        ):
            longest = max((s.lookahead for s in mine), default=0)
            worth = depth_worth_waiting_for(
                ready, len(mine), longest, self._acceptance.value, verify, self._token_wait_s.value, cheap
            )
            depths |= {s.request: min(worth, s.lookahead) for s in mine}
        step = self._tuning.learner.step
        if missed and step is not None and not any(depths.values()):
            # Without waiting nothing is measured: one slow answer is forgotten, for what the draft says of its steps.
            self._token_wait_s.note(step.at(len(missed)))
        return {request: depth for request, depth in depths.items() if depth > 0}

    def _showed(self, sequence: Sequence, anything: bool, waited: bool) -> None:
        """Note whether the draft had something for a sequence; one that it has lost, it is told of again later."""
        self._seen.shown |= anything
        if not self._followers.showed(sequence.request, anything, waited, self._rounds):
            self._tell(Release([sequence.request]))

    def _wait(self, depths: dict[int, int], began: float) -> None:
        """Poll the board until every row has its depth or nothing comes any more; keep whatever is there."""
        deepest = max(depths.values())
        patience = self._verify_s.value
        if self._breaker.patient:
            patience = max(patience, 4 * deepest * self._token_wait_s.value)
        patience = min(patience, _LONGEST_SILENCE_S)
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
            if request in self._followers:  # giving one up may show that the draft is gone, with all it followed
                sequence = self._open[request].sequence
                self._showed(sequence, bool(sequence.proposal), waited=True)
        got = max(len(row.sequence.proposal) for row in self._open.values())
        self._seen.in_vain = not got
        rows = [self._open[request] for request in depths]
        # Mode `sd` is a wait by name, and of a new request the draft has to compute the prompt.
        if all(row.key.round > 0 and row.sequence.speculation.mode == "ssd" for row in rows):
            self._seen.waited = (time.perf_counter() - began) / max(1e-6, self._verify_s.value, self._last_verify_s)
        self._token_wait_s.note((arrived - began) / got if got else patience / deepest)
