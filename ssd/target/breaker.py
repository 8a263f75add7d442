"""A circuit breaker for the draft: closed while it is of use, open while it is not, half open while one request tries.

Pure: rounds are told, nothing is measured here. What the draft costs is counted in verifications, of which plain
decoding gets a token for every row: a draft that is stopped, slow or wrong is left alone before it has cost more than a
few of them, and tried again after a back-off (cumulative sum test: Page, 1954).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["closed", "open", "half_open"]

# In verifications: what a draft may cost more than it brings before it is left alone, and on trial.
_DEBT, _TRIAL_DEBT = 3.0, 0.5
# What verifying draft tokens is taken to cost; fewer accepted tokens a round do not pay on any machine.
_VERIFIED = 0.125
# Rounds: that must have cost something, so that a hiccup is none; without any sign of life; with nothing on the board,
# as while it computes a long text.
_COSTLY, _STILL, _UNSEEN = 3, 3, 32
# Rounds.
_FIRST_BACK_OFF, _LONGEST_BACK_OFF = 32, 512
# Being in use for so many times its next back-off halves that. Otherwise a draft that is late in bursts, as on a busy
# machine, would be given up and taken back all the time.
_PROOF = 2


@dataclass
class Seen:
    """What a round showed of the draft: it had `rows` outcomes of requests that the draft follows.

    `shown`: the board had something for one of these. `ticked`: the draft's progress counter has moved. `reading`: the
    draft may still be computing the text of a request. `waited` is in verifications, and `in_vain` if nothing came.
    `rejected`: something on the board was not sound. Of the rows `drafted` verified tokens of the draft, `accepted` of
    which were right.
    """

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
        """In verifications, less what it brought. A wait in vain is one missed round, however long it was. One that is
        not is what was asked for (mode `sd`) or was thought to pay, unless it was longer than the round it served."""
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
    """`round` is told of every round; `state` and `admits` follow from that, and `reason` says why it is open."""

    def __init__(self) -> None:
        self.state: State = "closed"
        self.reason = ""
        self._debt = 0.0
        self._costly = self._still = self._unseen = self._rounds = 0
        self._back_off = self._next_back_off = _FIRST_BACK_OFF

    @property
    def patient(self) -> bool:
        """Whether there is no reason to wait for it less than usual."""
        return self.state == "closed" and self._debt == 0

    def admits(self, followed: int) -> bool:
        """Whether the draft, which follows so many requests, may be told of another one."""
        return self.state == "closed" or (self.state == "half_open" and followed == 0)

    def round(self, seen: Seen) -> None:
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
        """It may show with one request that it is of use again."""
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
