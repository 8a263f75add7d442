"""Decides when a draft is left alone and tried again, by a cumulative sum test (Page, 1954).

It reads no clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["closed", "open", "half_open"]

# Most that a draft in use, or on trial, may cost beyond what it brings: seconds of waits, or verifications where these
# take longer. A wait in vain (`ssd.verifier.missed_rows`) is shorter than `_COST_S`: a lost moment alone opens nothing.
_COST_S, _TRIAL_COST_S = 0.25, 0.05
_COST, _TRIAL_COST = 3.0, 0.5
# Assumed cost of verifying a row's draft tokens, in verifications. Fewer accepted tokens a round never pay.
_VERIFIED = 0.125
# Used where the draft's gain is measured: verifications that it may lose against plain decoding while in use; and that
# it may lose, or must win, on trial. A draft that does neither in time is left alone.
_DEFICIT, _TRIAL_DEFICIT = 8.0, 4.0
# Seconds without any entry after which a draft is of no use.
UNSEEN_S = 2.0
# Seconds without progress after which a draft is taken for dead. On a busy machine a process gets its turn within tens
# of milliseconds, and one that has used up its CPU quota within 0.1 s, the period of these quotas.
_SILENT_S = 0.25
_NO_PROGRESS = "there is no sign of life"
# Most seconds that a round counts for: if the target itself was stopped for long, one look proves nothing.
_ROUND_S = 0.1
_FIRST_BACK_OFF_S, _LONGEST_BACK_OFF_S = 0.25, 32.0
# Longest next back-off of a draft whose stall is forgiven once it has ended: three in a row.
_FORGIVEN_S = 1.0
# The next back-off halves when the draft was in use for `_PROOF` times as long. Otherwise a draft that is late in
# bursts, as on a busy machine, would be given up and taken back all the time.
_PROOF = 2


@dataclass
class Seen:
    """Evidence of one round about the draft, which tracked `rows` of its outcomes.

    `shown`: the board had something for a row. `ticked`: the draft made progress. `reading`: it may still compute a
    text. `lost`: seconds waited in vain, or beyond what should pay. `rejected`: something on the board was unsound.
    `drafted` rows verified draft tokens; `accepted` tokens were right. `gain`: verifications won against plain
    decoding, if measured."""

    rows: int = 0
    shown: bool = False
    ticked: bool = False
    reading: bool = False
    lost: float = 0.0
    rejected: bool = False
    drafted: int = 0
    accepted: int = 0
    gain: float | None = None

    @property
    def cost(self) -> float:
        """Return the cost of the draft's tokens less their gain, in verifications, without waits."""
        return self.rejected + (_VERIFIED * self.drafted - self.accepted) / self.rows


class Breaker:
    """A circuit breaker: closed while the draft is of use, else open, half open while one request tries.

    The session tells it of every round. `reason`: why it is open; after a stall it closes with the draft's next
    progress."""

    def __init__(self) -> None:
        self.state: State = "closed"
        self.reason, self._stalled = "", False
        self._now: float | None = None
        self._back_off = self._next_back_off = _FIRST_BACK_OFF_S
        self._try_at = self._debt = self._useless = self._silent = self._unseen = self._in_state = 0.0
        self._deficit = 0.0  # verifications lost against plain decoding

    @property
    def patient(self) -> bool:
        """Return True if the draft is in use and has lost no time."""
        return self.state == "closed" and self._debt == 0

    @property
    def briefly_stalled(self) -> bool:
        """Return True while the draft made no progress for so short a time that it keeps its requests."""
        return self.state == "open" and self._stalled and (self._now or 0.0) < self._try_at

    @property
    def _forgives(self) -> bool:
        return self.state == "closed" and self._next_back_off <= _FORGIVEN_S

    def admits(self, tracked: int) -> bool:
        """Return True if the draft, which tracks `tracked` requests, may be told of another."""
        return self.state == "closed" or (self.state == "half_open" and tracked == 0)

    def round(self, seen: Seen, now: float, verify_s: float) -> None:
        """Note a round that ended at `now`; a verification takes `verify_s`."""
        lasted = 0.0 if self._now is None else min(now - self._now, _ROUND_S)
        self._now = now
        if self.state == "open":
            if self._stalled and seen.ticked:
                self._enter("closed")
            elif not self._stalled and now >= self._try_at:
                self.try_again()
            return
        if self._debt and seen.ticked and self._silent >= _SILENT_S and self._forgives:  # it stalled as it read
            self._debt = self._unseen = 0.0
            self._next_back_off *= 2
        self._silent = 0.0 if seen.ticked else self._silent + lasted * bool(seen.rows)
        if seen.rows:
            self._in_state += lasted
            self._unseen = 0.0 if seen.shown else self._unseen + lasted
            self._debt = max(0.0, self._debt + seen.lost + seen.cost * verify_s)
            self._useless = max(0.0, self._useless + seen.cost)
            self._deficit -= seen.gain or 0.0
            if self.state == "closed":
                self._deficit = max(0.0, self._deficit)
            proved = bool(seen.accepted) if seen.gain is None else self._deficit <= -_TRIAL_DEFICIT
            if self.state == "half_open" and proved:
                self._enter("closed")
            elif reason := self._complaint(seen, verify_s):
                self._open(reason, now)
            elif self.state == "closed" and self._in_state >= _PROOF * self._next_back_off:
                self._next_back_off = max(_FIRST_BACK_OFF_S, self._next_back_off / 2)
                self._in_state = 0.0

    def try_again(self) -> None:
        self._enter("half_open")

    def _complaint(self, seen: Seen, verify_s: float) -> str:
        """Return why the draft should be left alone; empty if it should not."""
        trial = self.state == "half_open"
        most, most_s = (_TRIAL_COST, _TRIAL_COST_S) if trial else (_COST, _COST_S)
        if self._useless >= most:
            return "what it writes is not sound" if seen.rejected else "its tokens are not accepted"
        if self._deficit >= (_TRIAL_DEFICIT if trial else _DEFICIT):
            return "decoding without it is faster"
        if self._debt >= max(most_s, most * verify_s):
            return "waiting for it does not pay"
        # A draft that reads a text takes long for a step.
        if self._silent >= (UNSEEN_S if seen.reading else _SILENT_S):
            return _NO_PROGRESS
        if self._unseen >= UNSEEN_S:
            return "nothing came from it"
        if trial and self._in_state >= max(UNSEEN_S, self._back_off):
            return "nothing came from it" if seen.gain is None else "decoding without it is as fast"
        return ""

    def _open(self, reason: str, now: float) -> None:
        self.reason, self._back_off = reason, self._next_back_off
        self._stalled = reason == _NO_PROGRESS and self._forgives
        self._next_back_off = min(_LONGEST_BACK_OFF_S, 2 * self._back_off)
        self._try_at = now + (UNSEEN_S if self._stalled else self._back_off)
        self._enter("open")

    def _enter(self, state: State) -> None:
        self.state = state
        self._deficit = self._debt = self._useless = self._silent = self._unseen = self._in_state = 0.0
