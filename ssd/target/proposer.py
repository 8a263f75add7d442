"""Where draft tokens come from, seen from the target: advice that may be late, wrong or missing (contract C1)."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple, Protocol

from ssd.execution.meanwhile import Task, nothing
from ssd.ipc.board import Cached
from ssd.ipc.messages import DraftState
from ssd.speculation.acceptance import Outcome
from ssd.target.sequence import Cache, Sequence


class Result(NamedTuple):
    """The outcome of one verification: `base` committed tokens before it; `sequence` has committed it already.
    `drafted` draft tokens were verified, and `cache` is what the speculation cache had for it. `taken`: the next one
    runs already, with these draft tokens."""

    sequence: Sequence
    round: int
    base: int
    drafted: int
    outcome: Outcome
    cache: Cache
    taken: Cached | None = None


class Counters(NamedTuple):
    """Counted so far: tree steps of the draft and the seconds in them, and look-ups that found nothing but what answers
    another outcome."""

    steps: int = 0
    step_seconds: float = 0.0
    stale: int = 0

    @property
    def mean_step_seconds(self) -> float:
        """Mean time of a tree step, 0 when there is none to report."""
        return self.step_seconds / max(1, self.steps)


class Proposer(Protocol):
    """Fills `Sequence.proposal`, nothing else. No method may block longer than its own small deadline (C3)."""

    @property
    def state(self) -> DraftState:
        """Whether there is a draft, as far as is known, and whether it is used."""

    @property
    def rejected(self) -> int:
        """How often what the draft had was not sound."""

    @property
    def counters(self) -> Counters:
        """What has been counted of the draft."""

    def admit(self, sequence: Sequence) -> None:
        """A sequence begins, or begins again: its committed tokens are all there is to know."""

    def outcomes(self, results: Items[Result]) -> None:
        """One step's outcomes: propose what is cached for them."""

    def settle(self, sequences: Items[Sequence], meanwhile: Task = nothing) -> float:
        """The next launch is near: wait for missing proposals as long as it pays; returns the seconds waited."""

    def release(self, sequences: Items[Sequence]) -> None:
        """Sequences that ended or lost their pages."""


class NoProposer:
    """Plain decoding."""

    state: DraftState = "down"
    rejected = 0
    counters = Counters()

    def admit(self, sequence: Sequence) -> None:
        pass

    def outcomes(self, results: Items[Result]) -> None:
        pass

    def settle(self, sequences: Items[Sequence], meanwhile: Task = nothing) -> float:
        return 0.0

    def release(self, sequences: Items[Sequence]) -> None:
        pass
