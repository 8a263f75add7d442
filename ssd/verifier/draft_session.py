"""Sends messages to the draft, reads what it publishes, and decides whether to use it.

A draft that is stopped, slow or wrong is left alone before it has cost more than half a second, and tried again after a
back-off. One that has lost its core for a moment is not. `TrackedRequests` and `ssd.verifier.breaker` decide that."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from ssd.config.params import DRAFTED
from ssd.ipc.board import BoardReader, Key
from ssd.ipc.draft_probs import DraftProbsArena
from ssd.ipc.messages import Admit, DraftState, Leave, Rejoin, Release
from ssd.ipc.public import Message
from ssd.tuning.tuner import DecodingRound
from ssd.verifier.breaker import UNSEEN_S, Breaker, Seen
from ssd.verifier.sequence import Cache, Sequence

log = logging.getLogger("ssd.target")

_WARNING_S = 60.0

# -- single requests --------------------------------------------------------------------------------------------------

# Seconds. A request is given up when it was waited for in vain for so long in all, or nothing came of it for so long:
# a long prompt takes the draft a while.
_IN_VAIN_S = 0.5
# How long it is given up for, and how long it may then be waited for in vain.
_PAUSE_S, _AGAIN_S = 1.0, 0.05


@dataclass
class TrackedRequest:
    """A request that the draft was told of.

    `awaited`: it may be waited for before the draft has shown anything of it. `seen`: the draft has shown something of
    it, the last time at `shown_at`. Since then it was waited for in vain for `in_vain` seconds."""

    awaited: bool
    in_vain: float = 0.0
    shown_at: float | None = None
    seen: bool = False


class TrackedRequests:
    """The requests that the draft was told of, and what it has shown of each. Times are in seconds."""

    def __init__(self) -> None:
        self._tracked: dict[int, TrackedRequest] = {}
        self._given_up: dict[int, float] = {}  # request -> the time from which on it may be tried again

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
        again = self._given_up.pop(request, None) is not None
        self._tracked[request] = TrackedRequest(awaited, _IN_VAIN_S - _AGAIN_S if again else 0.0)

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

    def may_return(self, request: int, now: float) -> bool:
        """Whether the draft might be told of a request at the time `now`."""
        return request not in self._tracked and self._given_up.get(request, now) <= now

    def worth_waiting(self, request: int) -> bool:
        """Whether the request may be waited for."""
        tracked = self._tracked.get(request)
        return tracked is not None and (tracked.seen or tracked.awaited)

    def showed(self, request: int, anything: bool, waited: float, now: float) -> bool:
        """Note what the draft had at `now`, after a wait of so many seconds; returns False if it is given up."""
        tracked = self._tracked[request]
        if anything:
            tracked.seen, tracked.in_vain, tracked.shown_at = True, 0.0, now
            return True
        if tracked.shown_at is None:
            tracked.shown_at = now
        tracked.in_vain += waited
        if tracked.in_vain < _IN_VAIN_S and now < tracked.shown_at + UNSEEN_S:
            return True
        del self._tracked[request]
        self._given_up[request] = now + _PAUSE_S
        return False


# -- the session ------------------------------------------------------------------------------------------------------


class DraftSession:
    """Owns the way to the draft: messages there, the board back. The proposer and its missed rows call it.

    `send` posts a message without blocking and returns whether it went. The ratio rule reads `draft_probs`. `seen`
    collects what the present round shows. `remote`: the draft is on another machine, where waiting and being late are
    the rule; so the breaker hears what it really brings."""

    def __init__(
        self,
        board: BoardReader,
        send: Callable[[Message], bool],
        draft_probs: DraftProbsArena | None = None,
        remote: bool = False,
    ) -> None:
        self.board, self._send, self._draft_probs, self._remote = board, send, draft_probs, remote
        self.epoch: int | None = None
        self.tracked, self.seen = TrackedRequests(), Seen()
        self._breaker = Breaker()
        self._hears = self._told_to_rejoin = self._parked = False
        self._reads: Items[str] | None = None
        self._progress = self._rejected = 0
        self._silent_since: int | None = None  # the draft's progress as a wait in vain ended
        self._announced: DraftState = "down"
        self._now = self._next_warning = 0.0

    @property
    def state(self) -> DraftState:
        """Whether there is a draft, as far as is known, and whether it is used."""
        if not self._hears:
            return "parked" if self._parked else "down"
        return "up" if self._breaker.state == "closed" else self._breaker.state

    @property
    def patient(self) -> bool:
        """Whether there is no reason to wait less than usual."""
        return self._breaker.patient

    @property
    def stalled(self) -> bool:
        """True while the draft has made no progress since the target waited for it in vain."""
        return self.board.telemetry().progress == self._silent_since

    # -- what the draft is told -----------------------------------------------------------------------------------

    def join(self, epoch: int, reads: Items[str] | None = None) -> bool:
        """Begin with a draft that said hello, and tell it of the running sequences one by one.

        From now on only its epoch counts. It `reads` only requests of these owners; None: all. Returns False, and
        ignores the draft, if a younger one joined."""
        if epoch < (self.epoch or 0):
            return False
        if epoch == self.epoch:
            self._breaker.try_again()
        else:
            self._breaker = Breaker()
        self.epoch, self._hears, self._told_to_rejoin, self._silent_since = epoch, True, False, None
        self._parked = False
        self._reads = reads
        self.tracked.clear()
        self.announce()
        return True

    def park(self) -> None:
        """Tell the draft, which no request uses, to end its process. Another one may join later."""
        if self._hears and self._send(Leave()):
            self._hears, self._parked = False, True
            self._told_to_rejoin = True  # it will not
            self.announce()

    def change(self, reads: Items[str] | None, lost: Items[int]) -> None:
        """Note what is read from now on (see `join`), and forget requests that the draft has `lost`: it may be told of
        them again."""
        self._reads = reads
        for request in lost:
            self.tracked.remove(request)

    def tell(self, message: Message) -> None:
        """Post to the draft. After a lost message its picture is wrong: it must start over when it reads again."""
        if self._hears and not self._send(message):
            self._hears = False
            self.tracked.clear()

    def track(self, sequence: Sequence, awaited: bool, round: int | None = None, length: int | None = None) -> bool:
        """Tell the draft of a sequence whose next verification has no draft tokens; returns whether it was told.

        `awaited`: it may be waited for before the draft has shown anything of it. With `round` and `length` it is told
        of the sequence as it was in that verification, which `length` tokens came before."""
        if not self._hears or not self._breaker.admits(len(self.tracked)) or not self._may_read(sequence):
            return False
        self.tell(
            Admit(
                request=sequence.request,
                slot=sequence.slot,
                round=sequence.round if round is None else round,
                token_ids=sequence.tokens[:length],
                speculation=sequence.speculation,
                cache_salt=sequence.params.cache_salt,
                prompt_length=sequence.prompt_length,
                structured=sequence.params.structured,
                owner=sequence.owner,
                **sequence.law._asdict(),
            )
        )
        if self._hears:
            self.tracked.add(sequence.request, awaited)
        return self._hears

    def _may_read(self, sequence: Sequence) -> bool:
        return self._reads is None or sequence.owner in self._reads

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
            found = (s for s in sequences if s.speculation.mode in DRAFTED and not s.proposal and self._may_read(s))
            return next((s for s in found if self.tracked.may_return(s.request, self._now)), None)
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

    def showed(self, request: int, anything: bool, waited: float = 0.0) -> None:
        """Note whether the draft had something for a request, after a wait of so many seconds.

        A request that the draft has lost is told again later."""
        self.seen.shown |= anything
        if not self.tracked.showed(request, anything, waited, self._now):
            self.tell(Release([request]))

    def note_wait(self, seconds: float, in_vain: bool) -> None:
        """Note how many seconds of a wait were lost. After one `in_vain` the draft is `stalled` until it moves."""
        self.seen.lost = seconds
        self._silent_since = self.board.telemetry().progress if in_vain else None

    def verdict(self, sequence: Sequence, key: Key, entry: int | None, prepared: dict[int, int]) -> Cache:
        """What the cache had for an outcome: a proposal, an `entry` without a token yet, or nothing.

        `prepared` has the accepted lengths for which it had something."""
        if key.round == 0:
            return "" if sequence.proposal else "first_round"
        if sequence.proposal:
            return "hit"
        if sequence.request not in self.tracked:
            return "draft_down"
        if entry is not None or not prepared:
            return "late"
        return "token_not_covered" if key.accepted in prepared else "k_not_covered"

    def measured(self, round_: DecodingRound, plain_s: float | None) -> None:
        """Note what a round took and brought, where a round of plain decoding takes `plain_s` seconds.

        What other guesses than the draft's bring is not the draft's gain, nor is their cost. A round counts as at most
        three plain ones beside what was waited for: a descheduled process says nothing of the draft."""
        if not self._remote or not plain_s or not self.seen.rows:
            return
        waited, taken = round_.waited / plain_s, min(3.0, round_.seconds / plain_s)
        guessed = not self.seen.drafted and round_.tokens > round_.batch
        self.seen.gain = -waited if guessed else 1 + self.seen.accepted / self.seen.rows - taken - waited

    def judge(self, now: float, verify_s: float) -> None:
        """End a round at `now`, where a verification takes `verify_s` seconds: tell the breaker what it showed.

        A draft that is not worth it tracks nobody any more."""
        self._now = now
        progress, rejected = self.board.telemetry().progress, self.board.rejected
        self.seen.ticked, self.seen.rejected = progress != self._progress, rejected != self._rejected
        self.seen.reading = self.tracked.reading
        self._breaker.round(self.seen, now, verify_s)
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
            if self._now < self._next_warning:
                return
            self._next_warning = self._now + _WARNING_S
            if state == "open":
                log.warning("goes on without the draft: %s", self._breaker.reason)
            else:
                log.warning("the draft is of use again")
        else:
            log.info("the draft is %s, was %s", state, before)
        self._announced = state
