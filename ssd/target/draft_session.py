"""Sends messages to the draft, reads what it publishes, and decides whether to use it.

A draft that is stopped, slow or wrong is left alone before it has cost more than a few verifications, and tried again
after a back-off (cumulative sum test: Page, 1954). `TrackedRequests` and `Breaker` decide that. They are pure: they are
told of rounds and read no clock."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Literal

from ssd.config.params import DRAFTED
from ssd.ipc.board import BoardReader, Key
from ssd.ipc.draft_probs import DraftProbsArena
from ssd.ipc.messages import Admit, DraftState, Rejoin, Release
from ssd.ipc.public import Message
from ssd.target.sequence import Sequence

log = logging.getLogger("ssd.target")

_WARNING_S = 60.0

# -- single requests --------------------------------------------------------------------------------------------------

# A fruitless wait adds 1 to a request's count, a round without news of it adds 0.05. At 4 the request is given up for
# 32 rounds, and then gets one wait.
_IN_VAIN, _UNSEEN_ROUND, _PAUSE = 4.0, 0.05, 32


@dataclass
class TrackedRequest:
    """A request that the draft was told of.

    `doubt` counts waits in vain. `awaited`: it may be waited for before the draft has shown anything of it. `seen`: the
    draft has shown something of it."""

    doubt: float
    awaited: bool
    seen: bool = False


class TrackedRequests:
    """The requests that the draft was told of, and what it has shown of each."""

    def __init__(self) -> None:
        self._tracked: dict[int, TrackedRequest] = {}
        self._given_up: dict[int, int] = {}  # request -> the round from which on it may be tried again

    def __contains__(self, request: int) -> bool:
        return request in self._tracked

    def __len__(self) -> int:
        return len(self._tracked)

    @property
    def reading(self) -> bool:
        """Whether the draft may be computing a text: there is a request of which it has shown nothing."""
        return not all(tracked.seen for tracked in self._tracked.values())

    def add(self, request: int, awaited: bool) -> None:
        """The draft was told of a request; see `TrackedRequest.awaited`."""
        doubt = _IN_VAIN - 1 if self._given_up.pop(request, None) is not None else 0.0
        self._tracked[request] = TrackedRequest(doubt, awaited)

    def remove(self, request: int) -> bool:
        """Stop tracking a request; returns whether it was tracked."""
        return self._tracked.pop(request, None) is not None

    def forget(self, request: int) -> bool:
        """Drop all that is known of a request that has ended; returns whether it was tracked."""
        self._given_up.pop(request, None)
        return self.remove(request)

    def clear(self) -> list[int]:
        """Stop tracking all requests; returns them."""
        tracked, self._tracked = list(self._tracked), {}
        return tracked

    def may_return(self, request: int, now: int) -> bool:
        """Whether the draft might be told of a request in round `now`."""
        return request not in self._tracked and self._given_up.get(request, now) <= now

    def worth_waiting(self, request: int) -> bool:
        """Whether the request may be waited for."""
        tracked = self._tracked.get(request)
        return tracked is not None and (tracked.seen or tracked.awaited)

    def showed(self, request: int, anything: bool, waited: bool, now: int) -> bool:
        """Note what the draft had in round `now`; returns False if the request is given up."""
        tracked = self._tracked[request]
        tracked.seen |= anything
        tracked.doubt = 0.0 if anything else tracked.doubt + (1.0 if waited else _UNSEEN_ROUND)
        if tracked.doubt < _IN_VAIN:
            return True
        del self._tracked[request]
        self._given_up[request] = now + _PAUSE
        return False


# -- the draft as a whole ---------------------------------------------------------------------------------------------

State = Literal["closed", "open", "half_open"]

# In verifications: what a draft may cost more than it brings before it is left alone, and on trial.
_DEBT, _TRIAL_DEBT = 3.0, 0.5
# What verifying draft tokens is taken to cost; fewer accepted tokens a round do not pay on any machine.
_VERIFIED = 0.125
# Rounds before the breaker opens: with a loss; without progress; without a board entry, as a draft that reads a long
# prompt has none.
_COSTLY, _STILL, _UNSEEN = 3, 3, 32
# Rounds.
_FIRST_BACK_OFF, _LONGEST_BACK_OFF = 32, 512
# The next back-off halves when the draft was in use for so many times as long. Otherwise a draft that is late in
# bursts, as on a busy machine, would be given up and taken back all the time.
_PROOF = 2


@dataclass
class Seen:
    """What a round showed of the draft, which tracked `rows` of its outcomes.

    `shown`: the board had something for a row. `ticked`: the draft's progress counter has moved. `reading`: the draft
    may still compute the text of a request. `waited` is in verifications, `in_vain` if nothing came. `rejected`:
    something on the board was not sound. `drafted` rows verified tokens of the draft; `accepted` tokens were right."""

    rows: int = 0
    shown: bool = False
    ticked: bool = False
    reading: bool = False
    waited: float = 0.0
    in_vain: bool = False
    rejected: bool = False
    drafted: int = 0
    accepted: int = 0

    @property
    def cost(self) -> float:
        """What the draft cost, in verifications, less what it brought.

        A fruitless wait costs one verification. Any other wait was asked for (mode `sd`) or expected to pay, and costs
        only its time beyond one verification."""
        waited = 1.0 if self.in_vain else max(0.0, self.waited - 1.0)
        return waited + self.rejected + (_VERIFIED * self.drafted - self.accepted) / self.rows

    @property
    def complaint(self) -> str:
        """What is to blame for the cost."""
        if self.rejected:
            return "what it writes is not sound"
        if self.in_vain or self.waited > 1.0:
            return "waiting for it does not pay"
        return "its tokens are not accepted"


class Breaker:
    """A circuit breaker: closed while the draft is of use, open while it is not, half open while one request tries.

    The session tells it of every round. `reason` says why it is open. Costs are in verifications; without a draft each
    brings a token for every row."""

    def __init__(self) -> None:
        self.state: State = "closed"
        self.reason = ""
        self._debt = 0.0
        self._costly = self._still = self._unseen = self._rounds = 0
        self._back_off = self._next_back_off = _FIRST_BACK_OFF

    @property
    def patient(self) -> bool:
        """Whether there is no reason to wait less than usual."""
        return self.state == "closed" and self._debt == 0

    def admits(self, tracked: int) -> bool:
        """True if the draft, which tracks `tracked` requests, may be told of another one."""
        return self.state == "closed" or (self.state == "half_open" and tracked == 0)

    def round(self, seen: Seen) -> None:
        """Note a round and change the state by it."""
        if self.state == "open":
            self._rounds += 1
            if self._rounds >= self._back_off:
                self.try_again()
        elif seen.rows:
            self._rounds += 1
            self._debt = max(0.0, self._debt + seen.cost)
            self._costly = self._costly + (seen.cost > 0) if self._debt else 0
            self._unseen = 0 if seen.shown else self._unseen + 1
            self._still = 0 if seen.shown or seen.ticked else self._still + 1
            (self._on_trial if self.state == "half_open" else self._in_use)(seen)

    def try_again(self) -> None:
        """Let the draft show with one request that it is of use again."""
        self._enter("half_open")

    def _in_use(self, seen: Seen) -> None:
        if self._debt >= _DEBT and self._costly >= _COSTLY:
            self._open(seen.complaint)
        elif self._still >= _STILL and not seen.reading:
            self._open("there is no sign of life")
        elif self._unseen >= _UNSEEN:
            self._open("nothing came from it")
        elif self._rounds >= _PROOF * self._next_back_off:
            self._next_back_off = max(_FIRST_BACK_OFF, self._next_back_off // 2)
            self._rounds = 0

    def _on_trial(self, seen: Seen) -> None:
        if seen.accepted:
            self._enter("closed")
        elif self._debt >= _TRIAL_DEBT:
            self._open(seen.complaint)
        elif self._rounds >= self._back_off:
            self._open("nothing came from it")

    def _open(self, reason: str) -> None:
        self.reason = reason
        self._back_off = self._next_back_off
        self._next_back_off = min(_LONGEST_BACK_OFF, 2 * self._back_off)
        self._enter("open")

    def _enter(self, state: State) -> None:
        self.state, self._debt = state, 0.0
        self._costly = self._still = self._unseen = self._rounds = 0


# -- the session ------------------------------------------------------------------------------------------------------


class DraftSession:
    """Owns the way to the draft: messages there, the board back. The proposer and its missed rows call it.

    `send` posts a message without blocking and returns whether it went. The ratio rule reads `draft_probs`. `seen`
    collects what the present round shows."""

    def __init__(
        self, board: BoardReader, send: Callable[[Message], bool], draft_probs: DraftProbsArena | None = None
    ) -> None:
        self.board, self._send, self._draft_probs = board, send, draft_probs
        self.epoch: int | None = None
        self.tracked, self.seen = TrackedRequests(), Seen()
        self._breaker = Breaker()
        self._hears = self._told_to_rejoin = False
        self._rounds = self._progress = self._rejected = 0
        self._announced: DraftState = "down"
        self._next_warning = 0.0

    @property
    def state(self) -> DraftState:
        """Whether there is a draft, as far as is known, and whether it is used."""
        if not self._hears:
            return "down"
        return "up" if self._breaker.state == "closed" else self._breaker.state

    @property
    def patient(self) -> bool:
        """Whether there is no reason to wait less than usual."""
        return self._breaker.patient

    # -- what the draft is told -----------------------------------------------------------------------------------

    def join(self, epoch: int) -> bool:
        """Begin with a draft that said hello; from now on only its epoch counts.

        It is told of the running sequences one by one. Returns False, and ignores the draft, if a younger one joined.
        """
        if epoch < (self.epoch or 0):
            return False
        if epoch == self.epoch:
            self._breaker.try_again()
        else:
            self._breaker = Breaker()
        self.epoch, self._hears, self._told_to_rejoin = epoch, True, False
        self.tracked.clear()
        self.announce()
        return True

    def tell(self, message: Message) -> None:
        """Post to the draft. After a lost message its picture is wrong: it must start over when it reads again."""
        if self._hears and not self._send(message):
            self._hears = False
            self.tracked.clear()

    def track(self, sequence: Sequence, awaited: bool, round: int | None = None, length: int | None = None) -> bool:
        """Tell the draft of a sequence whose next verification has no draft tokens; returns whether it was told.

        `awaited`: it may be waited for before the draft has shown anything of it. With `round` and `length` it is told
        of the sequence as it was in that verification, which `length` tokens came before."""
        if not self._hears or not self._breaker.admits(len(self.tracked)):
            return False
        law = sequence.law
        self.tell(
            Admit(
                request=sequence.request,
                slot=sequence.slot,
                round=sequence.round if round is None else round,
                token_ids=sequence.tokens[:length],
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
            self.tracked.add(sequence.request, awaited)
        return self._hears

    def release(self, requests: Items[int], ended: bool = True) -> None:
        """Tell the draft to forget requests that `ended`, or go on without it."""
        remove = self.tracked.forget if ended else self.tracked.remove
        if released := [request for request in requests if remove(request)]:
            self.tell(Release(released))

    def untracked(self, sequences: Items[Sequence]) -> Sequence | None:
        """The next sequence to tell the draft of, if there is one: it has a text to compute for each.

        A draft that has lost messages is told to start over instead."""
        if self._hears:
            # A draft that knows committed tokens alone cannot follow a verification of draft tokens.
            found = (s for s in sequences if s.speculation.mode in DRAFTED and not s.proposal)
            return next((s for s in found if self.tracked.may_return(s.request, self._rounds)), None)
        if self.epoch is not None and not self._told_to_rejoin:
            self._told_to_rejoin = self._send(Rejoin())
        return None

    # -- what the draft shows -------------------------------------------------------------------------------------

    def find(self, sequence: Sequence, key: Key, most: int) -> int | None:
        """Propose at most `most` tokens that answer `key`, if there are more than proposed already.

        Returns the number of the entry on the board, None if there is none."""
        found = self.board.find(sequence.slot, key, most)
        if found is None or len(found.ids) <= len(sequence.proposal):
            return None if found is None else found.entry
        ids, probs = found.ids, None
        if sequence.ratio_rule:
            if self._draft_probs is None:
                return found.entry
            probs = self._draft_probs.read(sequence.slot, found.entry, key, ids)
            ids = ids[: len(probs)]
        if len(ids) > len(sequence.proposal):
            sequence.proposal, sequence.draft_probs = ids, probs
        return found.entry

    def showed(self, request: int, anything: bool, waited: bool) -> None:
        """Note whether the draft had something for a request. One that it has lost is told again later."""
        self.seen.shown |= anything
        if not self.tracked.showed(request, anything, waited, self._rounds):
            self.tell(Release([request]))

    def judge(self) -> None:
        """End a round: tell the breaker what it showed. A draft that is not worth it tracks nobody any more."""
        self._rounds += 1
        progress, rejected = self.board.telemetry().progress, self.board.rejected
        self.seen.ticked, self.seen.rejected = progress != self._progress, rejected != self._rejected
        self.seen.reading = self.tracked.reading
        self._breaker.round(self.seen)
        self.seen, self._progress, self._rejected = Seen(), progress, rejected
        if self._breaker.state == "open" and (tracked := self.tracked.clear()):
            self.tell(Release(tracked))

    def announce(self) -> None:
        """Log a change of state.

        The supervisor logs that a draft comes or goes. Changes of the breaker are logged at most once a minute,
        with the current state."""
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
