"""Sends messages to the draft, reads what it publishes, and decides whether to use it.

The target leaves a draft that is stopped, slow or wrong before it has cost more than half a second, and tries it again
after a back-off."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from ssd.config.params import DRAFTED, Mode
from ssd.execution.core_team import CoreTeam
from ssd.ipc.board import BoardReader, Cached, Key
from ssd.ipc.draft_probs import DraftProbsArena
from ssd.ipc.messages import Admit, DraftState, Leave, Rejoin, Release
from ssd.ipc.public import Message
from ssd.verifier.breaker import UNSEEN_S, Breaker, Seen
from ssd.verifier.sequence import Sequence

log = logging.getLogger("ssd.target")

_WARNING_S = 60.0

# -- single requests --------------------------------------------------------------------------------------------------

# Seconds of waits in vain after which a request is given up. It is also given up when nothing came of it for
# `UNSEEN_S`: the draft needs a while for a long prompt.
_IN_VAIN_S = 0.5
# Seconds that it is given up for, and seconds of waits in vain that it may cost when it is tried again.
_PAUSE_S, _AGAIN_S = 1.0, 0.05


@dataclass
class TrackedRequest:
    """A request that the draft was told of.

    `awaited`: the target may wait before the draft has shown (`seen`) anything of it. `shown_at`: when it last did;
    until then, when the target first looked. `in_vain`: seconds waited in vain since."""

    awaited: bool
    in_vain: float = 0.0
    shown_at: float | None = None
    seen: bool = False


class TrackedRequests:
    """The requests that the draft was told of, and what it has shown of each; times in seconds.

    `owners`: it reads only their requests; None: all."""

    owners: Items[str] | None = None

    def __init__(self) -> None:
        self._tracked: dict[int, TrackedRequest] = {}
        self._given_up: dict[int, float] = {}  # request -> the time from which on it may be tried again

    def __contains__(self, request: int) -> bool:
        return request in self._tracked

    def __len__(self) -> int:
        return len(self._tracked)

    @property
    def reading(self) -> bool:
        """Return True if the draft has shown nothing of some request: it may still compute a text."""
        return not all(tracked.seen for tracked in self._tracked.values())

    def read(self, owner: str) -> bool:
        return self.owners is None or owner in self.owners

    def add(self, request: int, awaited: bool) -> None:
        again = self._given_up.pop(request, None) is not None
        self._tracked[request] = TrackedRequest(awaited, _IN_VAIN_S - _AGAIN_S if again else 0.0)

    def remove(self, request: int) -> bool:
        return self._tracked.pop(request, None) is not None

    def forget(self, request: int) -> bool:
        """Drop all that is known of a request; return True if it was tracked."""
        self._given_up.pop(request, None)
        return self.remove(request)

    def clear(self) -> list[int]:
        tracked, self._tracked = list(self._tracked), {}
        return tracked

    def may_return(self, request: int, now: float) -> bool:
        """Return True if the draft may be told of a request now."""
        return request not in self._tracked and self._given_up.get(request, now) <= now

    def resume(self, now: float) -> None:
        """Begin to count anew: the draft was stalled."""
        for tracked in self._tracked.values():
            tracked.in_vain, tracked.shown_at = 0.0, now

    def worth_waiting(self, request: int) -> bool:
        tracked = self._tracked.get(request)
        return tracked is not None and (tracked.seen or tracked.awaited)

    def unseen_s(self, request: int, now: float) -> float:
        """Return the seconds for which a request has shown nothing; 0: unknown to the draft."""
        tracked = self._tracked.get(request)
        return 0.0 if tracked is None or tracked.shown_at is None else now - tracked.shown_at

    def note_shown(self, request: int, anything: bool, waited: float, now: float) -> bool:
        """Note if the draft had anything after `waited` seconds; return False if the request is given up."""
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
    """Owns the connection to the draft. The proposer and its missed rows call it.

    `send` posts a message without blocking and returns True if it went out. The draft serves the `modes`. With a `team`
    both models share cores: the draft hears of a sequence with the first outcome, else when the sequence begins."""

    def __init__(
        self,
        board: BoardReader,
        send: Callable[[Message], bool],
        draft_probs: DraftProbsArena | None = None,
        modes: tuple[Mode, ...] = DRAFTED,
        team: CoreTeam | None = None,
    ) -> None:
        self.board, self._send, self._draft_probs, self.modes, self.team = board, send, draft_probs, modes, team
        self.epoch: int | None = None
        self.tracked, self.seen = TrackedRequests(), Seen()
        self.breaker = Breaker()
        self._hears = self._told_to_rejoin = self._parked = False
        self._progress = self._rejected = 0
        self._silent_since: int | None = None  # the draft's progress counter when a wait in vain ended
        self._moved = time.perf_counter(), 0  # when the progress counter was last seen to move, and its value
        self._announced: DraftState = "down"
        self._now = self._next_warning = 0.0

    @property
    def state(self) -> DraftState:
        """Return the draft's state; "open" or "half_open" while the breaker limits its use."""
        if not self._hears:
            return "parked" if self._parked else "down"
        return "up" if self.breaker.state == "closed" else self.breaker.state

    @property
    def stalled(self) -> bool:
        """Return True if the draft is left alone, or made no progress since it was awaited in vain."""
        return self.breaker.state == "open" or self.board.telemetry().progress == self._silent_since

    def still_s(self, now: float) -> float:
        """Return the seconds for which the target, looking once a round, has seen no progress."""
        if (progress := self.board.telemetry().progress) != self._moved[1]:
            self._moved = now, progress
        return now - self._moved[0]

    # -- what the draft is told -----------------------------------------------------------------------------------

    def join(self, epoch: int, reads: Items[str] | None = None) -> bool:
        """Start with a draft that said hello; return False, and ignore it, if a younger one has joined.

        It `reads` only requests of these owners; None: all."""
        if epoch < (self.epoch or 0):
            return False
        if epoch == self.epoch:
            self.breaker.try_again()
        else:
            self.breaker = Breaker()
        self.epoch, self._hears, self._told_to_rejoin, self._silent_since = epoch, True, False, None
        self._parked = False
        self.tracked.clear()
        self.tracked.owners = reads
        self.announce()
        return True

    def park(self) -> None:
        """Tell the draft to end its process. Another one may join later."""
        if self._hears and self._send(Leave()):
            self._hears, self._parked = False, True
            self._told_to_rejoin = True  # a parked draft does not rejoin
            self.announce()

    def change(self, reads: Items[str] | None, lost: Items[int]) -> None:
        """Note whose requests the draft `reads` now, and requests that it has `lost` and may be told again."""
        self.tracked.owners = reads
        for request in lost:
            self.tracked.remove(request)

    def tell(self, message: Message) -> None:
        """Post to the draft; after a lost message it must start over when it reads again."""
        if self._hears and not self._send(message):
            self._hears = False
            self.tracked.clear()

    def _track(self, sequence: Sequence, awaited: bool, back: int = 0) -> bool:
        """Tell the draft of a sequence whose next verification has no draft tokens; return True if told.

        `awaited`: see `TrackedRequest`. `back` 1: as the sequence was before its last outcome, of one token."""
        if not self._hears or not self.breaker.admits(len(self.tracked)) or not self.tracked.read(sequence.owner):
            return False
        self.tell(
            Admit(
                request=sequence.request,
                slot=sequence.slot,
                round=sequence.round - back,
                token_ids=sequence.tokens[: len(sequence.tokens) - back],
                law=sequence.law,
                speculation=sequence.speculation,
                cache_salt=sequence.params.cache_salt,
                prompt_length=sequence.prompt_length,
                structured=sequence.params.structured,
                owner=sequence.owner,
            )
        )
        if self._hears:
            self.tracked.add(sequence.request, awaited)
        return self._hears

    def release(self, requests: Items[int], ended: bool = True) -> None:
        """Tell the draft to forget requests that `ended` or go on without it."""
        remove = self.tracked.forget if ended else self.tracked.remove
        if released := [request for request in requests if remove(request)]:
            self.tell(Release(released))

    def admit(self, sequence: Sequence) -> None:
        """Tell the draft of a sequence that begins to use it, unless they share cores."""
        if self.team is None:
            # In mode `sd` the draft publishes only while the target waits.
            self._track(sequence, sequence.round == 0 or sequence.speculation.mode == "sd")

    def admit_one(self, sequences: Items[Sequence]) -> Sequence | None:
        """Tell the draft of the next sequence as it was before its present outcome; return that sequence.

        One at a time, as the draft computes its text. None of the `sequences` may be in verification with draft tokens,
        which a draft that knows committed tokens alone cannot follow. A draft that has lost messages is told to start
        over instead."""
        if not self._hears:
            if self.epoch is not None and not self._told_to_rejoin:
                self._told_to_rejoin = self._send(Rejoin())
            return None
        for sequence in sequences:
            serves = sequence.speculation.mode in self.modes and self.tracked.read(sequence.owner)
            if serves and not sequence.proposal and self.tracked.may_return(sequence.request, self._now):
                if not self._track(sequence, sequence.speculation.mode == "sd", back=1):
                    return None
                sequence.cache = "first_round"
                return sequence
        return None

    def works_ahead(self, sequences: Items[Sequence]) -> bool:
        """Return True if the draft works ahead in the next verification; else use its cores too."""
        drafts = self.breaker.state != "open"
        ahead = drafts and any(s.request in self.tracked and s.speculation.mode == "ssd" for s in sequences)
        if self.team is not None:
            self.team.use(all_cores=not ahead)
        return ahead

    # -- what the draft shows -------------------------------------------------------------------------------------

    def find(self, sequence: Sequence, key: Key, most: int) -> Cached | None:
        """Propose up to `most` tokens for `key`, if the board has more than proposed; return what it has."""
        found = self.board.find(sequence.slot, key, most)
        if found is None or len(found.ids) <= len(sequence.proposal):
            return found
        ids, probs = found.ids, None
        if sequence.rule.needs_draft_probs:
            if self._draft_probs is None:
                return found
            probs = self._draft_probs.read(sequence.slot, found.entry, key, ids)
            found = found._replace(ended=found.ended and len(probs) >= len(ids))
            ids = ids[: len(probs)]
        if len(ids) > len(sequence.proposal):
            sequence.proposal, sequence.draft_probs = ids, probs
        return found

    def note_shown(self, request: int, anything: bool, waited: float = 0.0) -> None:
        """Note if the draft had anything for a request; one given up is released, and told again later."""
        self.seen.shown |= anything
        if self.breaker.state != "open" and not self.tracked.note_shown(request, anything, waited, self._now):
            self.tell(Release([request]))

    def note_wait(self, seconds: float, in_vain: bool) -> None:
        """Note the lost `seconds` of a wait; `in_vain`: the draft is `stalled` until it makes progress."""
        self.seen.lost = seconds
        self._silent_since = self.board.telemetry().progress if in_vain else None

    def end_round(self, now: float, verify_s: float) -> None:
        """End a round: tell the breaker what it showed. A verification takes `verify_s` seconds.

        If the breaker is open, release all requests, unless the draft is stalled: it has their texts."""
        self._now = now
        self.still_s(now)
        progress, rejected = self.board.telemetry().progress, self.board.rejected
        self.seen.ticked, self.seen.rejected = progress != self._progress, rejected != self._rejected
        self.seen.reading = self.tracked.reading
        was_open = self.breaker.state == "open"
        self.breaker.round(self.seen, now, verify_s)
        self.seen, self._progress, self._rejected = Seen(), progress, rejected
        if was_open and self.breaker.state == "closed":
            self.tracked.resume(now)
        if self.breaker.state == "open" and not self.breaker.briefly_stalled and (tracked := self.tracked.clear()):
            self.tell(Release(tracked))

    def announce(self) -> None:
        """Log a change of state: the breaker's at most once a minute."""
        before, state = self._announced, self.state
        if state in (before, "half_open"):
            return
        if state == "open" or (state == "up" and before == "open"):
            if self._now < self._next_warning:
                return
            self._next_warning = self._now + _WARNING_S
            reason = f"goes on without the draft: {self.breaker.reason}"
            log.warning("%s", reason if state == "open" else "the draft is of use again")
        else:
            log.info("the draft is %s, was %s", state, before)
        self._announced = state
