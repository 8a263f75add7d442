"""The proposer: where the target gets draft tokens from, which may be late, wrong or missing."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

from ssd.execution.meanwhile import Task, nothing
from ssd.ipc.board import Cached
from ssd.ipc.messages import DraftState, LinkLoad
from ssd.ipc.public import Source
from ssd.speculation.acceptance import Outcome
from ssd.verifier.sequence import Cache, Sequence


class Result(NamedTuple):
    """The outcome of one verification, which `sequence` has committed already.

    `base` tokens were committed before it. `taken`: draft tokens of the next verification, which runs already."""

    sequence: Sequence
    round: int
    base: int
    drafted: int
    outcome: Outcome
    cache: Cache
    taken: Cached | None = None
    source: Source = "draft"


class NextDraft(NamedTuple):
    """Where the next verification of a row has its draft tokens from, at most `most`.

    It is the board, by a draft of this `epoch`, or with `inline` a draft in this process."""

    epoch: int = 0
    most: int = 0
    inline: bool = False


class Counters(NamedTuple):
    """Totals so far: the draft's tree `steps`, their seconds, late `compiles`, unsound entries `rejected`.

    `stale` look-ups found only outdated entries. `link`: to a remote draft."""

    steps: int = 0
    step_seconds: float = 0.0
    stale: int = 0
    link: LinkLoad | None = None
    rejected: int = 0
    compiles: int = 0

    @property
    def mean_step_seconds(self) -> float:
        return self.step_seconds / max(1, self.steps)


class Proposer:
    """Fills `Sequence.proposal` and names its `source`, nothing else. This one is plain decoding.

    The engine calls it. No method may block for long."""

    @property
    def state(self) -> DraftState:
        return "down"

    @property
    def counters(self) -> Counters:
        return Counters()

    @property
    def plan(self) -> str:
        """Return the tuner's choice and reason in a sentence; empty if there is none."""
        return ""

    def asks(self, sequence: Sequence) -> NextDraft | None:
        """Answer `ssd.verifier.overlap.Ask`: no row has draft tokens."""
        return NextDraft()

    def admit(self, sequence: Sequence) -> None:
        """Note that a sequence begins, or begins again with its committed tokens."""

    def outcomes(self, results: Items[Result]) -> None:
        """Propose what is cached for the outcomes of one step."""

    def settle(self, sequences: Items[Sequence], meanwhile: Task = nothing) -> float:
        """Wait for missing proposals before a launch as long as it pays; return the seconds."""
        return 0.0

    def replan(self) -> None:
        """Judge the present plan, and choose the next: milliseconds of host work now and then."""

    def release(self, sequences: Items[Sequence]) -> None:
        """Forget sequences that ended or lost their pages."""

    def drafts(self, sequence: Sequence) -> bool:
        """Return True if a draft in this process may bring tokens for a sequence."""
        return False

    def leave(self, sequences: Items[Sequence]) -> None:
        """Forget sequences that a draft in this process does not serve."""
